"""The claim that users care about most: a layout changes the speed of training, never its result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle, product
from statistics import median
from typing import Literal

import pytest

from pool import Pool, Run
from reference import Reference
from shapes import BLOOM, GEMMA, LLAMA, NEOX, OLMO, QWEN, SMALL, as_deep_as
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.protocol.job import TrainJob

# The first step shows losses and gradients, the next ones what the optimizer made of them; what a course of 20 steps
# shows besides is shown on those that cover the axes, and on all of them by `make proof STEPS=20`.
FEW_STEPS = int(os.environ.get("TRIMARAN_PROOF_STEPS", "3"))

# Between them: every axis alone and with the others, TP of 3 and 8, every schedule, ZeRO stage and kind of data
# parallelism, every recompute, slices of the sequence, a split and a placement of its own.
DOZEN = (
    "dp8,mbs3,zero2,recompute-full2",
    "tp8,mbs24,sp",
    "pp8,mbs8,gpipe",
    "dp2,tp3,mbs12,zero1",
    "pp3,vpp2,mbs4,split2-1-1-1-2-1",
    "dp2,tp2,pp2,mbs6,sp,zero_bubble,recompute-full2",
    "dp2,tp2,pp2,mbs3,gpipe,fsdp,sp,recompute-core_attn+layernorm+mlp",
    "dp2,pp3,mbs4,ps,recompute-full",
    "dp2,tp2,pp2,mbs12,place-pp-dp-tp",
)
# ... and on models of the other families.
DOZEN_OF_FAMILIES = {
    "bloom": (BLOOM, "tp2,pp4,mbs8,split3-1-3-1,recompute-selective"),
    "bloom sharded": (BLOOM, "dp2,tp2,pp2,mbs6,zero1,zero_bubble"),
    "llama sharded": (LLAMA, "dp2,tp2,pp2,vpp2,mbs6,fsdp,sp,recompute-full"),
    "llama offloaded": (LLAMA, "dp2,tp2,mbs6,zero1,sp,offload-activations"),
}
# ... and with each trait, a few steps.
DOZEN_OF_TRAITS = {
    "qwen": (QWEN, "tp4,pp2,mbs12,zero_bubble,recompute-selective"),
    "olmo": (OLMO, "dp2,tp2,pp2,mbs12,zero2,recompute-full"),
    "gemma": (GEMMA, "dp2,tp2,pp2,mbs12,fsdp,sp"),
    "neox": (NEOX, "tp2,pp2,vpp2,mbs12,sp"),
    "qwen, shared sequences": (QWEN, "cp2,tp2,mbs12,sp"),
    "olmo, shared sequences": (OLMO, "cp2,tp2,mbs12,cp-ulysses"),
}

# ... shards among a part of the replicas, and sequences that ranks share, in every way, with the other axes
DOZEN_OF_SHARES = (
    (LLAMA, "dp4,shard2,cp2,mbs3,fsdp,recompute-full2"),
    (SMALL, "dp4,shard2,tp2,mbs3,zero2"),
    (SMALL, "cp4,mbs24"),
    (BLOOM, "cp2,tp2,pp2,mbs6,zero1,cp-all_gather,sp,recompute-selective"),
    (LLAMA, "dp2,cp2,pp2,vpp2,mbs6,cp-ulysses,zero1,recompute-full"),
)
LAYOUTS_OF_SHARES = (
    # hybrid sharding: every ZeRO stage, shards of two, of three and across pipelines
    "dp4,shard2,mbs3,zero1",
    "dp8,shard4,mbs3,zero1",
    "dp8,shard2,mbs3,zero2",
    "dp6,shard3,mbs4,fsdp",
    "dp4,shard2,pp2,mbs3,zero1,gpipe",
    "dp4,shard2,pp2,vpp2,mbs3,fsdp,recompute-selective",
    "dp4,shard2,tp2,mbs6,fsdp,sp,place-dp-tp-pp",
    "dp4,shard2,pp2,mbs3,zero1,zero_bubble",
    # each way to share sequences, alone and with each of the others
    *(
        layout + kind
        for layout in (
            "cp2,mbs24",
            "cp4,mbs12",
            "cp2,tp4,mbs12,sp",
            "cp4,tp2,mbs24,recompute-full",
            "dp2,cp4,mbs6,zero1",
            "dp2,cp2,tp2,mbs6,zero2,sp,recompute-selective",
            "dp2,cp2,pp2,mbs3,fsdp,gpipe,recompute-full2",
            "dp2,cp2,pp2,mbs6,ps",
            "cp2,pp4,mbs6,zero_bubble",
            "cp2,pp2,vpp2,mbs4,recompute-selective",
            "cp2,tp2,pp2,mbs6,split3-5,place-pp-cp-tp-dp",
            "dp4,shard2,cp2,mbs3,zero1",
            "dp4,shard2,cp2,mbs3,zero2,recompute-selective",
            "dp2,shard1,cp4,mbs3,fsdp",
        )
        for kind in ("", ",cp-all_gather", ",cp-ulysses")
    ),
    "cp8,mbs24",
    "cp8,mbs12,cp-all_gather,recompute-full",
)
SHARED_WITH_DOCUMENTS = (
    "dp2,cp2,pp2,mbs6,zero1",
    "cp2,tp2,mbs12,cp-all_gather,sp",
    "cp4,mbs6,cp-ulysses,recompute-full",
)

LAYOUTS = (
    # one axis alone
    "dp3,mbs8",
    "dp8,mbs3",
    "tp2,mbs24",
    "tp8,mbs24",
    "tp6,mbs24",
    "pp2,mbs6",
    "pp8,mbs8",
    # every micro-batch at once; uneven stages
    "pp4,mbs8,gpipe",
    "pp3,mbs8,split1-5-2",
    # several chunks a rank, on two ranks (which speak both ways) and on more; weight gradients put off
    "pp2,vpp4,mbs6",
    "pp4,mbs4,zero_bubble",
    # slices of the sequence between the products of TP; attention made again
    "tp4,mbs12,sp",
    "tp2,pp2,vpp2,mbs6,sp,recompute-selective",
    # two axes
    "dp2,tp3,mbs12",
    "dp3,pp2,mbs4,gpipe",
    "tp4,pp2,mbs12,gpipe",
    "tp2,pp4,mbs8,split3-1-3-1",
    # all three, recomputing all layers, every second, and on other neighbours
    "dp2,tp2,pp2,mbs6",
    "dp2,tp2,pp2,mbs12,recompute-full",
    "dp2,tp2,pp2,mbs6,gpipe,recompute-full2",
    # optimizer state, gradients and weights sharded over replicas, or held by the first of them
    "dp2,mbs3,zero1",
    "dp2,tp2,pp2,mbs6,zero1,gpipe",
    "dp4,tp2,mbs3,zero2,recompute-full",
    "dp4,mbs3,fsdp",
    "dp2,tp2,pp2,mbs6,fsdp,recompute-full2",
    "dp2,tp2,pp2,mbs6,zero1,sp",
    "dp2,tp2,mbs6,fsdp,sp,recompute-selective",
    "dp3,pp2,vpp2,mbs4,fsdp",
    "dp2,pp3,mbs4,ps",
    "dp2,tp2,pp2,mbs6,place-dp-pp-tp,fsdp",
    "dp4,pp2,mbs3,split2-6,zero2",
)

SHARDED_DEGREES = (
    "dp2,mbs4",
    "dp4,mbs3",
    "dp8,mbs3",
    "dp2,tp2,mbs6",
    "dp4,tp2,mbs3",
    "dp2,pp2,mbs4,gpipe",
    "dp4,pp2,mbs3,gpipe",
    "dp2,pp2,mbs4,1f1b",
    "dp4,pp2,mbs3,1f1b",
    "dp2,tp2,pp2,mbs3,1f1b",
    "dp2,pp2,vpp2,mbs3",
    "dp4,pp2,vpp4,mbs3",
    "dp2,tp2,pp2,mbs3,sp",
)
EVERY_SHARDING = tuple(
    f"{degrees},{kind}{recompute}"
    for (kind, degrees), recompute in zip(
        product(("zero1", "zero2", "fsdp", "ps"), SHARDED_DEGREES),
        cycle(("", ",recompute-full", ",recompute-layernorm", ",recompute-full3", ",recompute-core_attn+mlp")),
        strict=False,
    )
)


def every_mix() -> Iterator[str]:
    """Every DP x TP x PP of 1, 2, 4 and 8 ranks under every schedule, with the other choices in turns."""
    words = ("", "full", "selective", "full3", "layernorm+mlp", "core_attn+layernorm", "mlp")
    recomputes = cycle(f",recompute-{word}" if word else "" for word in words)
    slices = cycle((",sp", "", ""))
    for dp, tp, pp in product((1, 2, 4, 8), repeat=3):
        own = 24 // dp
        # zero-bubble needs as many micro-batches as stages, interleaving a multiple
        mbs = own // (1 if pp == 1 else pp if own % (2 * pp) else 2 * pp)
        pipelines = ("1f1b", "gpipe", "zero_bubble", "vpp2") if pp > 1 else ("none",)
        for pipeline in pipelines:
            if dp * tp * pp <= 8 and (pipeline != "vpp2" or pp < 8):
                sp = next(slices) if tp > 1 else ""
                yield f"dp{dp},tp{tp},pp{pp},mbs{mbs},{pipeline}{sp}{next(recomputes)}"


EVERY_MIX = tuple(every_mix())

# The 12 key-value heads of most divide by every TP here but 8.
IN_TURNS = tuple(
    (layout, model if model.kv_heads % parse_layout(layout).tp == 0 else NEOX)
    for layout, model in zip((DOZEN + LAYOUTS)[::2], cycle((LLAMA, BLOOM, QWEN, OLMO, GEMMA, NEOX)), strict=False)
)


SHARES_IN_TURNS = tuple(
    (layout, LLAMA if not number % 3 and not LLAMA.kv_heads % (parse_layout(layout).fold("tp", "cp")) else model, on)
    for number, (layout, model, on) in enumerate(
        zip(LAYOUTS_OF_SHARES, cycle((SMALL, BLOOM)), cycle(("one", "one", "several", "several")), strict=False)
    )
)


def of_case(value: Model | str) -> str:
    """A layout by its notation, a model by its positions."""
    return value if isinstance(value, str) else value.positions


def assert_same(run: Run, expected: Run) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    # now and then one token's gradient is so sharp that a change of micro-batch on one process moves it by 0.3%
    apart = [abs(norm / true - 1) for norm, true in zip(run.grad_norms, expected.grad_norms, strict=True)]
    assert median(apart) < 1e-4 and max(apart) < 0.05
    for name, norm in expected.grad_norm_of.items():
        assert run.grad_norm_of[name] == pytest.approx(norm, rel=1e-5), name
    assert set(run.grad_norm_of) - set(expected.grad_norm_of) <= {"head.weight"}


@pytest.mark.parametrize("layout", DOZEN)
def test_fp32_agrees_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    model = as_deep_as(parse_layout(layout), SMALL)
    assert_same(pool.run(make_job(layout, model=model)), reference.run(model))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(*case, id=name, marks=[] if name in ("bloom", "llama sharded") else pytest.mark.proof)
        for name, case in DOZEN_OF_FAMILIES.items()
    ],
)
def test_other_families_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, model: Model, layout: str
) -> None:
    model = as_deep_as(parse_layout(layout), model)
    assert_same(pool.run(make_job(layout, model=model)), reference.run(model))


@pytest.mark.parametrize(
    ("model", "layout"),
    [DOZEN_OF_SHARES[0], *(pytest.param(*case, marks=pytest.mark.proof) for case in DOZEN_OF_SHARES[1:])],
    ids=of_case,
)
def test_shared_sequences_and_parts_of_replicas_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, model: Model, layout: str
) -> None:
    model = as_deep_as(parse_layout(layout), model)
    assert_same(pool.run(make_job(layout, model=model)), reference.run(model))


@pytest.mark.proof
@pytest.mark.parametrize(("layout", "model", "machines"), SHARES_IN_TURNS, ids=of_case)
def test_shared_sequences_and_parts_of_replicas_agree_everywhere(
    pool: Pool,
    make_job: Callable[..., TrainJob],
    reference: Reference,
    model: Model,
    layout: str,
    machines: Literal["one", "several"],
) -> None:
    model = as_deep_as(parse_layout(layout), model)
    assert_same(
        pool.run(make_job(layout, model=model, steps=FEW_STEPS), machines), reference.run(model, steps=FEW_STEPS)
    )


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(*case, id=name, marks=[] if name in ("qwen", "gemma") else pytest.mark.proof)
        for name, case in DOZEN_OF_TRAITS.items()
    ],
)
def test_models_with_other_traits_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, model: Model, layout: str
) -> None:
    assert_same(pool.run(make_job(layout, model=model, steps=FEW_STEPS)), reference.run(model, steps=FEW_STEPS))


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_agrees_on_every_layout(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    model = as_deep_as(parse_layout(layout), SMALL)
    assert_same(pool.run(make_job(layout, model=model, steps=FEW_STEPS)), reference.run(model, steps=FEW_STEPS))


@pytest.mark.proof
@pytest.mark.parametrize(("layout", "model"), IN_TURNS)
def test_other_families_agree_on_every_layout(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, model: Model, layout: str
) -> None:
    model = as_deep_as(parse_layout(layout), model)
    assert_same(pool.run(make_job(layout, model=model, steps=FEW_STEPS)), reference.run(model, steps=FEW_STEPS))


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout",
    ["dp2,mbs6", "dp3,mbs8,ps", "dp4,mbs3,fsdp", "dp4,shard2,cp2,mbs3,zero2", "dp4,tp2,mbs3,zero1",
     "dp4,tp2,mbs3,zero2", "dp2,pp2,mbs6,zero2"],
)  # fmt: skip
def test_ranks_that_share_no_memory_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    model = as_deep_as(parse_layout(layout), SMALL)
    run = pool.run(make_job(layout, model=model, steps=FEW_STEPS), machines="several")
    assert_same(run, reference.run(model, steps=FEW_STEPS))


@pytest.mark.proof
@pytest.mark.parametrize("layout", EVERY_MIX + EVERY_SHARDING)
def test_every_mix_of_degrees_agrees_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, layout: str
) -> None:
    model = as_deep_as(parse_layout(layout), SMALL)
    assert_same(pool.run(make_job(layout, model=model, steps=FEW_STEPS)), reference.run(model, steps=FEW_STEPS))


@pytest.mark.proof
@pytest.mark.parametrize("change", [{"tied_embedding": False}, {"bias": False}, {"kv_heads": 12}], ids=str)
def test_other_models_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, change: dict[str, object]
) -> None:
    model = SMALL.model_copy(update=change)
    run = pool.run(make_job("tp3,pp2,mbs12", model=model, steps=FEW_STEPS))
    assert_same(run, reference.run(model, steps=FEW_STEPS))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(BLOOM, "dp2,tp2,pp2,mbs6,fsdp,sp", marks=pytest.mark.proof),
        pytest.param(SMALL, "tp2,cp4,mbs6,sp,recompute-selective", marks=pytest.mark.proof),
        *(pytest.param(model, layout, marks=pytest.mark.proof)
          for model in (SMALL, BLOOM, LLAMA) for layout in SHARED_WITH_DOCUMENTS),
        pytest.param(GEMMA, "tp2,pp2,mbs6,sp,recompute-selective", marks=pytest.mark.proof),
        pytest.param(QWEN, "dp2,tp2,pp2,mbs6,zero1,recompute-full", marks=pytest.mark.proof),
        pytest.param(SMALL, "tp2,pp2,vpp2,mbs6,sp,recompute-selective", marks=pytest.mark.proof),
        pytest.param(BLOOM, "dp2,tp2,pp2,mbs6,recompute-full", marks=pytest.mark.proof),
        pytest.param(LLAMA, "tp2,pp2,mbs6,zero_bubble,sp", marks=pytest.mark.proof),
    ],
    ids=of_case,
)  # fmt: skip
def test_documents_apart_and_validation_agree_with_one_process(
    pool: Pool, make_job: Callable[..., TrainJob], reference: Reference, model: Model, layout: str
) -> None:
    model = as_deep_as(parse_layout(layout), model)
    settings = {"steps": 3, "document_mask": True, "validation": 0.2, "eval_every": 3, "eval_steps": 2}
    expected = reference.run(model, **settings)
    run = pool.run(make_job(layout, model=model, **settings))
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.validation == pytest.approx(expected.validation, rel=1e-5)
    assert expected.validation != expected.losses[-1]


def test_training_learns(reference: Reference) -> None:
    losses = reference.run().losses
    assert losses[0] == pytest.approx(5.7, abs=0.15)  # ln 300: it knows nothing yet
    assert losses[-1] < losses[0] - 0.7


# Of layouts in 16 bit, those that four layers are enough for: what one process makes of each model takes seven runs.
LAYOUTS_OF_16_BIT = tuple(
    layout for layout in (DOZEN + LAYOUTS)[::2] if as_deep_as(parse_layout(layout), SMALL, least=4).layers == 4
)
# Distance of 1 from the next number, as torch.finfo has it.
ROUNDING = {"fp16": 2.0**-10, "bf16": 2.0**-7, "bf16_pure": 2.0**-7}


@dataclass(frozen=True)
class Rounding:
    """What one process makes of one training in 16 bit under several micro-batches, which only round differently."""

    runs: tuple[list[float], ...]

    @property
    def spread(self) -> float:
        """The largest relative difference between two of them at one step."""
        return max((max(at) - min(at)) / min(at) for at in zip(*self.runs, strict=True))

    def distance(self, losses: list[float]) -> float:
        """How far losses are from the nearest of them, relative, where that is largest."""
        steps = zip(losses, *self.runs, strict=True)
        return max(min(abs(loss - one) / one for one in at) for loss, *at in steps)


@pytest.fixture(scope="module")
def rounding(pool: Pool, make_job: Callable[..., TrainJob]) -> Callable[[str, Model], Rounding]:
    @cache
    def made(precision: str, model: Model) -> Rounding:
        jobs = [make_job(f"mbs{mbs},{precision}", model=model, steps=8) for mbs in (24, 12, 8, 6, 4, 3, 2)]
        return Rounding(tuple(pool.run(job).losses for job in jobs))

    return made


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        pytest.param("fp16", "dp2,tp2,pp2,mbs6,fsdp,sp", marks=pytest.mark.proof),
        pytest.param("bf16", "dp2,tp2,pp2,mbs6,zero1,recompute-full2", marks=pytest.mark.proof),
        *(pytest.param("bf16", layout, marks=pytest.mark.proof)
          for layout in ("cp2,mbs12", "cp4,mbs24,cp-all_gather", "dp2,cp2,mbs6,cp-ulysses,zero1", "cp2,tp2,mbs12,sp")),
        *(pytest.param(precision, layout, marks=pytest.mark.proof)
          for layout, precision in zip(LAYOUTS_OF_16_BIT, cycle(("fp16", "bf16", "bf16_pure")), strict=False)),
    ],
)  # fmt: skip
def test_16_bit_differs_by_no_more_than_one_process_from_itself(
    pool: Pool,
    make_job: Callable[..., TrainJob],
    rounding: Callable[[str, Model], Rounding],
    precision: str,
    layout: str,
) -> None:
    model = as_deep_as(parse_layout(layout), SMALL, least=4)
    alone = rounding(precision, model)
    run = pool.run(make_job(f"{layout},{precision}", model=model, steps=8))
    allowed = alone.spread
    if parse_layout(layout).fold("tp", "cp") > 1:
        # parts of a sum (of a product's, of attention over a part of the keys) are rounded before they are added, which
        # no micro-batch does: each token's loss moves by about a rounding, and so their mean by that over the root of
        # their number
        allowed += ROUNDING[precision] / (24 * 16) ** 0.5
    assert alone.distance(run.losses) <= allowed
