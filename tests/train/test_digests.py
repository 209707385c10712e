"""Text that has not changed is not read again to know that, and text that has is never taken for it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from trimaran.protocol.job import DataJob
from trimaran.recipe.data_settings import DataSettings
from trimaran.train.programs.tokenise import prepare
from trimaran.train.text import digests


@pytest.fixture
def job(tmp_path: Path) -> DataJob:
    (tmp_path / "a.txt").write_text("the owl")
    data = DataSettings(paths=(str(tmp_path / "a.txt"),))
    return DataJob(data=data, vocab=300, cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may be remembered as soon as they are written."""
    monkeypatch.setattr(digests, "SETTLED_S", 0.0)


@pytest.mark.usefixtures("settled")
def test_text_that_was_read_is_not_read_again(job: DataJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start of a training read its corpus whole before it said a word, as did each trial's."""
    folder = prepare(job)
    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        assert prepare(job) == folder
    Path(job.cache_dir, "digests.json").unlink()
    assert prepare(job) == folder  # as it was named before anything was remembered


@pytest.mark.usefixtures("settled")
def test_text_of_the_same_size_and_time_is_not_taken_for_what_it_was(job: DataJob) -> None:
    folder, path = prepare(job), Path(job.data.paths[0])
    before = path.stat()
    time.sleep(0.05)  # times of files go in ticks of some milliseconds
    path.write_text("the cat")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert prepare(job) != folder


def test_of_text_that_was_just_written_nothing_is_remembered(job: DataJob) -> None:
    prepare(job)
    assert "owl" in Path(job.data.paths[0]).read_text() and not Path(job.cache_dir, "digests.json").exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", ["", "[]", "{", "no digest"])
def test_a_damaged_memory_is_as_none(job: DataJob, damage: str) -> None:
    folder, memory = prepare(job), Path(job.cache_dir, "digests.json")
    remembered = json.loads(memory.read_text())
    known = {path: [known_by, damage] for path, (known_by, _) in remembered.items()}
    memory.write_text(json.dumps(known) if damage == "no digest" else damage)
    assert prepare(job) == folder
    assert json.loads(memory.read_text()) == remembered
