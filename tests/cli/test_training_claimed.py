"""A training's folder is one training's at a time, and what a killed one left of its claim is taken over."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.nouns.noun import TrimaranError
from trimaran.store import claims
from trimaran.study.training.claim import only_training

HOLD = """
import os, sys
from pathlib import Path
from trimaran.study.training.claim import only_training
with only_training(Path(sys.argv[1]), print):
    os._exit(0)
"""


def silent(text: str) -> None:
    raise AssertionError(text)


def test_a_second_training_in_the_same_folder_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    with only_training(folder, silent):
        before = sorted(tmp_path.rglob("*"))
        refused = pytest.raises(TrimaranError, match=r"is in use by process \d+ on .* give --runs another folder")
        with refused, only_training(folder, silent):
            pass
        assert sorted(tmp_path.rglob("*")) == before
    assert list(tmp_path.iterdir()) == [], "nothing is left of the claim"


def test_the_claim_of_a_killed_training_is_taken_over_at_once(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HOLD, str(tmp_path / "train")], check=True)
    assert list((tmp_path / "train.claims").iterdir())
    with only_training(tmp_path / "train", silent):
        pass


def test_that_of_another_machine_is_taken_over_once_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-c", HOLD, str(tmp_path / "train")], check=True)
    (claim,) = (tmp_path / "train.claims").iterdir()
    claim.write_text(re.sub('"namespace":"[^"]*"', '"namespace":"another boot"', claim.read_text()))
    monkeypatch.setattr(claims, "LOST_AFTER_S", 0.5)
    told: list[str] = []
    with only_training(tmp_path / "train", told.append):
        pass
    assert len(told) == 1 and "waiting up to" in told[0]
