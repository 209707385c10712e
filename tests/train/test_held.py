"""Snapshots that nodes hold in memory for each other: one node may be lost, and the training goes on from them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pool import Pool, Run
from small_disk import mounted
from trimaran.protocol.job import TrainJob
from trimaran.train.state import held
from trimaran.train.state.held import HeldSnapshots, NotHeldError
from trimaran.train.state.manifest import saved_steps, verify

Maker = Callable[..., TrainJob]

# The pool's ranks are in turns on the nodes n0 and n1.
NODES = ("n0", "n1")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where the nodes of the training hold its snapshots."""
    folder = HeldSnapshots(tmp_path, None)._root
    yield folder
    assert not folder.exists(), "nothing stays in memory"


@pytest.fixture
def train(pool: Pool, make_job: Maker, tmp_path: Path) -> Callable[..., Run]:
    """Train up to `steps` of 6, with a checkpoint of the last one, and snapshots of the first one and of later ones."""

    def run(
        layout: str, steps: int = 6, *, resume: bool = False, poison: tuple[int, ...] = (), bad_steps: int = 10
    ) -> Run:
        job = make_job(layout, steps=6, checkpoint_every=100, snapshot_seconds=1e-9, seed=1234, bad_steps=bad_steps)
        update = {"steps": steps, "checkpoint_dir": str(tmp_path), "resume": resume}
        return pool.run(job.model_copy(update=update), poison=poison)

    return run


@pytest.fixture
def broken(train: Callable[..., Run], root: Path) -> Callable[[str], Run]:
    """A training that a bad loss ends at step 6, with a checkpoint of step 3: what nodes hold of later ones stays."""

    def run(layout: str) -> Run:
        train(layout, 3)
        assert not root.exists()
        # 24 samples a step: the last step's first one has no loss
        done = train(layout, resume=True, poison=(5 * 24,), bad_steps=1)
        assert done.of_kind("refused")
        return done

    return run


def held_steps(root: Path) -> dict[str, list[int]]:
    return {node: saved_steps(root / node) for node in NODES}


@pytest.mark.parametrize(
    ("layout", "next_layout", "lost"),
    [
        ("dp2,tp2,pp2,mbs6,zero1", "dp2,tp2,pp2,mbs6,zero1", "n1"),
        pytest.param("dp3,mbs8,zero3", "tp2,mbs24", "n0", marks=pytest.mark.proof),
        pytest.param("dp4,tp2,mbs6", "dp1,mbs24", "n1", marks=pytest.mark.proof),
    ],
)
def test_one_node_may_be_lost(
    broken: Callable[[str], Run], train: Callable[..., Run], pool: Pool, make_job: Maker, tmp_path: Path, root: Path,
    layout: str, next_layout: str, lost: str,
) -> None:  # fmt: skip
    """It goes on from the snapshot, with the losses of an undisturbed training: on one layout bit for bit."""
    undisturbed = pool.run(make_job(next_layout, steps=6))
    told = broken(layout).of_kind("held")
    newest = told[-1]["step"]
    assert held_steps(root) == {node: [newest] for node in NODES}, "a newer one takes the place of the one before"
    assert saved_steps(tmp_path) == [3] and newest in (4, 5) and {*told[-1]["gib"]} == {*NODES}
    shutil.rmtree(root / lost)
    resumed = train(next_layout, resume=True)
    (back,), (went_on,) = resumed.of_kind("brought_back"), resumed.of_kind("resumed")
    assert f"snapshot of step {newest}, held in memory by" in back["text"]
    assert went_on["step"] == newest
    if layout == next_layout:
        assert resumed.losses == undisturbed.losses[newest:]
    assert resumed.losses == pytest.approx(undisturbed.losses[newest:], rel=1e-5)


def test_what_is_not_whole_is_passed_over(
    broken: Callable[[str], Run], train: Callable[..., Run], root: Path, tmp_path: Path
) -> None:
    """Where a file is nowhere, as of nodes that were both lost in part, the newest checkpoint is gone on from."""
    broken("dp2,mbs12,zero1")
    for node in NODES:
        for step in saved_steps(root / node):
            (root / node / f"step-{step:08d}" / "rank-00001.safetensors").unlink()
    resumed = train("dp2,mbs12,zero1", resume=True)
    assert "lacks rank-00001.safetensors" in resumed.of_kind("brought_back")[0]["text"]
    assert resumed.of_kind("resumed")[0]["step"] == 3


def test_what_is_held_stays_where_a_bad_last_step_is_not_saved(
    train: Callable[..., Run], root: Path, tmp_path: Path
) -> None:
    """Nothing newer takes its place: thrown away, all steps since the last checkpoint were lost with it."""
    done = train("dp2,mbs12,zero1", poison=(5 * 24,))
    assert "is not saved" in done.of_kind("not_saved")[-1]["text"] and done.of_kind("refused")
    newest = done.of_kind("held")[-1]["step"]
    assert saved_steps(tmp_path) == [] and held_steps(root) == {node: [newest] for node in NODES}
    assert train("dp2,mbs12,zero1", resume=True).of_kind("resumed")[0]["step"] == newest


@pytest.mark.proof
def test_a_snapshot_that_was_changed_is_noticed_as_a_checkpoint_is(
    broken: Callable[[str], Run], train: Callable[..., Run], root: Path
) -> None:
    newest = broken("dp2,mbs12,zero1").of_kind("held")[-1]["step"]
    for node in NODES:
        file = root / node / f"step-{newest:08d}" / "rank-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    resumed = train("dp2,mbs12,zero1", resume=True)
    assert resumed.of_kind("damaged")[0]["step"] == newest
    assert resumed.of_kind("resumed")[0]["step"] == 3


def test_both_nodes_hold_a_whole_checkpoint_of_two(
    broken: Callable[[str], Run], train: Callable[..., Run], root: Path
) -> None:
    newest = broken("dp2,mbs12,zero1").of_kind("held")[-1]["step"]
    for node in NODES:
        verify(root / node / f"step-{newest:08d}")
    assert root.stat().st_mode & 0o077 == 0, "no other user reads it"
    assert not train("dp2,mbs12,zero1").of_kind("brought_back"), "a training that is begun anew is another one"


def test_without_room_nothing_is_held_and_the_training_goes_on(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshots = HeldSnapshots(tmp_path, None)
    monkeypatch.setattr(held, "free_memory_bytes", lambda: 99)
    with pytest.raises(NotHeldError, match=r"needs .* GiB of memory in /dev/shm and has 0\.00 GiB"):
        snapshots._require_room(100)


def test_memory_that_is_full_as_a_snapshot_is_written_ends_snapshots_and_not_the_training(
    train: Callable[..., Run], root: Path
) -> None:
    """There was room when it was looked for: others have taken it since."""
    with mounted(root, "64k"):
        run = train("dp2,mbs12,zero1")
        left = [path for path in root.rglob("*") if path.is_file()]
    root.rmdir()
    (told,) = run.of_kind("not_held")
    assert "No space left on device; a fault loses what no checkpoint has" in told["text"] and left == []
    assert len(run.losses) == 6 and run.of_kind("saved") and not run.of_kind("held")


def test_one_node_holds_nothing(train: Callable[..., Run], root: Path) -> None:
    assert not train("dp1,mbs24").of_kind("held")


def test_what_nobody_went_on_with_is_removed_after_a_day(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(held, "SHM_DIR", tmp_path)
    for name, age_s in (("old", 2 * 86400), ("new", 60)):
        node = tmp_path / f"trimaran-held-{name}" / "n0"
        node.mkdir(parents=True)
        at = node.stat().st_mtime - age_s
        os.utime(node, (at, at))
    HeldSnapshots(tmp_path / "checkpoints", None)
    assert [path.name for path in tmp_path.iterdir()] == ["trimaran-held-new"]
