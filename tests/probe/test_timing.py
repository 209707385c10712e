"""What a probe makes of its samples: means, the slowest of those that meet, products as they are trained with."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimaran.files.catalogue import load_stack
from trimaran.probe.alone import Operands, ProductCase, matmul_rates
from trimaran.probe.probe_settings import ProbedProduct, probe_settings
from trimaran.probe.timing import Timing, mean_seconds

# What samples of a quiet machine scatter by, the same for every case.
SCATTER = (0.97, 0.99, 1.0, 1.01, 1.02, 1.06, 1.11)
# Long against what a busy machine takes to wake a process.
SLEEP_S = 0.1


@given(st.lists(st.floats(1e-6, 10.0), min_size=3, max_size=12), st.floats(1.0, 50.0))
def test_a_mean_is_of_all_samples_and_a_disturbed_case_moves_no_other(seconds: list[float], slower: float) -> None:
    samples = {number: [each * share for share in SCATTER] for number, each in enumerate(seconds)}
    means = mean_seconds([samples])
    for number, each in enumerate(seconds):
        assert means[number] == pytest.approx(each * sum(SCATTER) / len(SCATTER))
    samples[0][-1] *= slower
    assert mean_seconds([samples]) == pytest.approx(means)


@given(st.floats(1.0, 50.0), st.permutations(range(3)))
def test_a_spell_beside_a_busy_neighbour_moves_no_mean(slower: float, order: list[int]) -> None:
    def at(pace: float) -> dict[str, list[float]]:
        return {case: [each * pace * share for share in SCATTER] for case, each in (("a", 1.0), ("b", 3.0))}

    means = mean_seconds([at(1.0), at(1.0), at(1.0)])
    spells = [at(1.0), at(1.0), at(slower)]
    disturbed = mean_seconds([spells[number] for number in order])
    for case in "ab":
        assert means[case] <= disturbed[case] <= means[case] * max(SCATTER)


def test_of_one_case_alone_the_lower_quartile_stands() -> None:
    assert mean_seconds([{"one": [1.0, 1.0], "none": []}, {"one": [1.0, 9.0]}]) == {"one": 1.0}


def test_a_case_that_takes_long_leaves_the_others_their_samples() -> None:
    """As a product in bf16 does on a processor that has none: one in fp32 takes a thousandth of its time."""
    quick, limit_s, samples = range(20), 4.0, Counter[int | str]()

    def preparing() -> Callable[[int | str], Callable[[], object]]:
        def prepare(case: int | str) -> Callable[[], object]:
            samples[case] += 1
            return lambda: time.sleep(0.3 if case == "long" else 0.002)

        return prepare

    timing = Timing([*quick, "long"], preparing, 9, torch.device("cpu"), limit_s)
    for spell in range(3):
        timing.spell((spell + 1) / 3)
    assert all(samples[case] == 9 for case in quick) and 1 <= samples["long"] <= 3
    assert timing.seconds()["long"] == pytest.approx(0.3, rel=0.3)


def test_a_case_that_a_smaller_one_tells_to_take_too_long_is_left_out() -> None:
    begun = time.monotonic()

    def preparing() -> Callable[[tuple[str, int]], Callable[[], object]]:
        return lambda case: lambda: time.sleep(0.0001 * case[1] if case[0] == "slow" else 0.0)

    cases = [(kind, amount) for amount in (100, 1000, 100_000) for kind in ("slow", "fast")]
    timing = Timing(cases, preparing, 3, torch.device("cpu"), limit_s=10.0, work=lambda case: case)
    timing.spell()
    assert set(timing.seconds()) == {*cases} - {("slow", 100_000)} and timing.left_out == {("slow", 100_000)}
    assert time.monotonic() - begun < 5.0


def test_a_shape_of_which_an_orientation_was_left_out_has_no_rate() -> None:
    """Its others are the quicker ones: 2,048 in bf16 took 63 s forward and 3 s for a weight's gradient."""
    square, small = (
        [ProbedProduct(m=n, n=n, k=n, orientation=way) for way in ("forward", "weight_gradient")] for n in (2048, 256)
    )
    seconds: dict[ProductCase, float] = {("bf16", case): 1.0 for case in (*small, square[1])}
    assert {rate.m for rate in matmul_rates(seconds)} == {256, 2048}
    assert {rate.m for rate in matmul_rates(seconds, [("bf16", square[0])])} == {256}


def meet(rank: int, folder: Path, pipe: Connection) -> None:
    import torch.distributed as dist

    from trimaran.probe.together import seconds_between_meetings, seconds_of_the_slowest
    from trimaran.train.comm.group import GroupFactory

    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=2)
    cpu = torch.device("cpu")
    group = GroupFactory(cpu).get((0, 1), rank)
    # in turns either rank takes twice as long, as slots do that are slow for a moment each
    turn = iter(range(100))

    def run() -> None:
        time.sleep(SLEEP_S * (1 + (next(turn) % 2 == rank)))

    def unlike() -> None:
        time.sleep(SLEEP_S * (1 + rank))

    pipe.send(
        (
            seconds_between_meetings(run, 1, 6, group, cpu),
            seconds_between_meetings(run, 1, 6, None, cpu),
            seconds_of_the_slowest(unlike, 2, 6 * SLEEP_S, group, cpu),
            seconds_of_the_slowest(unlike, 2, 6 * SLEEP_S, None, cpu),
        )
    )
    dist.destroy_process_group()


def test_ranks_that_meet_wait_for_the_slowest_of_each_piece_or_of_a_window(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    ranks = [context.Process(target=meet, args=(rank, tmp_path, ends[rank][1])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for number, (ours, theirs) in enumerate(ends):
        theirs.close()
        together, alone, slowest, own = ours.recv()
        assert 2 * SLEEP_S <= together < 4 * SLEEP_S
        assert 1.5 * SLEEP_S <= alone < together
        assert own >= 2 * SLEEP_S * (1 + number)
        assert slowest >= 4 * SLEEP_S, "that of the second rank, for both"
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0


@pytest.mark.parametrize("orientation", ["forward", "input_gradient", "weight_gradient"])
def test_a_product_is_the_same_by_the_trainer_and_by_pytorch(orientation: str) -> None:
    operands = Operands(torch.device("cpu"))
    case = ProbedProduct.model_validate({"m": 24, "n": 40, "k": 16, "orientation": orientation})
    plain = operands.plain_product(case, torch.float32)()
    own = operands.product(case, torch.float32)()
    assert plain.shape == own.shape == (24, 40)
    torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("orientation", ["forward", "input_gradient", "weight_gradient"])
def test_a_probed_product_comes_back_to_a_matrix_and_a_result_after_64_mib(orientation: str, plain: bool) -> None:
    """Of 512 x 512 in fp32 64 MiB hold the tokens and 31 pairs of another matrix and a result."""
    operands = Operands(torch.device("cpu"))
    case = ProbedProduct.model_validate({"m": 512, "n": 512, "k": 512, "orientation": orientation})
    run = (operands.plain_product if plain else operands.product)(case, torch.float32)
    places, corners = zip(
        *((result.data_ptr(), result[0, 0].item()) for result in (run() for _ in range(31))), strict=True
    )
    assert len(set(places)) == len(set(corners)) == 31
    again = run()
    if plain or orientation == "weight_gradient":
        assert again.data_ptr() == places[0]
    if plain or orientation != "weight_gradient":
        assert again[0, 0].item() == corners[0]


def test_others_software_is_probed_with_pytorchs_products() -> None:
    def plain(stack: str | None) -> bool:
        known = None if stack is None else load_stack(stack)
        return probe_settings(
            device="cpu", slots=1, threads_per_rank=1, model=None, seq_len=None, mbs=(1,), quick=True, stack=known
        ).plain_products

    assert (plain(None), plain("trimaran"), plain("torch-fsdp")) == (False, False, True)
