"""Wrong input of every kind to every verb: no traceback, no hang, at most three lines, soon, in little memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile_tries import complaints


def test_a_few_dozen_wrong_inputs_end_in_a_line(tmp_path: Path) -> None:
    found = complaints(45, seed=20261122, folder=tmp_path)
    assert not found, "\n\n".join(found)


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_further_wrong_inputs_end_in_a_line(tmp_path: Path) -> None:
    found = complaints(160, seed=1, folder=tmp_path)
    assert not found, f"{len(found)} of 160\n\n" + "\n\n".join(found)
