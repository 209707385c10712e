"""What a probe makes of its samples: means, the slowest of those that meet, products as they are trained with."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimaran.files.catalogue import load_stack
from trimaran.probe.alone import Operands
from trimaran.probe.probe_settings import ProbedProduct, probe_settings
from trimaran.probe.timing import mean_seconds

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
