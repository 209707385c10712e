"""TFLOPs against Sec/it: what a row's calculator gives, and which calculators fit a row."""

from __future__ import annotations

from typing import Any, get_args

from trimaran.layout.flops import iteration_flops
from trimaran.nouns.flops_formula import FlopsFormula
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.store.importers.draft import Draft

FORMULAS: tuple[FlopsFormula, ...] = get_args(FlopsFormula)
# The documents' own rows agree with their calculators within 0.7%; the oldest and the newest differ by 3%.
AGREES = 0.015


def resolve_family(draft: Draft) -> None:
    """A calculator's family becomes the member for the row's recompute: 4 passes with full, else 3."""
    family = draft.cells.get("flops_formula")
    if family in ("megatron_eq3", "2kN"):
        draft.cells["flops_formula"] = f"{family}_k{4 if draft.cells.get('recompute') == 'full' else 3}"


def expected_tflops(draft: Draft, formula: Any = None) -> float | None:
    """TFLOP/s a device that the calculator gives for the row's time; None where it cannot be known."""
    name = formula or draft.cells.get("flops_formula")
    seconds, devices = draft.number("sec_per_it"), draft.number("devices")
    flops = _flops(draft, name)
    if flops is None or not seconds or not devices:
        return None
    return flops / seconds / devices / 1e12


def agreement(draft: Draft, formula: Any = None) -> float | None:
    """Printed TFLOPs over what the calculator gives; None where either is missing."""
    printed, expected = draft.number("tflops"), expected_tflops(draft, formula)
    return printed / expected if printed and expected else None


def tolerance(draft: Draft) -> float:
    """How far `agreement` may be from 1: the calculators' own scatter and the digits printed."""
    return AGREES + sum(_half_digit(draft.number(name)) for name in ("tflops", "sec_per_it"))


def fitting_formulas(draft: Draft) -> list[str]:
    """The calculators that reproduce the row's TFLOPs."""
    ratios = {name: agreement(draft, name) for name in FORMULAS}
    return [name for name, ratio in ratios.items() if ratio is not None and abs(ratio - 1) <= tolerance(draft)]


def layers_by_flops(draft: Draft) -> float | None:
    """The layers for which the calculator gives the printed TFLOPs (they enter it linearly)."""
    printed, seconds, devices = draft.number("tflops"), draft.number("sec_per_it"), draft.number("devices")
    one_layer, two_layers = (_flops(draft, draft.cells.get("flops_formula"), layers) for layers in (1, 2))
    if one_layer is None or two_layers is None or not printed or not seconds or not devices:
        return None
    per_layer = two_layers - one_layer
    return (printed * 1e12 * seconds * devices - (one_layer - per_layer)) / per_layer


def _flops(draft: Draft, formula: Any, layers: int | None = None) -> float | None:
    cells = {name: draft.count(name) for name in ("layers", "hidden", "heads", "vocab", "seq_len", "gbs")}
    if layers is not None:
        cells["layers"] = layers
    if formula not in FORMULAS or any(value is None or value <= 0 for value in cells.values()):
        return None
    ffn, kv_heads = draft.count("ffn_hidden", 0), draft.count("kv_heads", 0)
    seq_len, gbs = cells.pop("seq_len"), cells.pop("gbs")
    try:
        model = Model.model_validate({**cells, "ffn_hidden": ffn, "kv_heads": kv_heads, "max_positions": seq_len})
        workload = Workload.model_validate({"model": model, "seq_len": seq_len, "global_batch": gbs})
    except ValueError:
        return None  # a shape that is no model is told by the rules that check models
    return iteration_flops(workload, draft.count("tp", 1) or 1, formula)


def _half_digit(value: float | None) -> float:
    """Half a unit of the last decimal printed, relative to the value."""
    if not value:
        return 0.0
    _, _, decimals = f"{value:.10g}".partition(".")
    return 0.5 * 10.0 ** -len(decimals) / value
