"""A user's mistake gets one line that says what and how to mend it, and exit status 2."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import run, tiny_recipe
from trimaran.files import write_atomically
from trimaran.rows import packaged_table

PLAN = ["plan", "--model", "gpt2-124m", "--cluster", "dgx-h100", "--gbs", "64", "--devices", "8"]


def assert_one_line(done: subprocess.CompletedProcess[str], *says: str) -> None:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("trimaran: "), done.stderr
    for text in says:
        assert text in lines[0]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for next to nothing."""
    folder = tmp_path / "full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_cluster_name_with_a_typo_gets_the_nearest_name() -> None:
    done = run("plan", "--model", "gpt2-124m", "--cluster", "jean-zay-a100-80g", "--gbs", "64")
    assert_one_line(done, "jean-zay-a100-80g", "did you mean 'jean-zay-a100-80gb'")


def test_a_bad_model_file_is_named_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text("layers = 4\nhidden = 65\nheads = 4\nvocab = 100\n")
    done = run("plan", "--model", str(path), "--cluster", "dgx-h100", "--gbs", "64")
    assert_one_line(done, "model.toml", "hidden 65", "heads 4")


def test_a_layout_that_does_not_divide_is_told_with_both_numbers(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, layouts=["dp2,mbs3"])
    assert_one_line(run("bench", str(recipe), cwd=tmp_path), "global batch 4", "DP 2 x micro-batch 3 = 6")


def test_an_unreadable_text_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    recipe = tiny_recipe(tmp_path, data='paths = ["latin.txt"]')
    assert_one_line(run("bench", str(recipe), cwd=tmp_path), "latin.txt")
    recipe = tiny_recipe(tmp_path, data='paths = ["absent.txt"]')
    assert_one_line(run("bench", str(recipe), cwd=tmp_path), "absent.txt")


def test_a_full_disk_is_told_and_the_old_file_stays(full_disk: Path) -> None:
    target = full_disk / "out.csv"
    target.write_text("old")
    assert_one_line(run("predict", "seeds", "-o", str(target)), "out.csv", "space")
    assert target.read_text() == "old"
    assert [path.name for path in full_disk.iterdir()] == ["out.csv"]


def test_a_misspelt_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    header, *rest = ",".join(packaged_table().header), "1"
    write_atomically(path, header.replace("heads,", "haeds,") + "\n" + rest[0] + "\n")
    assert_one_line(run("predict", str(path)), "heads")


def test_an_option_that_does_not_exist_is_refused() -> None:
    assert_one_line(run("plan", "--modle", "gpt2-124m"), "--modle")
    assert_one_line(run(*PLAN[:-1], "many"), "--devices")
    assert_one_line(run("plam"), "plam")
