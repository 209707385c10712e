"""A training on this machine lasts through twenty faults of every kind that there is."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from many_faults import Engine, assert_lasts, end_first, events_in, train
from processes import processes_in
from small_disk import mounted
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.protocol.programs import NURSERY
from trimaran.recipe.recipe import Recipe


def is_nursery(process: int) -> bool:
    """Whether the ranks of this process's trainings are forked from it."""
    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    stat = Path(f"/proc/{process}/stat").read_text()
    parent = int(stat[stat.rindex(")") + 2 :].split()[1])
    return NURSERY.encode() in words and parent == os.getpid()


needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="needs to mount a small disk"
)


@pytest.mark.proof
@needs_mount
def test_a_disk_that_is_full_as_ranks_are_to_start_anew_only_delays_them(
    trainable: Recipe, cluster: Cluster, tmp_path: Path
) -> None:
    here = Engine(trainable, cluster, trainable.sweep, Layout(dp=1), end_parent=lambda: None)
    freeing: list[threading.Timer] = []
    with mounted(tmp_path / "disk", "24m") as disk:

        def fill_and_kill(line: dict[str, Any]) -> None:
            if not freeing and line["iteration"] >= 30:
                filler = disk / "filler"
                with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(4096))
                freeing.append(threading.Timer(1.0, filler.unlink))
                freeing[0].start()
                for process in processes_in(disk / "runs" / "train"):
                    os.kill(int(process.name), signal.SIGKILL)

        row, told = train(here, disk, 60, fill_and_kill)
        events = [event["event"] for event in events_in(disk) if event["event"] not in ("saved", "not_saved", "slow")]
    assert row.status == "ok" and events[:4] == ["began", "first_step", "crash", "not_run"], told
    assert events[-2:] == ["went_on", "finished"] and {*events[3:-2]} == {"not_run"}


@needs_mount
@pytest.mark.proof
@pytest.mark.timeout(2400)
def test_a_training_lasts_through_twenty_faults(trainable: Recipe, cluster: Cluster, tmp_path: Path) -> None:
    here = Engine(trainable, cluster, trainable.sweep, Layout(dp=2), end_parent=lambda: end_first(is_nursery))
    kinds = Counter(kill=7, stop=3, slow=2, full_disk=3, lost_parent=5)
    assert kinds.total() == 20
    undisturbed = tmp_path / "undisturbed"
    assert train(here, undisturbed, 400)[0].status == "ok"
    assert_lasts(here, undisturbed, kinds, 400, tmp_path)
