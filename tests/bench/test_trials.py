"""Claims about single trials: every end gets its true status, its evidence, and leaves no process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from trial_helpers import LIMITS, fake_worker, processes_that_name, start_silent_ranks_and_kill_the_launcher
from trimaran.bench.launch.local import LocalLauncher
from trimaran.bench.launch.port import HeldPort
from trimaran.bench.trial.trial import finished_before, prepare_trial, run_trial
from trimaran.bench.trial.trial_figures import median_and_spread
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.variant import Variant
from trimaran.recipe.recipe import Recipe

Run = Callable[..., Measurement]


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path) -> None:
    yield
    assert processes_that_name(str(tmp_path)) == []


def test_a_healthy_trial_is_a_row_with_the_median_after_warm_up(run_fake: Run) -> None:
    row = run_fake("ok", "dp1,tp2,pp2,mbs2")
    assert row.status == "ok"
    assert row.evidence is None
    assert row.sec_per_it == pytest.approx(1.15)  # of 1.0 1.1 1.2 1.3
    assert row.sec_per_it_spread == pytest.approx(0.15)
    assert len(row.step_times_s) == len(row.losses) == 6
    assert (row.mem_gib, row.mem_gib_per_rank) == (4.0, (1.0, 2.0, 3.0, 4.0))
    assert (row.dp, row.tp, row.pp, row.mbs, row.devices, row.schedule) == (1, 2, 2, 2, 4, "1f1b")
    assert row.tokens_per_s_per_gpu == pytest.approx(8 * 32 / 1.15 / 4)
    assert row.tflops is not None
    assert row.flops_formula == "model_flops"
    assert row.layout_label is not None
    assert "split" in row.layout_label
    assert row.libraries["python"]
    assert row.machine
    assert row.code_version
    assert row.created_at


@pytest.mark.parametrize(
    ("behaviour", "status", "says"),
    [
        ("oom", "oom", "rank 1 ran out of memory: DefaultCPUAllocator: can't allocate memory"),
        ("bad_alloc", "oom", "rank 1 ran out of memory"),
        ("segfault", "crash", "rank 1 was killed by SIGSEGV"),
        ("fail", "fail", "rank 1 left with status 1: ValueError: the data has run out"),
        ("exit-2", "fail", "refused: data_dir: holds no tokens: run trimaran.train.programs.tokenise first"),
        ("no-result", "fail", "result.json cannot be read"),
        ("cut", "fail", "result.json is garbage"),
        ("garbage", "fail", "result.json is garbage"),
        ("deep", "fail", "result.json is garbage"),
        ("few-steps", "fail", "holds 1 step times, but 6 steps were asked for"),
        ("minus", "fail", "not positive"),
    ],
)
def test_every_end_has_its_status_and_its_reason(run_fake: Run, behaviour: str, status: str, says: str) -> None:
    # on a busy machine 3 s of silence can pass before an end is seen
    row = run_fake(behaviour, hang_s=10)
    assert (row.status, row.sec_per_it) == (status, None)
    assert row.evidence is not None
    assert says in row.evidence.splitlines()[0]
    assert "\x1b" not in row.evidence


def test_a_hang_is_noticed_by_silence_and_leaves_the_stacks_of_all_ranks(run_fake: Run) -> None:
    started = time.monotonic()
    row = run_fake("hang")
    assert row.status == "hang"
    assert row.evidence is not None
    assert re.match(r"rank \d gave no sign for [\d.]+ s after step 2; [\d.]+ s are allowed", row.evidence)
    assert row.evidence.count("in sleep_for_ever") == 2
    assert time.monotonic() - started < LIMITS.timeout_s


def test_a_trial_that_never_reaches_its_first_step_hangs_too(run_fake: Run) -> None:
    row = run_fake("silent", start_s=1.0)
    assert row.status == "hang"
    assert "before its first step" in (row.evidence or "")


def test_a_hang_in_the_first_step_is_told_by_the_start_up_and_not_by_its_limit(run_fake: Run) -> None:
    # a busy machine may take seconds to wake both ranks for their stacks
    row = run_fake("hang-first", "dp2,mbs1", start_s=25, peers_s=3.0)
    assert row.status == "hang"
    assert row.evidence is not None
    assert re.match(r"rank 1 gave no sign for [\d.]+ s in its first step", row.evidence)
    assert row.evidence.count("in sleep_for_ever") == 2
    assert row.wall_s is not None
    assert row.wall_s < 20


def test_slow_steps_are_no_hang_as_long_as_they_are_regular(run_fake: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.4")
    assert run_fake("ok", hang_s=0.1).status == "ok"


def test_a_trial_that_goes_on_for_too_long_is_timed_out(run_fake: Run) -> None:
    row = run_fake("slow", timeout_s=1.5)
    assert row.status == "timeout"
    assert "1.5 s, the trial's time limit" in (row.evidence or "")


def test_a_trial_over_its_memory_limit_is_out_of_memory(run_fake: Run) -> None:
    row = run_fake("eat", "dp1,mbs1", memory_gib=0.25, hang_s=10)
    assert row.status == "oom"
    assert "the trial's limit is 0.25 GiB" in (row.evidence or "")


def test_silent_ranks_whose_memory_grows_are_no_hang_until_it_stops(
    run_fake: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing, seen = iter([0.1, 0.2, 0.3, 0.4]), []

    def held(process_ids: tuple[int, ...]) -> float:
        seen.append(next(growing, 0.4))
        return seen[-1]

    monkeypatch.setattr("trimaran.bench.watch.watch.resident_gib", held)
    assert run_fake("hang", hang_s=1.0).status == "hang"
    assert seen == [0.1, 0.2, 0.3, 0.4, 0.4]


def test_a_trial_that_floods_its_log_is_stopped(run_fake: Run) -> None:
    row = run_fake("flood", "dp1,mbs1", log_mib=8, hang_s=10)
    assert row.status == "fail"
    assert "of output, 8 are allowed" in (row.evidence or "")
    assert len(row.evidence or "") < 100_000


def test_children_of_ranks_do_not_outlive_the_trial(run_fake: Run) -> None:
    assert run_fake("leave-children").status == "ok"  # the fixture looks for what is left


def test_a_diverged_loss_is_kept_up_to_where_it_ends(run_fake: Run) -> None:
    row = run_fake("diverge")
    assert (row.status, row.losses) == ("ok", (5.0, 4.0))
    assert row.notes == "the loss is not finite from step 3 on"


def test_a_variant_reaches_the_ranks_and_the_row(recipe: Recipe, cluster: Cluster, tmp_path: Path) -> None:
    variant = Variant(environment={"A_VARIANT": "$(rm -rf $HOME) | `id`", "OMP_NUM_THREADS": "3"}, pin_cpus=True)
    layout = parse_layout("dp1,mbs1")
    trial = prepare_trial(recipe, cluster, layout, data_dir=tmp_path, work_dir=tmp_path / "runs", variant=variant)
    row = run_trial(trial, LocalLauncher(), LIMITS, worker=fake_worker("ok"))
    saw = json.loads((Path(trial.job.out_dir) / "result.json").read_text())["ranks_saw"]
    assert (saw["A_VARIANT"], saw["OMP_NUM_THREADS"]) == ("$(rm -rf $HOME) | `id`", "3")
    assert saw["cores"] == min(3, len(os.sched_getaffinity(0))), "as many cores as it computes with, where there are"
    assert trial.job.threads_per_rank == 3, "PyTorch is told the number too, and would else compute with the device's"
    assert row.variants == {"A_VARIANT": "$(rm -rf $HOME) | `id`", "OMP_NUM_THREADS": "3", "pin_cpus": "yes"}
    assert row.environment["OMP_NUM_THREADS"] == "3"
    plain = prepare_trial(recipe, cluster, layout, data_dir=tmp_path, work_dir=tmp_path)
    assert plain.key != trial.key


def test_ranks_of_a_sweep_under_torchrun_meet_where_the_sweep_says(
    run_fake: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At torchrun's own store they waited for ranks that never came, which was stored as a hang of their layout."""
    for name, value in {"RUN_ID": "7", "USE_AGENT_STORE": "True", "RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    assert run_fake("ok").status == "ok"
    (result,) = tmp_path.rglob("result.json")
    saw = json.loads(result.read_text())["ranks_saw"]
    assert not [name for name in saw if name.startswith("TORCHELASTIC_")]


def tried_under(environment: dict[str, str], recipe: Recipe, cluster: Cluster, folder: Path) -> Measurement:
    variant = Variant(environment=environment)
    trial = prepare_trial(
        recipe, cluster, parse_layout("dp2,mbs1"), data_dir=folder, work_dir=folder / "runs", variant=variant
    )
    return run_trial(trial, LocalLauncher(), LIMITS, worker=fake_worker("ok"))


def test_a_network_device_that_ranks_of_one_machine_do_not_use_is_no_variant_of_theirs(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    row = tried_under({"GLOO_SOCKET_IFNAME": "eth0"}, recipe, cluster, tmp_path)
    assert row.status == "not_run" and "GLOO_SOCKET_IFNAME is 'eth0'" in (row.evidence or "")


def test_a_library_that_was_not_loaded_is_a_failure_and_not_a_figure(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    row = tried_under({"LD_PRELOAD": "libtcmalloc.so.0.misspelt"}, recipe, cluster, tmp_path)
    assert (row.status, row.sec_per_it) == ("fail", None)
    assert (row.evidence or "").startswith("rank 0 ran without the library libtcmalloc.so.0.misspelt: it cannot be ")
    variant = Variant(environment={"LD_PRELOAD": "libtcmalloc.so.0.misspelt"})
    trial = prepare_trial(
        recipe, cluster, parse_layout("dp2,mbs1"), data_dir=tmp_path, work_dir=tmp_path / "runs", variant=variant
    )
    assert finished_before(trial) is None, "a row that found no room is no figure the next time either"


def test_what_an_interrupted_run_left_is_not_mistaken_for_a_result(
    recipe: Recipe, cluster: Cluster, tmp_path: Path, run_fake: Run
) -> None:
    assert run_fake("ok").status == "ok"
    assert run_fake("no-result").status == "fail"
    trial = prepare_trial(recipe, cluster, parse_layout("dp2,mbs1"), data_dir=tmp_path, work_dir=tmp_path / "runs")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    subprocess.run(["rm", "-r", trial.job.out_dir], check=True)
    Path(trial.job.out_dir).symlink_to(elsewhere)
    assert run_fake("ok").status == "ok"
    assert [file.name for file in elsewhere.iterdir()] == ["precious"]


def test_ranks_die_with_a_launcher_that_is_killed(recipe: Recipe, tmp_path: Path) -> None:
    local = "from trimaran.bench.launch.local import LocalLauncher\nlauncher = LocalLauncher()"
    start_silent_ranks_and_kill_the_launcher(tmp_path, local, "", ranks=3)
    deadline = time.monotonic() + 20
    while processes_that_name(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_that_name(str(tmp_path))


def test_a_held_port_is_given_to_nobody_else_and_still_serves_its_trial() -> None:
    with closing(HeldPort()) as held:
        others = []
        for _ in range(300):
            other = socket.socket()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            others.append(other)
        assert held.number not in {other.getsockname()[1] for other in others}
        for other in others:
            other.close()
        early = socket.create_connection(("127.0.0.1", held.number), timeout=5)
        rank_0 = socket.socket(fileno=os.dup(held.fileno()))
        rank_0.listen()
        accepted, _ = rank_0.accept()
        early.sendall(b"here")
        assert accepted.recv(4) == b"here", "a rank that came before rank 0 is served"
        early.close()
        accepted.close()
        rank_0.close()


@pytest.mark.parametrize("lo", ["down", "without an address"])
def test_a_machine_without_a_loopback_is_told_and_no_layout_hangs(lo: str) -> None:
    """Ranks tried to meet for three minutes, and the layout's row said that it hangs."""
    take = "from trimaran.bench.launch.port import loopback_port; loopback_port()"
    change = "true" if lo == "down" else "ip link set lo up && ip address del 127.0.0.1/8 dev lo"
    within = ["unshare", "--net", "sh", "-c", f'{change} || exit 77; exec "$@"', "sh"]
    if subprocess.run([*within, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs to make a network of its own")
    done = subprocess.run([*within, sys.executable, "-c", take], check=False, capture_output=True, text=True)
    told = done.stderr.strip().splitlines()[-1:]
    assert told and "meet at 127.0.0.1, which is not reached here" in told[0], done.stderr
    assert "ip link set lo up" in told[0]


def test_the_median_ignores_warm_up_and_stragglers() -> None:
    assert median_and_spread((50.0, 9.0, 1.0, 1.1, 1.2, 7.0, 1.0), 2) == (pytest.approx(1.1), pytest.approx(0.2))
    assert median_and_spread((3.0, 2.0), 2) == (2.0, 0.0)


def test_a_trial_folder_is_made_anew_while_what_was_there_still_writes(
    recipe: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    """A rank that ends after its launcher writes a last file: the next attempt was refused for a full folder."""
    trial = prepare_trial(recipe, cluster, parse_layout("dp1"), data_dir=tmp_path, work_dir=tmp_path)
    folder = Path(trial.job.out_dir)
    folder.mkdir(parents=True)
    until = time.monotonic() + 1.0
    as_it_was = os.open(folder, os.O_RDONLY)  # by its name the writer would find the new one

    def write() -> None:
        number = 0
        with contextlib.suppress(FileNotFoundError):
            while time.monotonic() < until:
                os.close(os.open(f"last-{number}", os.O_CREAT | os.O_WRONLY, dir_fd=as_it_was))
                number += 1

    writer = threading.Thread(target=write)
    writer.start()
    row = run_trial(trial, LocalLauncher(), LIMITS, worker=fake_worker("ok"))
    writer.join()
    os.close(as_it_was)
    assert row.status == "ok"
    assert not list(folder.glob("last-*"))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EBUSY])
def test_a_file_that_is_renamed_or_held_open_on_nfs_delays_a_trial_folder(
    recipe: Recipe, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A rank writes its files beside and renames them: between being listed and removed one had gone."""
    trial = prepare_trial(recipe, cluster, parse_layout("dp1"), data_dir=tmp_path, work_dir=tmp_path)
    Path(trial.job.out_dir).mkdir(parents=True)
    remove, fails = shutil.rmtree, [number]

    def removed(folder: Path) -> None:
        if fails:
            raise OSError(fails.pop(), "as the kernel says", str(folder))
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", removed)
    assert run_trial(trial, LocalLauncher(), LIMITS, worker=fake_worker("ok")).status == "ok"


def test_a_machine_that_starts_no_further_process_is_told_so(
    recipe: Recipe, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a limit on processes: what a lasting training tries again ended it, by an error of no trial's."""

    def none(*asked: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    trial = prepare_trial(recipe, cluster, parse_layout("dp1"), data_dir=tmp_path, work_dir=tmp_path)
    monkeypatch.setattr("trimaran.bench.launch.local.Nursery", none)
    with pytest.raises(TrimaranError, match=r"forked from cannot be started: .*Resource temporarily unavailable"):
        run_trial(trial, LocalLauncher(), LIMITS)


def test_what_cannot_run_is_refused_before_a_process_starts(recipe: Recipe, cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(TrimaranError, match="3"):
        prepare_trial(recipe, cluster, parse_layout("tp3"), data_dir=tmp_path, work_dir=tmp_path)
    stack = recipe.stack.model_copy(update={"local_steps": True})
    rounds, apart = recipe.model_copy(update={"stack": stack}), parse_layout("dp2,local500")
    with pytest.raises(TrimaranError, match=r"no round of 500 local steps after \d+ to warm up: raise steps to 1000"):
        prepare_trial(rounds, cluster, apart, data_dir=tmp_path, work_dir=tmp_path)
    blocked = tmp_path / "file"
    blocked.touch()
    trial = prepare_trial(recipe, cluster, parse_layout("dp1"), data_dir=tmp_path, work_dir=blocked)
    with pytest.raises(TrimaranError, match="cannot be made"):
        run_trial(trial, LocalLauncher(), LIMITS, worker=fake_worker("ok"))
    trial = prepare_trial(recipe, cluster, parse_layout("dp1"), data_dir=tmp_path, work_dir=tmp_path)
    assert run_trial(trial, LocalLauncher(), LIMITS, worker=("/no/such/python",)).status == "fail"
