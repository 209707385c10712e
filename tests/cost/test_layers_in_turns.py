"""Claims about models whose layers have experts in turns with an MLP alone, such as Llama 4 Maverick."""

from __future__ import annotations

import pytest

from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate, estimate_many
from trimaran.cost.estimates import Estimate
from trimaran.cost.grid import LayoutGrid
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload


def case_of(model: Model) -> Case:
    workload = Workload(model=model, seq_len=4096, global_batch=256)
    return Case.of(workload, load_cluster("dgx-h100"), load_stack("megatron-core"))


def predicted(case: Case, text: str) -> Estimate:
    return estimate(case, parse_layout(text))


def in_turns(every: int, layers: int = 48) -> Model:
    """Qwen3-30B-A3B with experts in every n-th layer alone, and an MLP of another width between."""
    whole = load_model("qwen3-30b-a3b")
    return Model.model_validate(whole.model_dump() | {"layers": layers, "experts_every": every, "ffn_hidden": 6144})


@pytest.mark.parametrize(
    "text", ["dp8,pp1,ep8", "dp4,pp4,ep4", "dp2,tp2,sp,pp4,ep4,etp1,vpp2", "dp8,cp2,ep4,dispatch-deepep"]
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_of_experts_between_dense_ones_take_what_both_kinds_take(text: str, recompute: str) -> None:
    """All layers with experts and all with an MLP alone are told apart from layers in turns by the mean of both."""
    layout = f"{text},mbs1,zero1,recompute-{recompute},bf16"
    turns, experts = in_turns(2), in_turns(1)
    few = in_turns(48)  # one layer of all has experts
    each = {
        name: predicted(case_of(model), layout)
        for name, model in (("turns", turns), ("experts", experts), ("few", few))
    }
    busy = {
        name: sum(getattr(e.time, part) for part in ("forward", "backward", "recompute", "tp", "ep", "cp"))
        for name, e in each.items()
    }
    # of n layers 1 in 48 has experts: a line through 1 and 1/48 passes 1/2
    between = busy["few"] + (busy["experts"] - busy["few"]) * (1 / 2 - 1 / 48) / (1 - 1 / 48)
    assert busy["turns"] == pytest.approx(between, rel=0.02)
    assert each["turns"].mem_gib < each["experts"].mem_gib


def test_parameters_of_layers_in_turns_are_all_on_some_rank() -> None:
    for every, text in ((2, "dp1,tp1,pp4"), (3, "dp1,tp1,pp8"), (2, "dp1,tp1,pp1")):
        model = in_turns(every)
        stages = predicted(case_of(model), f"{text},mbs1,bf16_pure").memory
        held = sum(stage.weights for stage in stages) * 2**30 / 2
        assert held == pytest.approx(model.parameters, rel=0.002)
        mixtures = 48 // every
        assert model.kinds == {"dense": 48 - mixtures, "experts": mixtures}


def test_a_stage_of_part_of_a_turn_is_taken_to_hold_the_layer_with_experts() -> None:
    one_each = predicted(case_of(in_turns(2)), "dp1,tp1,pp48,mbs1,bf16").memory[1]
    alone = predicted(case_of(in_turns(1)), "dp1,tp1,pp48,mbs1,bf16").memory[1]
    assert one_each.weights == alone.weights


def test_layers_in_turns_are_priced_alike_alone_and_in_a_grid() -> None:
    case = case_of(in_turns(2))
    texts = ["dp8,pp1,ep8,mbs1,bf16", "dp4,pp3,ep4,mbs1,zero1,bf16", "dp2,tp2,sp,pp5,ep4,etp1,mbs2,bf16"]
    layouts = [parse_layout(text) for text in texts]
    many = estimate_many(case, LayoutGrid.from_layouts(layouts, case.workload, case.stack))
    for row, layout in enumerate(layouts):
        one = estimate(case, layout)
        assert (one.sec_per_it, one.mem_gib) == pytest.approx((many.sec_per_it[row], many.mem_gib[row]))


def test_layers_come_in_whole_turns_and_first_or_between() -> None:
    whole = load_model("deepseek-v2-lite").model_dump()
    for change, says in (
        ({"dense_layers": 0, "experts_every": 2}, "layers 27 is not a multiple of experts_every 2"),
        ({"experts_every": 3}, "dense_layers is 1 and experts_every 3"),
    ):
        with pytest.raises(ValueError, match=says):
            Model.model_validate(whole | change)
    with pytest.raises(ValueError, match="experts_every is 2, but experts is 0"):
        Model.model_validate(load_model("llama3-8b").model_dump() | {"experts_every": 2})
