"""Claims about a model's layers and head as the probe runs them whole, and about predictions that rest on them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Literal

import pytest
import torch

from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate
from trimaran.files.catalogue import dump_toml, load_cluster, load_stack
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.probed_model import PartTime
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload
from trimaran.planner.search.settings import settings_from
from trimaran.planner.why import explain
from trimaran.probe.__main__ import main as probe_main
from trimaran.probe.parts import LAYERS, PartMaker, part_times, parts_timing
from trimaran.probe.probe_settings import PartCase, ProbedProduct, ProbeSettings, model_parts, probe_settings
from trimaran.probe.probed_cluster import measure
from trimaran.probe.timing import SAMPLE_S, Timing

MODEL = Model(name="tiny", layers=3, hidden=64, heads=4, ffn_hidden=256, vocab=512, max_positions=64)
WORKLOAD = Workload(model=MODEL, seq_len=64, global_batch=8)
TRIMARAN = load_stack("trimaran")


def settings(**other: object) -> ProbeSettings:
    stated = {
        "device": "cpu", "ranks": 1, "threads_per_rank": 1, "groups": (), "precisions": ("fp32", "bf16"),
        "products": (ProbedProduct(m=64, n=64, k=64), ProbedProduct(m=64, n=256, k=64)), "attention": (),
        "model": MODEL, "stack": "trimaran", "parts": tuple(model_parts(MODEL, 64, (1, 4), (1, 2))),
        "collective_bytes": (4096,), "stream_mib": 4, "rounds": 3, "window_s": 0.02, "quick": False,
    }  # fmt: skip
    return ProbeSettings.model_validate({**stated, **other})


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """One slot of this machine, probed for real, as a node of four that do not feel each other."""
    probed = measure(settings(), "tiny")
    assert [(one.stack, one.model) for one in probed.models] == [("trimaran", MODEL)]
    return probed.model_copy(update={"devices_per_node": 4, "cores_per_node": 0})


def without(cluster: Cluster) -> Cluster:
    """The same machine, none of whose parts were measured."""
    return cluster.model_copy(update={"models": ()})


def slower(cluster: Cluster) -> Cluster:
    """The same machine, as if its parts had taken twice as long."""
    (probed,) = cluster.models
    twice = tuple(
        time.model_copy(update={"forward_us": 2 * time.forward_us, "backward_us": 2 * time.backward_us})
        for time in probed.times
    )
    return cluster.model_copy(update={"models": (probed.model_copy(update={"times": twice}),)})


def measured(cluster: Cluster, part: str, layout: Layout) -> PartTime:
    (found,) = [
        time
        for time in cluster.models[0].times
        if (time.part, time.precision, time.tp, time.mbs)
        == (part, PRECISIONS[layout.precision].rate, layout.tp, layout.mbs)
    ]
    return found


def test_every_part_is_measured_at_every_share_and_micro_batch(cluster: Cluster) -> None:
    times = cluster.models[0].times
    assert {(t.part, t.precision, t.tp, t.mbs, t.seq_len) for t in times} == {
        (part, precision, tp, mbs, 64)
        for part in ("layer", "head") for precision in ("fp32", "bf16") for tp in (1, 2) for mbs in (1, 4)
    }  # fmt: skip
    assert all(0 < t.forward_us < 1e6 and 0 < t.backward_us < 1e6 for t in times)
    assert all(t.forward_us <= 1.001 * t.backward_us for t in times if t.part == "layer")


@pytest.mark.parametrize("text", ["dp1,mbs1", "dp1,mbs4", "tp2,mbs1", "tp2,mbs4,bf16", "dp2,tp2,mbs1,bf16"])
def test_a_layer_that_was_measured_is_predicted_to_take_what_it_took(cluster: Cluster, text: str) -> None:
    layout = parse_layout(text)
    predicted = estimate(Case.of(WORKLOAD, cluster, TRIMARAN), layout)
    layer, head = (measured(cluster, part, layout) for part in ("layer", "head"))
    times = predicted.micro_batches * MODEL.layers * 1e-6
    assert predicted.time.forward == pytest.approx(times * layer.forward_us, rel=1e-3)
    assert predicted.time.backward == pytest.approx(times * layer.backward_us, rel=1e-3)
    longer = estimate(Case.of(WORKLOAD, slower(cluster), TRIMARAN), layout)
    assert longer.time.forward == pytest.approx(2 * predicted.time.forward, rel=1e-3)
    assert predicted.time.head > predicted.micro_batches * 1e-6 * (head.forward_us + head.backward_us)


@pytest.mark.proof
def test_a_layer_with_experts_is_predicted_to_take_what_it_took() -> None:
    sizes = {"experts": 4, "top_k": 2, "moe_ffn_hidden": 64, "dense_layers": 1, "mlp": "swiglu", "bias": False}
    mixture = MODEL.model_copy(update={"name": "mixture", **sizes})
    probed = measure(settings(model=mixture, parts=tuple(model_parts(mixture, 64, (1, 4), (1,)))), "tiny")
    workload, layout = Workload(model=mixture, seq_len=64, global_batch=8), Layout(mbs=4)
    whole, longer = (estimate(Case.of(workload, one, TRIMARAN), layout) for one in (probed, slower(probed)))
    of_layer = measured(probed, "layer", layout).forward_us * 1e-6 * whole.micro_batches
    assert 2 * of_layer < whole.time.forward < 3.5 * of_layer, "the first layer is dense, and quicker"
    assert longer.time.forward == pytest.approx(2 * whole.time.forward, rel=1e-3)


def test_layers_are_the_same_in_a_model_of_another_depth(cluster: Cluster) -> None:
    deeper = WORKLOAD.model_copy(
        update={"model": MODEL.model_copy(update={"layers": 9, "vocab": 1000, "name": "deep"})}
    )
    three, nine = (estimate(Case.of(w, cluster, TRIMARAN), parse_layout("dp1,mbs1")) for w in (WORKLOAD, deeper))
    assert nine.time.forward == pytest.approx(3 * three.time.forward)
    bare = estimate(Case.of(deeper, without(cluster), TRIMARAN), parse_layout("dp1,mbs1"))
    assert nine.time.head == pytest.approx(bare.time.head), "another vocabulary has another head"


@pytest.mark.parametrize("change", [{"hidden": 128, "head_dim": 32}, {"ffn_hidden": 512}, {"norm": "rmsnorm"}])
def test_another_models_prediction_does_not_change(cluster: Cluster, change: dict[str, object]) -> None:
    other = Workload(model=MODEL.model_copy(update={**change, "vocab": 700}), seq_len=64, global_batch=8)
    layout = parse_layout("tp2,mbs1")
    cases = (Case.of(other, known, TRIMARAN) for known in (cluster, without(cluster)))
    assert estimate(next(cases), layout) == estimate(next(cases), layout)


def test_another_stacks_prediction_does_not_change(cluster: Cluster) -> None:
    stack, layout = load_stack("megatron"), parse_layout("tp2,mbs1")
    cases = (Case.of(WORKLOAD, known, stack) for known in (cluster, without(cluster)))
    assert estimate(next(cases), layout) == estimate(next(cases), layout)


def test_between_measured_shapes_a_layer_is_off_its_operators_as_its_neighbours_are(cluster: Cluster) -> None:
    (probed,) = cluster.models
    alone = tuple(time for time in probed.times if time.tp == 1)
    known = cluster.model_copy(update={"models": (probed.model_copy(update={"times": alone}),)})

    def ratio(mbs: int) -> float:
        rested, bare = (
            estimate(Case.of(WORKLOAD, one, TRIMARAN), Layout(mbs=mbs)).time.forward
            for one in (known, without(cluster))
        )
        return rested / bare

    assert min(ratio(1), ratio(4)) < ratio(2) < max(ratio(1), ratio(4))


def test_what_a_fit_teaches_still_moves_a_measured_layer(cluster: Cluster) -> None:
    known = prior(cluster, TRIMARAN)
    slower = known.model_copy(update={"gemm": known.gemm / 2, "memory": known.memory / 2, "op_us": known.op_us * 2})
    believed, taught = (
        estimate(Case.of(WORKLOAD, cluster, TRIMARAN, calibration), parse_layout("dp1,mbs1")).time.forward
        for calibration in (known, slower)
    )
    assert taught == pytest.approx(2 * believed, rel=0.01)


def test_a_cluster_file_keeps_what_was_measured(cluster: Cluster, tmp_path: Path) -> None:
    dump_toml(cluster, tmp_path / "tiny.toml")
    assert load_cluster(str(tmp_path / "tiny.toml")) == cluster


def test_a_prediction_says_that_measured_parts_stand_behind_it(cluster: Cluster) -> None:
    case = Case.of(WORKLOAD, cluster, TRIMARAN)
    assert estimate(case, parse_layout("dp1,mbs1")).calibrated_by == "prior, layer and head as probed"
    plan_settings = settings_from(fixed={"precision": "fp32", "zero_stage": 0})
    reasons = explain("tp2,mbs4", case, plan_settings).reasons
    layer = measured(cluster, "layer", parse_layout("tp2,mbs4"))
    assert any(
        reason.startswith("measured: layer at TP 2, micro-batch 4")
        and f"{layer.forward_us / 1e3:.4g} ms forward" in reason
        for reason in reasons
    )
    assert "measured: layer at TP 1, 2; micro-batch 1, 4; sequence 64, from which this layout's is read" in (
        explain("tp2,mbs2", case, plan_settings).reasons
    )
    bare = Case.of(WORKLOAD, without(cluster), TRIMARAN)
    assert not any(reason.startswith("measured") for reason in explain("tp2,mbs2", bare, plan_settings).reasons)


def test_a_share_of_tensor_parallelism_computes_with_its_share_of_the_weights() -> None:
    def matrices(tp: int) -> int:
        stage = PartMaker(MODEL, torch.device("cpu")).stage("layer", Layout(tp=tp))
        return sum(weight.numel() for weight in stage.weights() if weight.dim() > 1)

    whole = LAYERS * 12 * MODEL.hidden**2
    assert matrices(1) >= whole
    assert matrices(1) - matrices(4) == pytest.approx(0.75 * whole, rel=0.05)


def test_a_probe_stops_at_its_limit_and_keeps_what_it_has() -> None:
    def timed(limit_s: float, *shares: float) -> list[int]:
        timing = Timing(range(5), lambda: lambda _: lambda: sum(range(1000)), 3, torch.device("cpu"), limit_s)
        for share in shares:
            timing.spell(share)
        return list(timing.seconds())

    assert timed(0.0, 1.0) == timed(0.0, 0.5, 1.0) == [0]
    assert timed(math.inf, 1.0) == [0, 1, 2, 3, 4]
    whole = parts_timing(MODEL, settings(precisions=("fp32",), limit_s=1e-9), torch.device("cpu"))
    whole.spell()
    assert len(whole.seconds()) == 1
    assert part_times(whole.seconds(), MODEL) == (), "a forward alone says nothing of a backward"


@pytest.mark.parametrize("spells", [1, 3, 4])
def test_spells_take_all_samples_in_turns_and_make_what_is_timed_anew(spells: int) -> None:
    prepared: list[list[str]] = []

    def preparing() -> Callable[[str], Callable[[], object]]:
        prepared.append([])

        def prepare(case: str) -> Callable[[], object]:
            prepared[-1].append(case)
            return lambda: time.sleep(SAMPLE_S)

        return prepare

    timing = Timing("abc", preparing, 4, torch.device("cpu"))
    for spell in range(spells):
        timing.spell((spell + 1) / spells)
    assert len(prepared) == spells and "".join(chain.from_iterable(prepared)) == "abc" * 4
    assert all(len(spell) == 12 / spells for spell in prepared)
    assert all(seconds >= SAMPLE_S for seconds in timing.seconds().values())


def asked(
    device: Literal["cpu", "cuda"] = "cpu", model: Model = MODEL, seq_len: int | None = None, stack: Stack = TRIMARAN
) -> ProbeSettings:
    return probe_settings(
        device=device, slots=1, threads_per_rank=1, model=model, seq_len=seq_len, mbs=(1,), quick=True, stack=stack
    )  # fmt: skip


def test_one_gpu_is_asked_for_the_shares_of_a_whole_node() -> None:
    wide = MODEL.model_copy(update={"heads": 8, "kv_heads": 8, "head_dim": 8})
    assert {case.tp for case in asked(device="cuda", model=wide).parts} == {1, 2, 4, 8}
    assert {case.tp for case in asked(model=wide).parts} == {1}
    assert asked().parts == (
        PartCase(part="layer", tp=1, mbs=1, seq_len=64),
        PartCase(part="head", tp=1, mbs=1, seq_len=64),
    )


def test_other_stacks_are_measured_by_products_alone() -> None:
    other = asked(stack=load_stack("megatron"))
    assert other.parts == () and other.model is None
    assert other.products == asked().products
    assert {a.head_dim for a in other.attention} <= {64}, "it runs no flash attention"


def test_what_cannot_be_measured_is_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def refusal(*arguments: str) -> str:
        assert probe_main([*arguments, "-o", str(tmp_path / "x.toml")]) == 2
        said = capfd.readouterr().err.strip()
        assert len(said.splitlines()) == 1
        return said

    assert "--stack says how --model is measured" in refusal("--stack", "trimaran")
    assert "add --model" in refusal("--mbs", "2")
    assert "'megatrom'" in refusal("--model", "gpt2-124m", "--stack", "megatrom")
    assert "ask for at most 1024" in refusal("--model", "gpt2-124m", "--seq", "4096")
    with pytest.raises(TrimaranError, match="at most 64"):
        asked(seq_len=65)
    assert not (tmp_path / "x.toml").exists()
