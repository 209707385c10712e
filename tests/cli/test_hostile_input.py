"""Files and words made to hurt get one line, soon; what they hold neither runs nor steers where it is shown."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import pytest

from command import MACHINE, run, tiny_recipe
from command_answers import MOST_CPU_S, MOST_GIB, Answer, Try, answer
from table_text import table_text
from trimaran.files.row_table import packaged_table, parse_table
from trimaran.store import Store

QUESTION = ("--cluster", "dgx-h100", "--gbs", "64", "--devices", "8")
HF = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
FORMULA = "=cmd|' /C calc'!A0"
STEERING = "\x1b[2J\x1b]0;owned\x07 \u202egnp.exe"
TAG = "<img src=x onerror=alert(1)> [a](javascript:alert(1))"


def call(folder: Path, *arguments: str) -> Answer:
    return answer(Try(arguments), folder)


def assert_one_line(tmp_path: Path, *arguments: str, says: str = "") -> None:
    done = call(tmp_path, *arguments)
    lines = done.output.strip().splitlines()
    assert done.status == 2 and len(lines) == 1 and lines[0].startswith("trimaran: "), done.output[-2000:]
    assert says in lines[0] and len(lines[0]) < 2000 and lines[0].isprintable()
    assert done.cpu_s < MOST_CPU_S and done.peak_gib < MOST_GIB


@pytest.mark.parametrize("scaling", ["linear", 8, ["llama3"], True])
def test_a_rope_scaling_that_is_no_object_is_named(tmp_path: Path, scaling: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**HF, "intermediate_size": 128, "rope_scaling": scaling}))
    assert_one_line(tmp_path, "plan", "--model", str(path), *QUESTION, says="rope_scaling")


@pytest.mark.parametrize(
    "layout", ["dp" + "9" * 5000, "split9x999999-9x999999", "recompute-full" + "9" * 5000, "split" + "9" * 5000]
)
def test_a_number_of_a_layout_beyond_any_is_told(tmp_path: Path, layout: str) -> None:
    assert_one_line(tmp_path, "plan", "--model", "gpt2-124m", *QUESTION, "--why", layout, says="layout")


@pytest.mark.parametrize(
    "content", ["a." * 50_000 + "a = 1", "['" + "'.'a" * 30_000 + "']", "a = " + "[" * 50_000, "[a.b]\nc" + ".c" * 40]
)
def test_a_table_nested_without_end_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "deep.toml").write_text(content)
    assert_one_line(tmp_path, "plan", "--model", "deep.toml", *QUESTION, says="nested")
    assert_one_line(tmp_path, "tune", "deep.toml", says="nested")


NAMED = {
    "model": ["plan", *QUESTION, "--model", "x.toml"],
    "config": ["plan", *QUESTION, "--model", "x.json"],
    "cluster": ["plan", "--model", "gpt2-124m", "--gbs", "8", "--cluster", "x.toml"],
    "stack": ["plan", "--model", "gpt2-124m", *QUESTION, "--stack", "x.toml"],
    "calibration": ["plan", "--model", "gpt2-124m", *QUESTION, "--calibration", "x.toml"],
    "recipe": ["tune", "x.toml"],
    "table": ["predict", "x.csv"],
    "rows": ["fit", "x.csv", "-o", "c.toml"],
    "store": ["store", "x.sqlite", "list"],
    "merged": ["store", "new.sqlite", "merge", "x.sqlite"],
    "report": ["report", "x.sqlite"],
    "plan": ["report", "x.json", "-o", "x.html"],
    "log": ["import", "x.log", "--into", "new.sqlite"],
    "profile": ["import", "good.md", "--into", "new.sqlite", "--profile", "x.toml"],
}


@pytest.mark.parametrize("what", NAMED)
def test_every_file_is_a_regular_one(tmp_path: Path, what: str) -> None:
    arguments = NAMED[what]
    name = next(word for word in arguments if word.startswith("x.") and not word.endswith("html"))
    (tmp_path / "good.md").write_text("| MBS | Sec/it |\n|--|--|\n| 1 | 2.0 |\n")
    path = tmp_path / name
    path.symlink_to("/dev/zero")
    assert_one_line(tmp_path, *arguments, says="regular file")
    path.unlink()
    os.mkfifo(path)
    assert_one_line(tmp_path, *arguments, says="regular file")


@pytest.mark.parametrize("what", [what for what in NAMED if what not in ("store", "merged", "report")])
def test_no_file_is_read_beyond_its_limit(tmp_path: Path, what: str) -> None:
    name = next(word for word in NAMED[what] if word.startswith("x.") and not word.endswith("html"))
    (tmp_path / "good.md").write_text("| MBS | Sec/it |\n|--|--|\n| 1 | 2.0 |\n")
    with (tmp_path / name).open("wb") as file:
        file.truncate(20 << 30)
    assert_one_line(tmp_path, *NAMED[what], says="MiB")


def test_a_line_quotes_no_more_than_tells_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(f'layers = "{"x" * 100_000}"\nhidden = 64\nheads = 4\nvocab = 100\n')
    for arguments in (
        ("plan", "--model", "m.toml", *QUESTION),
        ("plan", "--model", "y" * 100_000, *QUESTION),
        ("plan", "--model", "gpt2-124m", *QUESTION, "--why", "z " * 50_000),
        ("plan", "--model", "gpt2-124m", *QUESTION, "--fix", "w" * 100_000),
        ("plan", "--gbs", "v" * 100_000),
        ("report", STEERING),
        ("u\x1b[2J",),
    ):
        assert_one_line(tmp_path, *arguments)


@pytest.fixture
def hostile_store(tmp_path: Path) -> Path:
    """A store whose row says things that a spreadsheet, a terminal and a browser would act on."""
    row = packaged_table().measurements[0]
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        for text in (FORMULA, STEERING, TAG):
            store.add(row.model_copy(update={"notes": text, "system": text, "source": text, "trial_key": None}))
    return path


def test_what_a_spreadsheet_would_run_is_text_in_every_csv(hostile_store: Path, tmp_path: Path) -> None:
    store = str(hostile_store)
    printed = call(tmp_path, "store", store, "list", "--format", "csv")
    assert call(tmp_path, "store", store, "export", "-o", str(tmp_path / "e.csv")).status == 0
    assert call(tmp_path, "report", store, "-o", str(tmp_path / "r.csv")).status == 0
    assert call(tmp_path, "predict", str(tmp_path / "e.csv"), "-o", str(tmp_path / "p.csv")).status == 0
    texts = [printed.output, *((tmp_path / name).read_text() for name in ("e.csv", "r.csv", "p.csv"))]
    for text in texts:
        cells = [cell for line in csv.reader(io.StringIO(text)) for cell in line]
        assert any(FORMULA in cell for cell in cells)
        assert not [cell for cell in cells if cell.startswith(("=", "@", "\t", "\r"))]
    # read back, the row is what it was
    assert parse_table(texts[1], "e.csv").measurements[0].notes == FORMULA


def test_a_formula_in_a_foreign_table_is_text_in_what_is_written_of_it(tmp_path: Path) -> None:
    header, first, *_ = table_text(packaged_table().measurements[:1]).splitlines()
    (tmp_path / "t.csv").write_text(f'{header},@sum\n{first},"{FORMULA}"\n')
    assert call(tmp_path, "predict", str(tmp_path / "t.csv"), "-o", str(tmp_path / "p.csv")).status == 0
    cells = [cell for line in csv.reader((tmp_path / "p.csv").open()) for cell in line]
    assert f"'{FORMULA}" in cells and "'@sum" in cells


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json", "latex"])
def test_nothing_printed_steers_a_terminal(hostile_store: Path, tmp_path: Path, form: str) -> None:
    for arguments in (["list"], ["show", "2"], ["compare", "1", "2"], ["list", "--where", f"notes={STEERING}"]):
        done = call(tmp_path, "store", str(hostile_store), *arguments, "--format", form)
        assert done.status == 0 and all(c.isprintable() or c in "\n\t" for c in done.output), arguments


def test_markdown_holds_no_html_and_no_link(hostile_store: Path, tmp_path: Path) -> None:
    shown = call(tmp_path, "store", str(hostile_store), "show", "3", "--format", "markdown").output
    assert "onerror" in shown and "<img" not in shown and "](" not in shown


def test_a_path_of_a_cluster_counts_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "machines").mkdir()
    start, _, rest = MACHINE.partition("[device]")
    device, _, links = rest.partition("[intra]")
    (tmp_path / "machines" / "cpu.toml").write_text(device.replace("[device.peak_tflops]", "[peak_tflops]"))
    (tmp_path / "machines" / "m.toml").write_text(f'{start}device = "./cpu.toml"\n[intra]{links}')
    tiny_recipe(tmp_path)
    done = call(tmp_path, "plan", "--model", "gpt2-124m", "--cluster", "machines/m.toml", "--gbs", "8")
    assert done.status == 0, done.output


def test_a_table_of_bad_rows_is_told_by_its_first_ones(tmp_path: Path) -> None:
    header, first, *_ = table_text(packaged_table().measurements[:1]).splitlines()
    (tmp_path / "t.csv").write_text("\n".join([header, *[first.replace(",", ",x", 9)] * 500]) + "\n")
    done = call(tmp_path, "predict", str(tmp_path / "t.csv"))
    assert done.status == 2 and len(done.output.splitlines()) < 30 and "and 480 more" in done.output


@pytest.mark.parametrize("verb", ["plan", "export", "timeline", "probe"])
@pytest.mark.parametrize("name", ["--seq-len", "--seq"])
def test_a_sequence_length_is_asked_for_by_its_name(tmp_path: Path, verb: str, name: str) -> None:
    asked = [] if verb == "probe" else ["--model", "gpt2-124m", "--cluster", "dgx-h100", "--gbs", "8"]
    done = call(tmp_path, verb, *asked, name, "-1")
    assert (
        done.status == 2 and ("seq_len" in done.output or "'-1'" in done.output) and "No such option" not in done.output
    )


def test_no_verb_that_runs_ranks_has_a_recipe_name_their_interpreter_without_trust(tmp_path: Path) -> None:
    ran, interpreter = tmp_path / "ran", tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\ntouch {ran}\nexit 1\n")
    interpreter.chmod(0o755)
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(f'{recipe.read_text()}\n[[sweep.variants]]\npython = "{interpreter}"\n')
    stated = ("--layout", "dp1,mbs4")
    for verb in (("bench",), ("tune",), ("train", *stated), ("timeline", *stated, "--measure")):
        done = run(verb[0], str(recipe), *verb[1:], cwd=tmp_path)
        assert done.returncode == 2 and "read the recipe, then add --trust" in done.stderr, (verb, done.stderr)
        assert not ran.exists(), verb
