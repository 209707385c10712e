"""What a configuration that is read costs: as a plan of the same does, by the software that it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimaran.api import workload_of
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import load_stack
from trimaran.layout.notation import parse_layout
from trimaran.planner.configs.cost import cost_of
from trimaran.planner.configs.resolve import Given
from trimaran.planner.export.exporters import export


def test_a_script_of_megatron_deepspeed_costs_what_a_plan_for_it_does(tmp_path: Path) -> None:
    """Not what Megatron-Core does, which needs no memory for scores: of BLOOM 37.6 GiB were told instead of 57.5."""
    workload, stack = workload_of("bloom-176b", 2048), load_stack("megatron-deepspeed")
    asked = parse_layout("dp8,tp4,pp12,mbs2,zero1,recompute-full,bf16")
    file = tmp_path / "bloom.sh"
    file.write_text(export(asked, workload, stack, "megatron-deepspeed"))
    cost = cost_of(file, "auto", Given("jean-zay-a100-80gb", devices=384, model="bloom-176b"))
    planned = Case.of(workload, cost.case.cluster, stack.model_copy(update={"dropout": False}))  # as the script says
    assert cost.trainer == cost.case.stack.name == "megatron-deepspeed"
    expected = estimate(planned, asked, simulate=True)
    assert (cost.estimate.sec_per_it, cost.estimate.mem_gib) == (expected.sec_per_it, expected.mem_gib)


def test_the_precision_in_which_gradients_are_summed_is_read(tmp_path: Path) -> None:
    """Megatron's in fp32 unless told otherwise, DeepSpeed's in the model's precision."""
    layout, workload = parse_layout("dp4,tp2,sp,mbs1,zero1,bf16"), workload_of("llama3-8b", 64)
    script = tmp_path / "train.sh"

    def gradients_gib(text: str, **given: object) -> float:
        script.write_text(text)
        return cost_of(script, "auto", Given("dgx-h100", devices=8, **given)).estimate.memory[0].gradients  # type: ignore[arg-type]

    wide = export(layout, workload, load_stack("megatron-core"), "megatron-lm")
    narrow = wide.replace("--bf16", "--bf16 --grad-reduce-in-bf16")
    assert gradients_gib(narrow) == pytest.approx(gradients_gib(wide) / 2)

    script = tmp_path / "ds.json"
    layout = parse_layout("dp8,mbs1,zero1,bf16")
    wide = export(layout, workload, load_stack("deepspeed"), "deepspeed")
    stated = json.loads(wide)
    del stated["data_types"]
    of_8b = {"model": "llama3-8b", "seq_len": 8192}
    assert gradients_gib(json.dumps(stated), **of_8b) == pytest.approx(gradients_gib(wide, **of_8b) / 3)


def test_what_a_model_has_besides_is_told_beside_its_cost(tmp_path: Path) -> None:
    granite = {
        "model_type": "granite", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
        "intermediate_size": 1024, "vocab_size": 5120, "residual_multiplier": 0.22,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(granite))
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}))
    given = Given("dgx-h100", model=str(tmp_path / "config.json"), devices=8, seq_len=2048)
    remarks = cost_of(tmp_path / "ds.json", "auto", given).remarks
    assert ("not counted", "residual_multiplier 0.22 of the model") in remarks
