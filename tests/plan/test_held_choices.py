"""Choices that are held at several values, and those that a search leaves alone until somebody asks."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from trimaran.api import plan
from trimaran.files.catalogue import load_model
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.planner import WORTH_OFFLOADING


def fastest(model: str, cluster: str, gbs: int, devices: int, **fixed: object) -> float:
    """Seconds of the fastest layout with what is fixed, inf where none fits."""
    try:
        found = plan(model, cluster, gbs, seq=4096, devices=devices, stack="megatron-core", fix=fixed, top=5)
    except TrimaranError:
        return math.inf
    return min(entry.sec_per_it for entry in found.entries)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "cluster", "gbs", "devices", "choice", "values"),
    [
        ("mixtral-8x7b", "dgx-h100", 256, 64, "precision", ("bf16", "fp8")),
        ("mixtral-8x7b", "dgx-h100", 256, 64, "etp", (1, 2)),
        # what holds least, or takes least, is not known by the order of the words
        ("llama3.1-70b", "dgx-h100", 64, 16, "offload", ("none", "optimizer")),
        ("llama3.1-8b", "dgx-h100", 64, 8, "recompute", ("mlp", "selective")),
    ],
)
def test_of_several_values_the_best_of_each_is_found_in_any_order(
    model: str, cluster: str, gbs: int, devices: int, choice: str, values: tuple[object, ...]
) -> None:
    alone = [fastest(model, cluster, gbs, devices, **{choice: value}) for value in values]
    for order in permutations(values):
        together = fastest(model, cluster, gbs, devices, **{choice: order})
        assert together <= min(alone) * (1 + 1e-9), (order, together, alone)


def test_a_share_of_layers_that_is_held_is_made_again_whole() -> None:
    """The best was recompute-none4, which makes nothing again, as if four were not held."""
    alone, either = (
        [entry.layout for entry in plan("llama3-8b", "dgx-h100", 128, devices=64, fix=fix, top=200).entries]
        for fix in ({"recompute_every": 4}, {"recompute_every": (4, 1)})
    )
    assert {(layout.recompute, layout.recompute_every) for layout in alone} == {("full", 4)}
    assert {layout.recompute_every for layout in either if layout.recompute != "full"} == {1}
    fixed = {"recompute": "selective", "recompute_every": 2}
    with pytest.raises(TrimaranError, match="recompute_every 2 is of layers that are made again whole, but recompute"):
        plan("llama3-8b", "dgx-h100", 128, devices=64, fix=fixed)


def test_a_mixture_without_dense_layers_is_not_ranked_twice_with_a_dense_mlp_computed_again() -> None:
    for model, dense in (("mixtral-8x7b", False), ("gpt-oss-120b", False), ("deepseek-v3", True), ("llama3-8b", True)):
        assert ("dense" in load_model(model).kinds) == dense
    found = plan("mixtral-8x7b", "dgx-a100-80gb", 256, seq=4096, devices=32, stack="megatron-core")
    assert all(entry.layout.recompute != "mlp" for entry in found.entries)
    answers = [(entry.sec_per_it, entry.mem_gib) for entry in found.entries]
    assert len(set(answers)) == len(answers)


def test_a_plan_that_recomputes_whole_layers_says_what_offloading_would_gain() -> None:
    found = plan("qwen3-235b-a22b", "gb200-nvl72", 1024, seq=4096, devices=24, top=1)
    assert found.best.layout.recompute == "full" and found.best.layout.offload == "none"
    (note,) = [note for note in found.notes if "host's memory" in note]
    assert note.endswith("--fix offload=optimizer searches such layouts")
    asked = plan("qwen3-235b-a22b", "gb200-nvl72", 1024, seq=4096, devices=24, top=1, fix={"offload": "optimizer"})
    assert asked.best.sec_per_it * WORTH_OFFLOADING < found.best.sec_per_it
    assert f"{found.best.sec_per_it / asked.best.sec_per_it:.1f} times as fast" in note
    assert not [note for note in asked.notes if "host's memory" in note]
