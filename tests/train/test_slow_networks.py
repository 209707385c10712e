"""Compressed gradients and local steps: what they lose is kept or bounded, and what they agree on is the same."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pool import Pool, Run
from shapes import SMALL
from test_gpt import make_trainer
from trimaran.layout.compression import BLOCK, FORMATS, LOW_RANK
from trimaran.layout.notation import parse_layout
from trimaran.nouns.stack import Compression
from trimaran.protocol.job import TrainJob
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.comm.exchange import Finish, done
from trimaran.train.comm.group import Group
from trimaran.train.engine.copy_sums import CopySums, begin_compressed_sum, pack, unpack
from trimaran.train.engine.flat_weights import FlatWeights
from trimaran.train.engine.low_rank_sums import Factored, begin_low_rank_sum
from trimaran.train.engine.outer_optimizer import OuterOptimizer, fragment_of
from trimaran.train.engine.units import Span

Maker = Callable[..., TrainJob]
# What TP cuts of a layer fills no whole blocks of compressed numbers.
FOUR_LAYERS = SMALL.model_copy(update={"layers": 4, "ffn_hidden": 100})


@dataclass
class _Thread:
    """A rank of a group of threads: what a compressed sum asks of its group."""

    index: int
    size: int
    barrier: Barrier
    posted: list[Tensor] = field(default_factory=list)

    def begin_all_to_all(self, tensor: Tensor) -> tuple[Tensor, Finish]:
        return torch.stack([rank[self.index] for rank in self._everybodys(tensor)]), done

    def begin_all_reduce(self, tensor: Tensor) -> Finish:
        self.all_reduce(tensor)
        return done

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._everybodys(tensor)).sum(0))

    def all_gather_into(self, whole: Tensor, shard: Tensor) -> None:
        torch.cat(self._everybodys(shard), out=whole)

    def _everybodys(self, tensor: Tensor) -> list[Tensor]:
        self.posted[self.index] = tensor
        self.barrier.wait()
        found = [each.clone() for each in self.posted]
        self.barrier.wait()
        return found


def on_threads(size: int, begin: Callable[[Group, int], Finish]) -> None:
    """Begin and finish a sum on so many ranks, each a thread."""
    barrier, posted = Barrier(size), [torch.empty(0)] * size

    def rank(index: int) -> None:
        begin(cast(Group, _Thread(index, size, barrier, posted)), index)()

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(rank, range(size)))


def summed(tensors: list[Tensor], errors: list[Tensor], word: Compression) -> None:
    """Sum the ranks' tensors in place."""
    sent_as = FORMATS[word]
    on_threads(len(tensors), lambda group, i: begin_compressed_sum(group, tensors[i], errors[i], sent_as))


@pytest.mark.parametrize("word", FORMATS)
@settings(max_examples=20, deadline=None)
@given(
    ranks=st.integers(1, 4), size=st.integers(1, 1500), seed=st.integers(0, 1000), magnitude=st.integers(-20, 6),
    times=st.integers(1, 3),
)  # fmt: skip
def test_error_feedback_conserves_the_sum_and_ranks_get_the_same(
    word: Compression, ranks: int, size: int, seed: int, magnitude: int, times: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    errors = [torch.zeros(size) for _ in range(ranks)]
    given_in, came_out = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for _ in range(times):
        tensors = [10.0**magnitude * torch.randn(size, generator=random) for _ in range(ranks)]
        given_in += torch.stack(tensors).double().sum(0)
        summed(tensors, errors, word)
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        came_out += tensors[0].double()
    kept = torch.stack(errors).double().sum(0)
    torch.testing.assert_close(came_out + kept, given_in, rtol=1e-5, atol=1e-5 * 10.0**magnitude)


def factored(begin: int, rows: int, columns: int) -> Factored:
    matrix = Factored("w", Span(begin, begin + rows * columns), rows, columns, torch.empty(columns, LOW_RANK))
    matrix.draw()
    return matrix


@settings(max_examples=20, deadline=None)
@given(
    ranks=st.integers(1, 4), rows=st.integers(20, 40), before=st.integers(0, 9), seed=st.integers(0, 1000),
    times=st.integers(1, 3),
)  # fmt: skip
def test_factors_conserve_the_sum_and_ranks_get_the_same(
    ranks: int, rows: int, before: int, seed: int, times: int
) -> None:
    size, random = before + 32 * rows + 5, torch.Generator().manual_seed(seed)
    matrices = [[factored(before, rows, 32)] for _ in range(ranks)]
    errors = [torch.zeros(size) for _ in range(ranks)]
    given_in, came_out = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for _ in range(times):
        tensors = [torch.randn(size, generator=random) for _ in range(ranks)]
        given_in += torch.stack(tensors).double().sum(0)
        on_threads(ranks, lambda group, i: begin_low_rank_sum(group, tensors[i], errors[i], matrices[i]))  # noqa: B023
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        assert int(torch.linalg.matrix_rank(matrices[0][0].of(tensors[0]))) == LOW_RANK
        came_out += tensors[0].double()
    kept = torch.stack(errors).double().sum(0)
    torch.testing.assert_close(came_out + kept, given_in, rtol=1e-4, atol=1e-4)
    outside = torch.ones(size, dtype=torch.bool)
    outside[before : before + 32 * rows] = False
    assert not kept[outside].any()


def test_a_sum_of_few_ranks_is_sent_whole_by_the_second_step() -> None:
    """What has no more than LOW_RANK directions needs no more columns."""
    matrix = torch.randn(40, LOW_RANK) @ torch.randn(LOW_RANK, 32)
    matrices = [[factored(0, 40, 32)] for _ in range(2)]
    for _ in range(2):
        tensors, errors = [matrix.flatten().clone() for _ in range(2)], [torch.zeros(40 * 32) for _ in range(2)]
        on_threads(2, lambda group, i: begin_low_rank_sum(group, tensors[i], errors[i], matrices[i]))  # noqa: B023
    torch.testing.assert_close(tensors[0].view(40, 32), 2 * matrix, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("word", FORMATS)
def test_a_number_is_off_by_half_a_step_of_its_blocks_scale_at_most(word: Compression) -> None:
    rows = torch.randn(3, 4 * BLOCK) * torch.logspace(-30, 30, 4).repeat_interleave(BLOCK)
    rows[1, :BLOCK] = 0.0
    packed = pack(rows, FORMATS[word])
    assert packed.numel() == rows.numel() * FORMATS[word].sent_bytes
    largest = rows.view(3, 4, BLOCK).abs().amax(2, keepdim=True)
    step = {"fp16": 2.0**-10, "int8": 1 / 127}[word]
    off = (unpack(packed, FORMATS[word]) - rows).view(3, 4, BLOCK).abs()
    assert (off <= 0.5001 * step * largest).all()


@pytest.mark.parametrize(
    ("layout", "machines", "bound"),
    [
        ("dp4,mbs6,compress-int8", "several", 1e-3),
        pytest.param("dp4,mbs6,compress-fp16", "one", 1e-4, marks=pytest.mark.proof),
        pytest.param("dp4,mbs6,compress-powersgd", "several", 0.05, marks=pytest.mark.proof),
        pytest.param("dp2,tp2,pp2,mbs3,compress-powersgd,bf16", "one", 0.05, marks=pytest.mark.proof),
        pytest.param("dp4,shard2,mbs6,zero2,compress-int8", "several", 1e-3, marks=pytest.mark.proof),
        pytest.param("dp2,tp2,pp2,mbs3,compress-int8,bf16", "one", 1e-3, marks=pytest.mark.proof),
    ],
)
def test_a_compressed_layouts_loss_stays_by_the_exact_one(
    pool: Pool, make_job: Maker, layout: str, machines: Any, bound: float
) -> None:
    """Over 20 steps, in which the loss falls by a tenth and more."""
    exact, compressed = (
        pool.run(make_job(each, model=FOUR_LAYERS), machines).losses
        for each in (re.sub(",compress-[a-z0-9]+", "", layout), layout)
    )
    assert exact[-1] < 0.9 * exact[0]
    assert compressed != exact
    assert compressed == pytest.approx(exact, rel=bound)


@pytest.mark.parametrize("layout", ["dp4,mbs6", "dp4,shard2,mbs3,zero1", "dp2,tp2,pp2,mbs6"])
def test_a_round_of_one_step_of_sgd_averages_parameters(pool: Pool, make_job: Maker, layout: str) -> None:
    """The mean of what replicas learn by SGD from the same weights is what SGD learns from their mean gradient."""
    sgd = {"model": FOUR_LAYERS, "optimizer": "sgd", "learning_rate": 0.3, "clip_grad": 0.0, "steps": 6}
    apart = make_job(f"{layout},local1", **sgd, outer_learning_rate=1.0, outer_momentum=0.0)
    found, exact = pool.run(apart), pool.run(make_job(layout, **sgd))
    assert found.losses == pytest.approx(exact.losses, rel=1e-5)


def test_the_outer_optimizer_is_nesterovs(make_job: Maker) -> None:
    trainer = make_trainer(make_job("mbs24"))
    outer = OuterOptimizer(trainer.flat, CopySums(), parse_layout("local3"), TrainSettings(), tied=True)
    (master,), (begin,) = trainer.flat.master, outer.weights
    reference = begin.clone().requires_grad_()
    torch_sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        learned = 0.01 * torch.randn_like(master)
        master.add_(learned)
        reference.grad = -learned
        torch_sgd.step()
        outer.agree()
        torch.testing.assert_close(begin, reference.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(master, begin)


@pytest.mark.parametrize(
    ("fragments", "delay", "mixing"), [(1, 0, 0.5), (1, 4, 0.25), (2, 0, 0.5), (2, 1, 0.0), (4, 1, 0.5)]
)
def test_fragments_are_agreed_on_in_turns_as_the_paper_says(
    make_job: Maker, fragments: int, delay: int, mixing: float
) -> None:
    """Held against the algorithm written plainly, parameter by parameter, of two replicas that learn at random."""
    layout, rounds = parse_layout(f"mbs24,local4,fragments{fragments},delay{delay}"), 4
    settings = TrainSettings(outer_mixing=mixing)
    replicas = [make_trainer(make_job("mbs24", model=FOUR_LAYERS)) for _ in range(2)]
    barrier, posted = Barrier(2), [torch.empty(0)] * 2
    names = list(replicas[0].flat.places)
    group_of = {name: fragment_of(name, fragments, tied=True) for name in names}

    def weights(flat: FlatWeights, of: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {name: of[0][place.span.slice_in(flat.owned[0])] for name, place in flat.places.items()}

    def replica(index: int) -> tuple[list[bool], dict[str, Tensor]]:
        group = cast(Group, _Thread(index, 2, barrier, posted))
        flat, random = replicas[index].flat, torch.Generator().manual_seed(index)
        flat.units = tuple(replace(unit, holders=replace(unit.holders, copies=group)) for unit in flat.units)
        outer = OuterOptimizer(flat, CopySums(), layout, settings, tied=True)
        moved = []
        for step in range(1, 4 * rounds + 1):
            for now in weights(flat, flat.master).values():
                now.add_(0.01 * torch.randn(now.shape, generator=random))
            moved.append(outer.after(step))
        return moved, weights(flat, flat.master)

    # the paper's algorithm 2, of whole tensors
    plain = [
        {name: tensor.clone() for name, tensor in weights(each.flat, each.flat.master).items()} for each in replicas
    ]
    begun, momentum = {name: plain[0][name].clone() for name in names}, {name: 0.0 * plain[0][name] for name in names}
    randoms, late = [torch.Generator().manual_seed(index) for index in range(2)], dict[tuple[str, int], Tensor]()
    for step in range(1, 4 * rounds + 1):
        for mine, random in zip(plain, randoms, strict=True):
            for name in names:
                mine[name] += 0.01 * torch.randn(mine[name].shape, generator=random)
        for name in names:
            offset = group_of[name] * 4 // fragments
            if delay and (gradient := late.pop((name, step), None)) is not None:
                _nesterov(begun[name], gradient, momentum[name], settings)
                for mine in plain:
                    mine[name] = mixing * mine[name] + (1 - mixing) * begun[name]
            if (step - offset) % 4:
                continue
            gradient = torch.stack([begun[name] - mine[name] for mine in plain]).mean(0)
            if delay:
                late[name, step + delay] = gradient
                continue
            _nesterov(begun[name], gradient, momentum[name], settings)
            for mine in plain:
                mine[name] = begun[name].clone()
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(replica, range(2)))
    turns = {(4 * part // fragments + delay) % 4 for part in range(fragments)}
    for (moved, learned), mine in zip(found, plain, strict=True):
        expected = [step % 4 in turns and step > delay for step in range(1, 4 * rounds + 1)]
        assert moved == expected
        for name in names:
            torch.testing.assert_close(learned[name], mine[name], rtol=1e-4, atol=1e-5)


def _nesterov(weights: Tensor, gradient: Tensor, momentum: Tensor, settings: TrainSettings) -> None:
    momentum.mul_(settings.outer_momentum).add_(gradient)
    weights.sub_(settings.outer_learning_rate * (gradient + settings.outer_momentum * momentum))


@pytest.mark.parametrize("tied", [True, False])
@given(layers=st.integers(4, 24), fragments=st.integers(1, 4), pp=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_every_stage_has_some_of_every_fragment_and_both_ends_of_a_tied_embedding_are_one(
    tied: bool, layers: int, fragments: int, pp: int
) -> None:
    if fragments > layers // pp:
        return
    stages = [range(stage * layers // pp, (stage + 1) * layers // pp) for stage in range(pp)]
    for stage in stages:
        assert {fragment_of(f"layers.{layer}", fragments, tied=tied) for layer in stage} == set(range(fragments))
    embedding, head = (fragment_of(name, fragments, tied=tied) for name in ("embedding.tokens", "head.weight"))
    assert embedding == 0 and head == (0 if tied else fragments - 1)


@pytest.mark.parametrize("apart", [pytest.param("local4", marks=pytest.mark.proof), "local4,fragments2,delay1"])
def test_local_steps_learn_and_tell_the_same_on_every_layout_of_a_replica(
    pool: Pool, make_job: Maker, apart: str
) -> None:
    """Through sockets and shared memory, where sums are beside the steps or done at once."""
    shapes = [("dp2,mbs12", "several"), ("dp2,tp2,pp2,mbs6", "one"), ("dp4,shard2,mbs6,zero3", "one")]
    losses = [
        pool.run(make_job(f"{shape},{apart}", model=FOUR_LAYERS, steps=12), cast(Any, machines)).losses
        for shape, machines in shapes
    ]
    assert losses[0][-1] < 0.95 * losses[0][0]  # the text is the trainer's own source, which changes
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


@pytest.fixture
def go_on(pool: Pool, make_job: Maker, tmp_path: Path) -> Callable[..., Run]:
    """Train a layout for 4 of 6 steps, and another from there."""

    def run(written_on: str, read_on: str) -> Run:
        for layout, steps, resume in ((written_on, 4, False), (read_on, 6, True)):
            job = make_job(layout, model=FOUR_LAYERS, steps=6, checkpoint_every=2)
            found = pool.run(job.model_copy(update={"steps": steps, "checkpoint_dir": str(tmp_path), "resume": resume}))
        return found

    return run


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("dp4,mbs6,compress-int8", marks=pytest.mark.proof),
        "dp2,tp2,mbs12,compress-int8",
        pytest.param("dp2,tp2,mbs12,compress-fp16", marks=pytest.mark.proof),
        "dp2,tp2,pp2,mbs6,sp,compress-int8",
        pytest.param("dp4,shard2,pp2,mbs6,zero2,compress-int8", marks=pytest.mark.proof),
        pytest.param("dp2,tp2,mbs12,sp,local3,delay2,compress-int8", marks=pytest.mark.proof),
    ],
)
def test_compressed_sums_go_on_bit_for_bit(
    go_on: Callable[..., Run], pool: Pool, make_job: Maker, tmp_path: Path, layout: str
) -> None:
    """A checkpoint has what was not sent of a weight once, and several ranks of a replica may hold the weight."""
    job = make_job(layout, model=FOUR_LAYERS, steps=6, checkpoint_every=0)
    undisturbed = pool.run(job.model_copy(update={"checkpoint_dir": str(tmp_path / "undisturbed")})).losses
    assert go_on(layout, layout).losses == undisturbed[4:]


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout", ["dp4,mbs6,local4,fragments2,delay2", "dp2,tp2,mbs12,local2,fragments2,delay1,compress-int8"]
)
def test_what_is_on_its_way_goes_on_bit_for_bit(
    go_on: Callable[..., Run], pool: Pool, make_job: Maker, tmp_path: Path, layout: str
) -> None:
    """The checkpoint is of a step behind which a sum has begun that is not there yet."""
    job = make_job(layout, model=FOUR_LAYERS, steps=6, checkpoint_every=0)
    undisturbed = pool.run(job.model_copy(update={"checkpoint_dir": str(tmp_path / "undisturbed")})).losses
    assert go_on(layout, layout).losses == undisturbed[4:]


@pytest.mark.proof
def test_a_round_goes_on_on_another_layout_of_as_many_replicas(
    go_on: Callable[..., Run], pool: Pool, make_job: Maker
) -> None:
    undisturbed = pool.run(make_job("dp2,mbs12,local3", model=FOUR_LAYERS, steps=6)).losses
    resumed = go_on("dp2,tp2,pp2,mbs6,local3", "dp4,shard2,mbs3,zero2,local3")
    assert resumed.losses == pytest.approx(undisturbed[4:], rel=1e-5)


@pytest.mark.parametrize(
    ("written_on", "read_on", "says"),
    [
        (
            "dp2,mbs12,local3",
            "dp4,mbs6,local3",
            "3 local steps of 4 replicas, and the checkpoint is of 3 local steps of 2",
        ),
        ("dp2,mbs12", "dp2,mbs12,local3", "the checkpoint is of no local steps"),
        ("dp2,mbs12,local3", "dp2,mbs12", "has no local steps"),
    ],
)
def test_a_round_of_other_replicas_is_refused(
    go_on: Callable[..., Run], written_on: str, read_on: str, says: str
) -> None:
    (told,) = go_on(written_on, read_on).of_kind("refused")
    assert says in told["text"] and "train.init_from" in told["text"] and "\n" not in told["text"]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("written_on", "read_on"),
    [("dp2,mbs12,compress-int8", "dp4,mbs6,compress-int8"), ("dp2,mbs12", "dp2,mbs12,compress-int8")],
)
def test_other_replicas_begin_without_what_was_not_sent_and_say_so(
    go_on: Callable[..., Run], written_on: str, read_on: str
) -> None:
    (told,) = go_on(written_on, read_on).of_kind("resumed")
    assert "had not sent is left out" in told["changed"][-1]


def test_a_bad_step_leaves_nothing_behind_in_error_feedback(make_job: Maker) -> None:
    trainer = make_trainer(make_job("mbs24,compress-int8", model=FOUR_LAYERS))
    assert not trainer.step().skipped
    assert all(error.any() for error in trainer.sums.state["error"])
    healthy = trainer.forward_backward

    def forward_backward() -> Tensor:
        loss = healthy()
        for grads in trainer.flat.grads:
            grads.fill_(torch.nan)
        for error in trainer.sums.state["error"]:
            error.fill_(torch.nan)
        return loss

    trainer.forward_backward = forward_backward  # type: ignore[method-assign]
    assert trainer.step().skipped
    trainer.forward_backward = healthy  # type: ignore[method-assign]
    found = trainer.step()
    assert not found.skipped and math.isfinite(found.loss)


@pytest.mark.parametrize("form", ["int8", "powersgd"])
def test_nothing_of_a_batch_that_is_skipped_is_sent_later(make_job: Maker, form: str) -> None:
    """A leap's gradient is finite: what compression had kept of it was learned with the next step."""
    trainer = make_trainer(make_job(f"mbs24,compress-{form}", on_bad_loss="skip"))
    trainer.step()
    assert any(error.count_nonzero() for error in trainer.sums.state["error"])
    trainer.losses.judge = lambda loss, grad_norm: "it leaps"  # type: ignore[method-assign]
    assert trainer.step().skipped
    assert not any(error.count_nonzero() for error in trainer.sums.state["error"])
