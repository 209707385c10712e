"""Entries of a plan: what a predicted layout costs in time, memory and money."""

from __future__ import annotations

import math

from trimaran.cost.case import Case
from trimaran.cost.estimates import Estimate
from trimaran.layout.flops import OWN_FORMULA, days_to_train, mfu, tflops_per_device
from trimaran.layout.layout import Layout
from trimaran.layout.places import mean_of_devices, nodes_of, peak_tflops
from trimaran.planner.explain.bottleneck import bottleneck
from trimaran.planner.plan import Entry


def entry_of(
    rank: int,
    layout: Layout,
    case: Case,
    predicted: Estimate,
    chance: float,
    variants: int,
) -> Entry:
    """The entry of a layout that is predicted so; the case's workload has the batch that it is planned with."""
    workload, cluster, error = case.workload, case.cluster, case.calibration.time_error
    seconds, devices = predicted.sec_per_it, layout.devices
    iterations, price = workload.iterations, mean_of_devices(layout, cluster, lambda nodes: nodes.price_per_device_hour)
    days = None if iterations is None else days_to_train(seconds, iterations)
    return Entry(
        rank=rank,
        layout=layout,
        devices=devices,
        nodes=nodes_of(layout, cluster),
        global_batch=workload.global_batch,
        estimate=predicted,
        sec_per_it_low=seconds * math.exp(-error),
        sec_per_it_high=seconds * math.exp(error),
        tokens_per_s=workload.tokens_per_step / seconds,
        tflops=tflops_per_device(workload, layout.tp, devices, seconds, OWN_FORMULA),
        flops_formula=OWN_FORMULA,
        mfu=mfu(workload, layout.tp, devices, seconds, peak_tflops(layout, cluster) or math.inf),
        days=days,
        cost=None if price is None or days is None else days * 24.0 * devices * price,
        cost_per_million_tokens=None
        if price is None
        else seconds / 3600.0 * devices * price / workload.tokens_per_step * 1e6,
        rival_chance=chance,
        variants=variants,
        bottleneck=bottleneck(layout, case, predicted),
    )
