"""A training on this machine lasts through twenty faults of every kind that there is."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from many_faults import Engine, assert_lasts, end_first
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


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="needs to mount a small disk")
def test_a_training_lasts_through_twenty_faults(trainable: Recipe, cluster: Cluster, tmp_path: Path) -> None:
    here = Engine(trainable, cluster, trainable.sweep, Layout(dp=2), end_parent=lambda: end_first(is_nursery))
    kinds = Counter(kill=7, stop=3, slow=2, full_disk=3, lost_parent=5)
    assert kinds.total() == 20
    assert_lasts(here, here, kinds, 600, tmp_path)
