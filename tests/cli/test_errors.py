"""A user's mistake gets one line that says what and how to mend it, and exit status 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import TRIMARAN, run, tiny_recipe
from small_disk import mounted
from trimaran.cli import main
from trimaran.files.catalogue import write_atomically
from trimaran.files.row_table import packaged_table, write_table
from trimaran.store import Store

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
    with mounted(tmp_path / "full", "16k") as disk:
        yield disk


def test_a_cluster_name_with_a_typo_gets_the_nearest_name() -> None:
    done = run("plan", "--model", "gpt2-124m", "--cluster", "jean-zay-a100-80g", "--gbs", "64")
    assert_one_line(done, "jean-zay-a100-80g", "did you mean 'jean-zay-a100-80gb'")


def test_a_device_that_is_given_for_a_cluster_gets_the_clusters_of_it() -> None:
    """All clusters were listed."""
    told = run("plan", "--model", "gpt2-124m", "--gbs", "8", "--cluster", "h100-sxm")
    assert_one_line(told, "cluster 'h100-sxm'", "did you mean 'dgx-h100'? Others like it: aws-p5-48xlarge. A file's")


def test_a_bad_model_file_is_named_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text("layers = 4\nhidden = 65\nheads = 4\nvocab = 100\n")
    done = run("plan", "--model", str(path), "--cluster", "dgx-h100", "--gbs", "64")
    assert_one_line(done, "model.toml", "hidden 65", "heads 4")


def test_a_layout_that_does_not_divide_is_told_with_both_numbers(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, layouts=["dp2,mbs3"])
    assert_one_line(run("bench", str(recipe), cwd=tmp_path), "global batch 4", "DP 2 x micro-batch 3 = 6")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('stack = "trimaran"', 'stack = "megatron"'), "stack 'megatron' is planned for, not run"),
        (("[sweep]", "[sweep]\nfixed = {width = 1}"), "fixed.width is not a layout field"),
        (('paths = ["text.txt"]', 'paths = [""]'), "data.paths.0"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_told_before_anything_is_made(
    tmp_path: Path, change: tuple[str, str], says: str
) -> None:
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace(*change))
    for verb in (["bench"], ["tune"], ["train", "--layout", "dp1,mbs4"]):
        assert_one_line(run(verb[0], str(recipe), *verb[1:], cwd=tmp_path), says)
    assert not (tmp_path / "runs").exists()


def test_a_stated_layout_is_checked_before_the_text_is_read(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, layouts=["dp64,mbs4"], data='paths = ["absent.txt"]')
    for verb in (["bench"], ["tune"], ["train", "--layout", "dp64,mbs4"]):
        assert_one_line(run(verb[0], str(recipe), *verb[1:], cwd=tmp_path), "DP 64", "the cluster has 2")


@pytest.mark.parametrize(
    ("sweep", "verb", "says"),
    [
        ("", ["train", "--layout", "dp1,mbs3"], "4 is not a multiple of DP 1 x micro-batch 3"),
        ('layouts = ["dp1,mbs3"]', ["bench"], "4 is not a multiple of DP 1 x micro-batch 3"),
        ("fixed = {tp = 3}", ["tune"], "not a multiple of TP 3"),
        ("devices = [512]", ["tune"], "sweep.devices 512: no valid layout uses so many"),
        ("devices = 2", ["tune"], "sweep.devices: a list is expected, as [2]"),
    ],
)
def test_an_impossible_recipe_is_refused_before_the_machine_is_probed(
    tmp_path: Path, sweep: str, verb: list[str], says: str
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        "[model]\nlayers = 2\nhidden = 32\nheads = 2\nvocab = 257\n"
        f"[workload]\nseq_len = 32\nglobal_batch = 4\n[sweep]\n{sweep}\n"
    )
    assert_one_line(run(verb[0], str(recipe), *verb[1:], cwd=tmp_path), says)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["bench", "tune"])
def test_a_status_that_does_not_exist_cannot_be_retried(tmp_path: Path, verb: str) -> None:
    recipe = str(tiny_recipe(tmp_path))
    assert_one_line(run(verb, recipe, "--retry", "ooom", cwd=tmp_path), "--retry 'ooom'", "oom")


def test_layouts_of_which_none_runs_end_with_the_first_reason(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    short = recipe.read_text().replace("[sweep]", "[sweep]\ntimeout_s = 0.01")
    recipe.write_text(short.replace("steps = 3\n", "steps = 20_000\n"))
    done = run("bench", str(recipe), cwd=tmp_path)
    assert done.returncode == 2 and done.stdout.strip(), "the rows are printed all the same"
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("trimaran: none of 1 layouts ran; ") and "time limit" in last and "--retry timeout" in last


def test_a_table_of_which_nothing_can_be_answered_is_told(tmp_path: Path) -> None:
    header = list(packaged_table().header)
    path = tmp_path / "t.csv"
    path.write_text(",".join(header) + "\n")
    assert_one_line(run("predict", str(path)), "header but no rows")
    path.write_text(",".join(header) + "\n1,2\n")
    done = run("predict", str(path))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("trimaran: none of 1 rows")
    path.write_text(";".join(header) + "\n")
    assert_one_line(run("predict", str(path)), "separated by commas")
    assert_one_line(run("predict", "seedz"), "seedz", "seeds")
    assert_one_line(run("predict", "seeds", "--cluster", "dgx-h10"), "dgx-h100")


def test_a_memory_of_zero_is_a_bad_cell_whose_row_is_answered_as_the_others_are(tmp_path: Path) -> None:
    table = packaged_table()
    rows = [row.cells for row in table.rows if row.cells["mem_gib"]][:3]
    lines = [",".join(table.header)]
    for index, cells in enumerate(rows):
        kept = cells | {"notes": "", "mem_gib": "0" if index == 0 else cells["mem_gib"]}
        lines.append(",".join(kept[name].replace(",", " ") for name in table.header))
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines) + "\n")
    done = run("predict", str(path))
    assert done.returncode == 0 and "mem_gib is 0" in done.stderr and "3 of 3 rows answered" in done.stderr


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
    assert_one_line(run(*PLAN[:-1], "many"), "--devices", "'many'", "see trimaran plan --help")
    assert_one_line(run(*PLAN, "--format=xml"), "--format", "'xml'")
    assert_one_line(run("plam"), "plam")


def test_fitting_to_a_cluster_that_does_not_exist_names_it(tmp_path: Path) -> None:
    assert_one_line(run("fit", "seeds", "--cluster", "nowhere", "-o", str(tmp_path / "c.toml")), "cluster 'nowhere'")


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["plan", "tune.toml"], ""),
        (["fit", "bench.csv"], ""),
        (["train", "x.toml", "--dry-run"], ""),
        (["train", "x.toml"], "; the same command with --resume goes on from the last checkpoint, where there is one"),
        (["tune", "x.toml"], "; what was finished is kept, the same command goes on with the rest"),
        (["bench", "x.toml"], "; what was finished is kept, the same command goes on with the rest"),
    ],
)
@pytest.mark.parametrize(
    ("number", "how", "status"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
def test_a_verb_that_is_stopped_promises_only_what_it_has_kept(
    number: signal.Signals,
    how: str,
    status: int,
    words: list[str],
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("trimaran.cli.app.app", lambda standalone_mode: signal.raise_signal(number))
    monkeypatch.setattr(sys, "argv", ["trimaran", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == status
    assert capsys.readouterr().err == f"trimaran: {how}{kept}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_while_the_first_is_told_changes_nothing(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback, or in the status of a killed process."""

    def stopped(how: str) -> str:
        signal.raise_signal(number)
        return how

    monkeypatch.setattr("trimaran.cli.app.app", lambda standalone_mode: signal.raise_signal(number))
    monkeypatch.setattr("trimaran.cli._stopped", stopped)
    with pytest.raises(SystemExit) as left:
        main()
    signal.raise_signal(number)
    assert left.value.code in (130, 143) and capsys.readouterr().err in (
        "trimaran: interrupted\n",
        "trimaran: terminated\n",
    )


# What a module does while it is read, and Python 3.11 gives another name to what interrupts the making of a class.
READ = {
    "plain": "os.kill(os.getpid(), {number})",
    "class": "class Named:\n    def __set_name__(self, *_): os.kill(os.getpid(), {number})\nclass Noun: name = Named()",
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize(
    ("number", "how", "status"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)]
)
def test_a_signal_while_modules_are_read_is_a_line(
    tmp_path: Path, read: str, number: signal.Signals, how: str, status: int
) -> None:
    """A module that verbs need takes a second here, in which the signal comes."""
    (tmp_path / "typer.py").write_text(f"import os\n{READ[read].format(number=int(number))}\n")
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
    done = subprocess.run(
        [TRIMARAN, "plan"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert (done.returncode, done.stderr) == (status, f"trimaran: {how}\n")


@pytest.mark.parametrize("output", [(), ("-o", "page.html"), ("-o", "rows.csv")], ids=["table", "page", "csv"])
def test_a_report_of_no_rows_says_why_there_are_none(output: tuple[str, ...], tmp_path: Path) -> None:
    write_table(tmp_path / "empty.csv", [])
    row = packaged_table("llm_foundry_a100_40gb").measurements[0]
    with Store(tmp_path / "named.sqlite") as store:
        store.add(row.model_copy(update={"recipe": "b"}))
        store.add(row.model_copy(update={"recipe": "a"}))
    write_table(tmp_path / "unnamed.csv", [row])
    for words, says in (
        (["empty.csv"], "empty.csv: there are no rows to report"),
        (["empty.csv", "--recipe", "nope"], "empty.csv: there are no rows to report"),
        (["named.sqlite", "empty.csv", "--recipe", "nope"], "is of it: the recipes there are a, b"),
        (["unnamed.csv", "--recipe", "nope"], "they name no recipe, so leave it out"),
    ):
        assert_one_line(run("report", *words, *output, cwd=tmp_path), says)
    assert not (tmp_path / "page.html").exists() and not (tmp_path / "rows.csv").exists()
    both = run("report", "named.sqlite", "empty.csv", "--recipe", "a", *output, cwd=tmp_path)
    assert both.returncode == 0, both.stderr


def test_a_store_that_is_imported_is_told_how_stores_are_merged(tmp_path: Path) -> None:
    with Store(tmp_path / "other.sqlite"):
        pass
    done = run("import", str(tmp_path / "other.sqlite"), "--into", str(tmp_path / "all.sqlite"))
    assert_one_line(done, "other.sqlite is a database", "trimaran store INTO.sqlite merge ")


def test_the_fewest_devices_without_a_limit_are_refused_by_the_fields_that_would_state_one() -> None:
    assert_one_line(run(*PLAN, "--objective", "devices"), "names no limit: state deadline_days or budget")
