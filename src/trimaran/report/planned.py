"""A plan as tables: the ranking in the documents' columns, and everything as stable JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trimaran.layout.flops import COUNTED, OWN_FORMULA, aggregate_pflops
from trimaran.nouns.text import figure
from trimaran.planner.goodput.forecast import Forecast
from trimaran.planner.plan import Entry, Plan
from trimaran.planner.ramp_up import RampUpSchedule
from trimaran.report.layouts import PLANNED, layout_cells, layout_fields, unused
from trimaran.report.tables import Field, Format, render

FIELDS = (
    Field("rank", "#"),
    Field("nodes", "Nodes"),
    Field("devices", "Devices"),
    *layout_fields(PLANNED),
    Field("mem_gib", "Mem", ".1f", "GiB"),
    Field("sec_per_it", "Sec/it", ".3g"),
    Field("between", "Between", left=True),
    Field("tflops", "TFLOPs", ".4g"),
    Field("mfu", "MFU", ".1%"),
    Field("pflops", "PetaFLOPs", ".3g"),
    Field("days", "Days", ".1f"),
    Field("cost", "Cost", ",.0f"),
    Field("notes", "Notes", left=True),
)

RAMP_UP_FIELDS = (
    Field("nodes", "NNODES"),
    Field("batch", "BS"),
    Field("dp", "DP"),
    Field("mbs", "MBS"),
    Field("samples", "Samples", ","),
    Field("iterations", "Iterations", ","),
    Field("hours", "Hours", ".1f"),
)


def records(plan: Plan) -> list[dict[str, Any]]:
    """One record per ranked layout, for a printed table or CSV."""
    left_out = unused(PLANNED, [entry.layout for entry in plan.entries])
    return [_record(entry, entry.rank <= plan.cannot_tell_apart, left_out) for entry in plan.entries]


def _record(entry: Entry, alike: bool, left_out: frozenset[str]) -> dict[str, Any]:
    layout = entry.layout
    return {
        "rank": entry.rank,
        "nodes": entry.nodes,
        "devices": entry.devices,
        **dict(layout_cells(PLANNED, layout, entry.global_batch, left_out)),
        "mem_gib": entry.mem_gib,
        "sec_per_it": entry.sec_per_it,
        "between": f"{figure(entry.sec_per_it_low)} to {figure(entry.sec_per_it_high)}",
        "tflops": entry.tflops,
        "mfu": entry.mfu,
        "pflops": aggregate_pflops(entry.tflops, entry.devices),
        "days": entry.days,
        "cost": entry.cost,
        "notes": _notes(entry, alike),
        "layout": str(layout),
    }


def _notes(entry: Entry, alike: bool) -> str:
    """What a row has to say beyond its numbers: where it stands, and its bottleneck in two words."""
    standing = "best" if entry.rank == 1 else "may be the best" if alike else ""
    return ", ".join(filter(None, (standing, entry.bottleneck.split(":")[0])))


def headline(plan: Plan, *, assumes_stack: bool = False) -> str:
    """What stands above the table: of which sequences and software the plan is, and whether anybody said so."""
    software = f"{plan.stack} ({plan.software})" if plan.software else plan.stack
    assumed = ", which is assumed: --stack states another" if assumes_stack else ""
    what = f"{plan.model} of {plan.seq_len} tokens a sequence"
    return f"{what} on {plan.devices} devices of {plan.cluster}, for {software}{assumed}"


def explanation(plan: Plan) -> str:
    """What stands below the table: the winner, what to measure, what fell out and why."""
    best = plan.best
    lines = [
        f"best: {best.layout}, predicted {figure(best.sec_per_it)} s/it ({figure(best.sec_per_it_low)} to "
        f"{figure(best.sec_per_it_high)}, {plan.calibrated_by}) and {best.mem_gib:.1f} GiB",
        f"bottleneck: {best.bottleneck}",
    ]
    lines.append(counted((entry.layout.precision, entry.tflops, entry.mfu) for entry in plan.entries))
    if plan.cannot_tell_apart > 1:
        names = "; ".join(map(str, plan.measure))
        more = "or more " if plan.cannot_tell_apart == len(plan.entries) else ""
        lines.append(
            f"{plan.cannot_tell_apart} {more}layouts cannot be told apart (predictions err by {plan.time_error:.0%}); "
            f"measure these {len(plan.measure)}: {names}"
        )
    if plan.nearest_unfit:
        lines.append(f"nearest that does not fit: {plan.nearest_unfit.layout}: {plan.nearest_unfit.sentence}")
    if plan.advice:
        lines.append(f"advice: {plan.advice.sentence}")
    for refusal in plan.refusals:
        fields, valued = " x ".join(refusal.fields), "value" if refusal.combinations == 1 else "values"
        lines.append(
            f"refused by rule {refusal.rule}: {refusal.combinations:,} {valued} of {fields}; e.g. {refusal.example}"
        )
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def counted(rows: Iterable[tuple[str, float, float]]) -> str:
    """What the columns TFLOPs and MFU count, and the peaks that MFU is of; rows are (precision, TFLOPs, MFU)."""
    peaks = dict.fromkeys(f"{tflops / mfu:.4g} TFLOPs in {precision}" for precision, tflops, mfu in rows if mfu)
    return (
        f"TFLOPs and MFU count the model's operations: {COUNTED[OWN_FORMULA]}; "
        f"MFU is TFLOPs over the device's peak{', of ' if peaks else ''}{' and '.join(peaks)}"
    )


def ramp_up_table(schedule: RampUpSchedule, form: Format) -> str:
    """The documents' NNODES x BS x MBS table of a batch ramp-up, and what the growth costs."""
    rows = [
        {
            "nodes": phase.nodes,
            "batch": f"{phase.first_batch}"
            if phase.first_batch == phase.last_batch
            else f"{phase.first_batch} to {phase.last_batch}",
            "dp": phase.layout.dp,
            "mbs": phase.layout.mbs,
            "samples": phase.samples,
            "iterations": phase.iterations,
            "hours": phase.hours,
        }
        for phase in schedule.phases
    ]
    sentences = [
        f"ramp-up: {schedule.hours:.1f} hours with {schedule.restarts} restart{'s' * (schedule.restarts != 1)}, "
        f"{schedule.slower_by:.1%} longer than at the full batch from the start "
        f"({schedule.fixed_batch_hours:.1f} hours)"
    ]
    if schedule.fixed_layout_hours is not None and schedule.restarts:
        sentences.append(f"on the last layout throughout: {schedule.fixed_layout_hours:.1f} hours")
    return "\n".join([render(rows, RAMP_UP_FIELDS, form), *sentences])


def as_json(plan: Plan, schedule: RampUpSchedule | None = None, expected: Forecast | None = None) -> dict[str, Any]:
    """The whole plan as plain data; its keys are documented in docs/json.md and stay."""
    return {
        "model": plan.model,
        "seq_len": plan.seq_len,
        "cluster": plan.cluster,
        "stack": plan.stack,
        "software": plan.software,
        "devices": plan.devices,
        "objective": plan.objective.model_dump(),
        "mem_margin": plan.mem_margin,
        "calibrated_by": plan.calibrated_by,
        "time_error": plan.time_error,
        "evaluated": plan.evaluated,
        "fitting": plan.fitting,
        "cannot_tell_apart": plan.cannot_tell_apart,
        "measure": [str(layout) for layout in plan.measure],
        "layouts": [_entry_json(entry) for entry in plan.entries],
        "nearest_unfit": None
        if plan.nearest_unfit is None
        else {
            "layout": str(plan.nearest_unfit.layout),
            "mem_gib": plan.nearest_unfit.estimate.mem_gib,
            "sec_per_it": plan.nearest_unfit.estimate.sec_per_it,
            "reason": plan.nearest_unfit.sentence,
        },
        "refusals": [refusal.model_dump() for refusal in plan.refusals],
        "advice": None if plan.advice is None else plan.advice.model_dump(),
        "notes": list(plan.notes),
        "ramp_up": None if schedule is None else _schedule_json(schedule),
        "goodput": None if expected is None else expected.model_dump(mode="json"),
    }


def _schedule_json(schedule: RampUpSchedule) -> dict[str, Any]:
    phases = [
        {"layout": str(phase.layout), **phase.model_dump(mode="json", exclude={"layout"})} for phase in schedule.phases
    ]
    return {**schedule.model_dump(mode="json", exclude={"phases"}), "slower_by": schedule.slower_by, "phases": phases}


def _entry_json(entry: Entry) -> dict[str, Any]:
    layout, estimate = entry.layout, entry.estimate
    return {
        "rank": entry.rank,
        "layout": str(layout),
        **layout.model_dump(mode="json", exclude={"stage_split"}),
        "stage_split": list(estimate.stage_split),
        "devices": entry.devices,
        "nodes": entry.nodes,
        "gbs": entry.global_batch,
        "micro_batches": estimate.micro_batches,
        "sec_per_it": estimate.sec_per_it,
        "sec_per_it_low": entry.sec_per_it_low,
        "sec_per_it_high": entry.sec_per_it_high,
        "time_s": estimate.time.model_dump(),
        "mem_gib": estimate.mem_gib,
        "reported_mem_gib": estimate.reported_mem_gib,
        "memory_gib": [stage.model_dump() for stage in estimate.memory],
        "tokens_per_s": entry.tokens_per_s,
        "tflops": entry.tflops,
        "flops_formula": entry.flops_formula,
        "mfu": entry.mfu,
        "days": entry.days,
        "cost": entry.cost,
        "cost_per_million_tokens": entry.cost_per_million_tokens,
        "rival_chance": entry.rival_chance,
        "variants": entry.variants,
        "bottleneck": entry.bottleneck,
    }
