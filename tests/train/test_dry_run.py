"""A dry run follows the trainer's own step: what it traces is what the cost model counts of the same rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch
from typer.testing import CliRunner

from command import tiny_recipe
from trimaran.cli.app import app
from trimaran.cost.case import Case
from trimaran.cost.estimate import memory_per_stage
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.rank_work import rank_work
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.layout import resolve_split
from trimaran.layout.notation import parse_layout
from trimaran.layout.steady import Shortened, shortened
from trimaran.nouns.attention import LatentAttention
from trimaran.nouns.dispatcher import Router
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Schedule
from trimaran.nouns.workload import Workload
from trimaran.protocol.dry_run import TracedRank
from trimaran.protocol.job import TrainJob
from trimaran.recipe.train_settings import TrainSettings
from trimaran.study.torch_programs import run_program
from trimaran.train.model.mixture import dispatch
from trimaran.train.programs.dry_run import trace_rank

GIB = 2.0**30
LLAMA = Model(
    layers=8, hidden=2048, heads=16, kv_heads=8, vocab=32000, ffn_hidden=5632, positions="rotary", norm="rmsnorm",
    mlp="swiglu", bias=False, tied_embedding=False,
)  # fmt: skip
QWEN = LLAMA.model_copy(update={"qk_norm": "head", "sliding_window": 512, "attention_bias": "qkv"})
LATENT = LLAMA.model_copy(
    update={
        "kv_heads": 16, "head_dim": 192,
        "latent_attention": LatentAttention(query_rank=768, kv_rank=512, plain_dim=128, rotary_dim=64, value_dim=128),
    }
)  # fmt: skip
WINDOWED = LLAMA.model_copy(update={"sliding_window": 256})
CAPPED = LLAMA.model_copy(update={"attention_softcap": 50.0})
ALIBI = LLAMA.model_copy(update={"positions": "alibi"})
TIED = LLAMA.model_copy(update={"tied_embedding": True})
MIXTURE = LLAMA.model_copy(update={"layers": 4, "experts": 8, "top_k": 2, "moe_ffn_hidden": 1408})
DEEPSEEK = LATENT.model_copy(
    update={
        "layers": 4, "experts": 16, "top_k": 3, "moe_ffn_hidden": 704, "shared_experts": 2, "dense_layers": 1,
        "expert_groups": 4, "top_groups": 2, "router": Router(scores="sigmoid", scale=2.5, group_best=2, bias=True),
    }
)  # fmt: skip
STACK, CLUSTER = load_stack("trimaran"), load_cluster("dgx-h100")
CASES = (
    (LLAMA, "dp1,mbs2,bf16", 0),
    (LLAMA, "dp4,tp2,pp2,mbs1,zero1,sp,fp8", 0),
    (LLAMA, "dp4,tp2,pp2,mbs1,zero1,sp,bf16", 0),
    (LLAMA, "dp4,tp2,pp2,mbs1,zero1,sp,bf16", 1),
    (LLAMA, "dp2,tp2,mbs2,fsdp,bf16,recompute-full", 0),
    (QWEN, "dp2,tp2,pp2,mbs1,bf16,recompute-selective", 1),
    (LATENT, "dp1,mbs2,bf16", 0),
    (LATENT, "dp4,tp2,pp2,mbs1,zero1,sp,bf16", 0),
    (LATENT, "dp2,tp2,pp2,mbs1,bf16,recompute-selective", 1),
    (LLAMA, "dp1,pp4,mbs1,bf16", 1),
    (LLAMA, "dp1,pp4,mbs1,bf16,zero_bubble", 1),
    (LLAMA, "dp1,pp4,mbs1,bf16,zero_bubble", 2),
    (LLAMA, "dp1,pp4,vpp2,mbs1,bf16", 0),
    (LLAMA, "dp1,pp4,vpp2,mbs1,bf16", 2),
    (LLAMA, "dp1,pp2,mbs1,bf16,gpipe", 0),
    (LLAMA, "dp4,shard2,cp2,mbs1,zero1,bf16", 0),
    (LLAMA, "dp2,shard1,cp2,mbs1,zero1,bf16", 0),
    (LLAMA, "dp8,shard2,tp2,mbs1,zero1,bf16", 0),
    (LLAMA, "dp4,tp2,mbs2,zero1,sp,bf16,offload-activations", 0),
    (LLAMA, "dp4,mbs1,bf16,compress-int8", 0),
    (LLAMA, "dp8,shard2,tp2,mbs1,zero1,bf16,compress-fp16", 0),
    (LLAMA, "dp4,pp2,mbs1,bf16,local8,compress-int8", 1),
    (LLAMA, "cp4,mbs1,bf16", 0),
    (LLAMA, "cp4,mbs1,bf16,cp-all_gather", 0),
    (LLAMA, "cp4,mbs1,bf16,cp-ulysses", 0),
    (LLAMA, "cp4,tp2,mbs1,sp,bf16,recompute-full", 0),
    (LATENT, "cp4,mbs1,bf16", 0),
    (TIED, "dp2,cp2,pp2,mbs1,zero1,bf16", 1),
    (TIED, "dp2,tp2,pp4,mbs1,zero1,bf16", 0),
    (MIXTURE, "dp1,mbs2,bf16", 0),
    (MIXTURE, "dp8,ep2,etp2,mbs1,zero1,fp8", 0),
    (MIXTURE, "dp8,ep2,etp2,mbs1,zero1,bf16", 0),
    (MIXTURE, "dp4,tp2,pp2,ep4,etp1,mbs1,sp,bf16", 1),
    (MIXTURE, "dp4,ep4,mbs1,bf16,recompute-full", 0),
    (MIXTURE, "dp8,shard4,ep2,mbs1,zero1,bf16", 0),
    (MIXTURE, "dp8,shard2,ep8,mbs1,zero1,bf16", 0),
    (MIXTURE, "dp8,shard4,ep2,mbs1,fsdp,bf16", 0),
    (MIXTURE, "tp2,ep1,etp1,mbs1,sp,bf16", 0),
    (DEEPSEEK, "dp4,tp2,pp2,ep4,etp1,mbs1,sp,bf16", 0),
    (DEEPSEEK, "dp4,ep2,mbs1,bf16,recompute-selective", 0),
)
# Recompute by operator: each module alone, and together.
BY_OPERATOR = (
    (LLAMA, "dp2,tp2,mbs2,zero1,bf16,recompute-core_attn+layernorm", 0),
    (LLAMA, "dp4,tp2,pp2,mbs1,zero1,sp,bf16,recompute-layernorm+mlp", 0),
    (QWEN, "dp1,pp4,mbs1,bf16,recompute-core_attn+layernorm+mlp", 1),
    (LLAMA, "dp1,pp4,mbs1,bf16,zero_bubble,recompute-mlp", 1),
    (LATENT, "dp2,tp2,pp2,mbs1,bf16,recompute-mla_up_proj", 1),
    (LATENT, "dp2,pp2,mbs1,bf16,recompute-core_attn+layernorm+mla_up_proj", 0),
    (MIXTURE, "dp4,ep4,mbs1,bf16,recompute-moe", 0),
    (MIXTURE, "dp8,ep2,etp2,mbs1,zero1,bf16,recompute-layernorm+moe_act", 0),
    (DEEPSEEK, "dp4,pp2,ep4,mbs1,bf16,recompute-layernorm+mla_up_proj+moe_act", 1),
    (DEEPSEEK, "dp4,ep2,mbs1,bf16,recompute-mlp+shared_experts", 0),
)
# Full recompute: every kind of rank and of what a layer that is made again holds, with and without the head.
RECOMPUTED = (
    (LLAMA, "dp2,tp2,mbs2,fsdp,bf16,recompute-full", 0),
    (LLAMA, "dp4,tp2,pp2,mbs1,zero1,sp,bf16,recompute-full", 0),
    (LLAMA, "dp4,tp2,pp2,mbs1,zero1,sp,bf16,recompute-full", 1),
    (QWEN, "dp1,pp4,vpp2,mbs1,bf16,recompute-full,split0-1-1-1-2-1-1-1", 0),
    (QWEN, "dp1,pp4,vpp2,mbs1,bf16,recompute-full,split1-1-1-2-1-1-1-0", 3),
    (LLAMA, "dp1,pp4,mbs1,bf16,zero_bubble,recompute-full", 1),
    (MIXTURE, "dp4,ep4,mbs1,bf16,recompute-full", 0),
    (DEEPSEEK, "dp4,tp2,pp2,ep4,etp1,mbs1,sp,bf16,recompute-full", 0),
)
NAMES = {LLAMA: "", QWEN: "", LATENT: "latent, ", TIED: "tied, ", MIXTURE: "experts, ", DEEPSEEK: "DeepSeek's, "}


@cache
def traced(model: Model, text: str, stage: int, optimizer: Literal["adam", "sgd"] = "adam") -> tuple[TracedRank, Case]:
    layout = parse_layout(text)
    workload = Workload(model=model, seq_len=2048, global_batch=16, optimizer=optimizer)
    job = TrainJob(
        workload=workload, layout=layout, stage_split=resolve_split(layout, workload, STACK), train=TrainSettings(),
        data_dir="", out_dir="", steps=1, device="cuda",
    )  # fmt: skip
    return trace_rank(job, stage * layout.stride("pp")), Case.of(workload, CLUSTER, STACK)


@pytest.fixture(autouse=True)
def kernels_are_put_back() -> Iterator[None]:
    before = torch.nn.functional.scaled_dot_product_attention, torch.UntypedStorage.resize_, dispatch.rows_sent
    yield
    after = torch.nn.functional.scaled_dot_product_attention, torch.UntypedStorage.resize_, dispatch.rows_sent
    assert after == before


@pytest.mark.parametrize(
    ("model", "text", "stage"),
    [
        pytest.param(model, text, stage, id=f"{NAMES[model]}{text}, stage {stage}",
                     marks=pytest.mark.proof if number % 4 else [])
        for number, (model, text, stage) in enumerate(CASES + BY_OPERATOR)
    ],
)  # fmt: skip
def test_a_rank_holds_computes_and_sends_what_is_planned(model: Model, text: str, stage: int) -> None:
    found, case = traced(model, text, stage)
    layout = parse_layout(text)
    (memory,) = memory_per_stage(case, LayoutGrid.from_layouts([layout], case.workload, STACK))
    planned, work = memory[stage], rank_work(case, layout, stage)
    assert found.layers == planned.layers
    if layout.dp_kind != "fully_sharded":
        for part in ("weights", "gradients", "optimizer"):
            assert found.memory[part] / GIB == pytest.approx(getattr(planned, part), rel=0.02), part
    of_model = planned.weights + planned.gradients + planned.optimizer + planned.activations + planned.logits
    held = sum(found.memory.values()) / GIB
    assert held == pytest.approx(of_model, rel=0.1)
    assert found.operations == pytest.approx(work.operations, rel=0.02)
    axes = {each.axis for each in found.collectives}
    for axis in ("ep", "etp"):
        sent = sum(each.size for each in found.collectives if each.axis == axis)
        # weights of tokens go with them, 4 bytes each, which the plan leaves out
        assert sent == pytest.approx(work.sent.get(axis, 0.0), rel=0.002), axis
    assert axes <= set(work.sent) and ("cp" in axes) == (layout.cp > 1)
    halves = {"all_gather": 0.5, "reduce_scatter": 0.5}
    # of gradients that replicas share out the plan counts the mean rank's part, and what was gathered last in the
    # forward is still there for the backward, which it does not know
    for axis, rel in (("tp", 0.02), ("dp", 0.09), ("pp", 0.01), ("cp", 0.002), ("tied", 0.002)):
        moved = {**halves, "all_to_all": 0.5} if axis == "dp" else halves
        sent = sum(moved.get(each.kind, 1.0) * each.size for each in found.collectives if each.axis == axis)
        assert sent == pytest.approx(work.sent.get(axis, 0.0), rel=rel), axis


@pytest.mark.parametrize(
    ("model", "text", "stage"),
    [
        (LLAMA, "dp1,tp2,pp4,mbs1,sp,bf16,zero_bubble", 2),
        (MIXTURE, "dp2,pp2,ep2,mbs1,zero1,bf16", 1),
        *(pytest.param(*case, marks=pytest.mark.proof) for case in (
            (LLAMA, "dp1,mbs1,bf16", 0),
            (LLAMA, "dp2,pp2,mbs1,fsdp,bf16,recompute-full", 0),
            (LLAMA, "dp2,pp2,mbs1,zero2,bf16", 1),
            (LLAMA, "dp1,pp2,vpp2,mbs1,zero1,bf16", 0),
            (LLAMA, "dp1,pp2,mbs1,bf16,gpipe", 0),
        )),
    ],
)  # fmt: skip
def test_what_recurs_is_traced_once_and_counted_as_often_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, model: Model, text: str, stage: int
) -> None:
    found, _ = traced(model, text, stage)
    asked = []

    def whole(schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int) -> Shortened:
        asked.append(shortened(schedule, rank, ranks, stages, micro_batches))
        return Shortened(micro_batches, 0, 0, 0)

    monkeypatch.setattr("trimaran.train.programs.dry_run.shortened", whole)
    in_full, _ = traced.__wrapped__(model, text, stage)
    assert (asked[0].more > 0) == (parse_layout(text).schedule != "gpipe")
    assert found.operations == in_full.operations and found.collectives == in_full.collectives
    token_numbers = 8 * 2049 * 16
    for part, size in in_full.memory.items():
        assert size - token_numbers <= found.memory[part] <= size, part


@pytest.mark.parametrize("cases", [RECOMPUTED, BY_OPERATOR], ids=["full", "by operator"])
def test_recompute_holds_what_is_made_again(cases: tuple[tuple[Model, str, int], ...]) -> None:
    errors = {}
    for model, text, stage in cases:
        found, case = traced(model, text, stage)
        whole = replace(case, calibration=case.calibration.model_copy(update={"activation_scale": 1.0}))
        grid = LayoutGrid.from_layouts([parse_layout(text)], case.workload, STACK)
        (memory,) = memory_per_stage(whole, grid)
        planned = memory[stage].activations + memory[stage].logits
        # an allocator's fragments, which are planned, no trace sees
        errors[NAMES[model] + text, stage] = found.memory["activations"] / GIB / planned - 1.0
    off = [abs(error) for error in errors.values()]
    assert max(off) < 0.1 and sum(off) / len(off) < 0.04, errors


@pytest.mark.parametrize(
    ("model", "text", "stage"),
    [
        (CAPPED, "dp1,mbs1,bf16,recompute-full", 0),
        (CAPPED, "dp1,tp2,pp4,vpp2,mbs1,sp,bf16,recompute-layernorm", 1),
        (WINDOWED, "dp1,mbs1,bf16,recompute-selective", 0),
        (WINDOWED, "cp2,mbs1,bf16,recompute-full", 0),
        (WINDOWED, "cp4,mbs1,bf16,cp-all_gather", 0),
        (ALIBI, "cp2,mbs1,bf16", 0),
    ],
)
def test_scores_that_a_flash_kernel_does_not_make_are_counted_and_held(model: Model, text: str, stage: int) -> None:
    """Windows and caps go by blocks of queries, and over the keys of several ranks a window is a mask that saves
    nothing, with each head's biases in memory, as those of ALiBi."""
    found, case = traced(model, text, stage)
    assert found.operations == pytest.approx(rank_work(case, parse_layout(text), stage).operations, rel=0.001)
    whole = replace(case, calibration=case.calibration.model_copy(update={"activation_scale": 1.0}))
    (memory,) = memory_per_stage(whole, LayoutGrid.from_layouts([parse_layout(text)], case.workload, STACK))
    planned = memory[stage].activations + memory[stage].logits
    assert found.memory["activations"] / GIB == pytest.approx(planned, rel=0.06)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_keys_that_ranks_of_a_sequence_copy_stay_though_what_made_them_is_made_again(kind: str) -> None:
    found, case = traced(LATENT, text := f"cp2,mbs1,bf16,cp-{kind},recompute-mla_up_proj", 0)
    whole = replace(case, calibration=case.calibration.model_copy(update={"activation_scale": 1.0}))
    (memory,) = memory_per_stage(whole, LayoutGrid.from_layouts([parse_layout(text)], case.workload, STACK))
    planned = memory[0].activations + memory[0].logits
    assert found.memory["activations"] / GIB == pytest.approx(planned, rel=0.07)


@pytest.mark.parametrize("text", ["pp4,mbs1,bf16,gpipe", "tp4,pp4,mbs1,sp,bf16,gpipe"])
def test_gradients_that_are_made_with_the_losses_stay_until_the_first_backward_under_gpipe(text: str) -> None:
    found, case = traced(LLAMA, text, 3)
    whole = replace(case, calibration=case.calibration.model_copy(update={"activation_scale": 1.0}))
    (memory,) = memory_per_stage(whole, LayoutGrid.from_layouts([parse_layout(text)], case.workload, STACK))
    planned = memory[3].activations + memory[3].logits
    assert found.memory["activations"] / GIB == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize(
    ("model", "text", "axis"),
    [
        pytest.param(LATENT, "tp2,pp2,mbs1,sp,bf16,recompute-mla_up_proj", "tp", id="slices gathered once more"),
        pytest.param(LLAMA, "dp4,pp2,mbs1,zero2,bf16,gpipe", "dp", id="a head's gradients summed once under GPipe"),
    ],
)
def test_the_last_stage_sends_what_is_planned_of_it(model: Model, text: str, axis: str) -> None:
    found, case = traced(model, text, 1)
    halves = ("all_gather", "reduce_scatter")
    along = [each for each in found.collectives if each.axis == axis]
    sent = sum(each.size * (0.5 if each.kind in halves else 1.0) for each in along)
    assert sent == pytest.approx(rank_work(case, parse_layout(text), 1).sent[axis], rel=0.001)


@pytest.mark.parametrize("stage", [0, 1])
def test_each_rank_makes_every_second_of_its_own_layers_again(stage: int) -> None:
    """Of chunks of one layer a rank has the even ones of the model, and the other the odd ones."""
    found, case = traced(LLAMA, text := "dp1,pp2,vpp4,mbs1,bf16,recompute-full2,split1x8", stage)
    assert found.operations == pytest.approx(rank_work(case, parse_layout(text), stage).operations, rel=0.02)


@pytest.mark.parametrize(
    ("model", "text", "stage"),
    [
        (LLAMA, "dp1,pp4,mbs1,bf16,zero_bubble", 3),
        (LLAMA, "dp1,tp4,pp4,mbs1,sp,bf16,zero_bubble", 2),
        (LLAMA, "dp1,tp4,pp4,mbs1,sp,bf16,zero_bubble", 3),
        (LLAMA, "dp1,tp4,pp4,mbs1,bf16,zero_bubble", 3),
        (LLAMA, "dp1,tp4,pp4,mbs1,sp,bf16,zero_bubble,recompute-full", 3),
        (LATENT, "dp1,tp2,pp4,mbs1,sp,bf16,zero_bubble", 3),
        (MIXTURE, "dp2,pp4,ep2,mbs1,bf16,zero_bubble", 3),
        (DEEPSEEK, "dp1,tp2,pp4,mbs1,sp,bf16,zero_bubble", 3),
    ],
)
def test_weights_gradients_that_are_put_off_keep_their_factors_and_nothing_else(
    model: Model, text: str, stage: int
) -> None:
    """Of a product whose input is cut over TP the gradient of what it gave is whole: most of all, down the pipeline."""
    found, case = traced(model, text, stage)
    whole = replace(case, calibration=case.calibration.model_copy(update={"activation_scale": 1.0}))
    (memory,) = memory_per_stage(whole, LayoutGrid.from_layouts([parse_layout(text)], case.workload, STACK))
    planned = memory[stage].activations + memory[stage].logits
    assert found.memory["activations"] / GIB == pytest.approx(planned, rel=0.08)


def test_what_layers_keep_is_on_the_host_where_the_layout_says_so() -> None:
    plain, away = "dp4,tp2,mbs2,zero1,sp,bf16", "dp4,tp2,mbs2,zero1,sp,bf16,offload-activations"
    (here, _), (there, case) = traced(LLAMA, plain, 0), traced(LLAMA, away, 0)
    assert there.memory["activations"] < 0.4 * here.memory["activations"]
    (memory,) = memory_per_stage(case, LayoutGrid.from_layouts([parse_layout(away)], case.workload, STACK))
    planned = memory[0].activations + memory[0].logits
    assert there.memory["activations"] / GIB == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_zero_3_shares_out_count_as_weights_without_a_master_copy(precision: str) -> None:
    found, case = traced(LLAMA, text := f"dp2,tp2,mbs2,fsdp,{precision}", 0)
    (memory,) = memory_per_stage(case, LayoutGrid.from_layouts([parse_layout(text)], case.workload, STACK))
    assert found.memory["optimizer"] / GIB == pytest.approx(memory[0].optimizer, rel=0.02)


def test_what_ranks_tell_each_other_of_their_rows_is_counted() -> None:
    found, _ = traced(DEEPSEEK, "dp4,ep2,mbs1,bf16,recompute-selective", 0)
    told = [each.count for each in found.collectives if (each.axis, each.kind) == ("ep", "all_gather")]
    assert told == [3 * 4], "once for each layer with experts and micro-batch"


def test_a_step_of_sgd_is_traced() -> None:
    found, _ = traced(LLAMA, "dp8,mbs2,zero1,bf16", 0, optimizer="sgd")
    assert found.memory["optimizer"] == 4 * found.parameters, "SGD keeps master weights alone, of what a rank owns"


@pytest.mark.parametrize(
    ("cluster", "model", "says"),
    [
        ("this-machine", "", "cluster is this machine, which is not probed"),
        ("machine.toml", "", "is of cpu slots"),
    ],
)
def test_what_cannot_be_traced_is_told_before_anything_is_made(
    tmp_path: Path, cluster: str, model: str, says: str
) -> None:
    recipe = tiny_recipe(tmp_path)
    text = recipe.read_text().replace('"machine.toml"', f'"{cluster}"').replace("layers = 2\n", f"layers = 2\n{model}")
    recipe.write_text(text)
    asked = ["train", str(recipe), "--layout", "dp1,mbs1", "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, [*asked, "--dry-run"])
    assert isinstance(done.exception, TrimaranError) and says in str(done.exception)
    done = CliRunner().invoke(app, [*asked, "--rank", "0"])
    assert isinstance(done.exception, TrimaranError) and "names the rank of a --dry-run" in str(done.exception)
    assert not (tmp_path / "runs").exists()


def test_a_program_that_was_killed_is_told_of_by_its_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text("import os, sys; print('a warning', file=sys.stderr); os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TrimaranError, match="train --dry-run: the process that does it was killed by SIGKILL"):
        run_program("killed", [], "train --dry-run")


@pytest.mark.proof
def test_a_plan_s_best_layouts_are_traced_with_or_without_a_recipe(tmp_path: Path) -> None:
    model = tmp_path / "small.toml"
    model.write_text("layers = 4\nhidden = 256\nheads = 4\nvocab = 1000\n")
    asked = ["plan", "--check", "--model", str(model), "--cluster", "dgx-h100", "--gbs", "16", "--devices", "4"]
    done = CliRunner().invoke(app, [*asked, "--stack", "trimaran", "--seq-len", "256", "--fix", "pp=2", "--top", "2"])
    assert done.exception is None, done.output
    headings = [line for line in done.output.splitlines() if line.endswith("on dgx-h100, one step:")]
    assert headings and all("pp2" in line for line in headings)
    assert done.stderr.count("tracing ") == len(headings) and "tracing ranks 0, 1 of " in done.stderr
    tables = done.output[done.output.index(headings[0]) :]
    assert tables.count("(stage 0, ") == tables.count("(stage 1, ") >= 6 * len(headings)
    assert tables.count("sent along pp") == 2 * len(headings)
    for wrong, says in (
        (["--stack", "megatron-core"], "is not Trimaran's own trainer"),
        (["--stack", "trimaran", "--format", "csv"], "not --format csv"),
    ):
        done = CliRunner().invoke(app, [*asked, *wrong])
        assert isinstance(done.exception, TrimaranError) and says in str(done.exception)


@pytest.mark.parametrize(
    "options",
    [
        ("--gbs", "100", "--gbs-tolerance", "0.05", "--fix", "dp=8", "--fix", "mbs=4"),
        ("--gbs", "64", "--tokens", "1e9", "--ramp-up", "4,4,1000", "--grow-nodes", "--fix", "dp=8", "--fix", "mbs=8"),
        ("--gbs", "64", "--devices", "16", "--fix", "dp=16", "--fix", "mbs=4"),
    ],
    ids=["another batch", "growing nodes", "more nodes"],
)
def test_a_plan_s_best_layout_is_traced_as_it_was_planned(tmp_path: Path, options: tuple[str, ...]) -> None:
    model, cluster = tmp_path / "small.toml", tmp_path / "one.toml"
    model.write_text("layers = 2\nhidden = 256\nheads = 4\nvocab = 1000\n")
    link = "{ bandwidth_gbps = 400, latency_us = 5 }"
    cluster.write_text(f'device = "h100-sxm"\nnodes = 1\ndevices_per_node = 8\nintra = {link}\ninter = {link}\n')
    asked = ["plan", "--check", "--model", str(model), "--cluster", str(cluster), "--stack", "trimaran"]
    done = CliRunner().invoke(app, [*asked, "--seq-len", "256", "--top", "1", *options])
    assert done.exception is None, done.output
    assert "memory at its peak" in done.output
