"""trimaran import and trimaran store, as typed."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from command import TRIMARAN, run
from trimaran.files.catalogue import CATALOG
from trimaran.nouns.measurement import Measurement
from trimaran.store import Store

MEASUREMENTS = Path(str(CATALOG)) / "measurements"
DOCUMENTS = Path(__file__).parents[1] / "store" / "documents"
PREQUEL = str(next(DOCUMENTS.glob("004*")))
FUGAKU = str(next(DOCUMENTS.glob("000*")))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("published") / "store.sqlite")
    done = run("import", FUGAKU, PREQUEL, "--into", path, "--format", "json")
    assert done.returncode == 0, done.stderr
    fugaku, prequel = json.loads(done.stdout)
    assert (fugaku["rows"], fugaku["added"], fugaku["profile"]) == (17, 17, "fugaku-1b3")
    assert (prequel["rows"], prequel["refused"], len(prequel["proposals"])) == (110, 0, 5)
    assert "T16 row 1: Sec/it 120.29" in done.stderr and "--repairs accept" in done.stderr
    return path


def listed(store: str, *options: str) -> list[dict[str, object]]:
    done = run("store", store, "list", "--format", "json", *options)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def test_importing_again_adds_nothing(published: str) -> None:
    done = run("import", FUGAKU, "--into", published, "--format", "json")
    assert json.loads(done.stdout)[0]["added"] == 0
    assert len(listed(published)) == 127


def test_runs_below_a_folder_are_told_each_by_a_name_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from torch.utils.tensorboard import SummaryWriter

    for name, seconds in (("a/run", 0.5), ("b/run", 0.25)):
        writer = SummaryWriter(str(tmp_path / "tb" / name))
        for step in (1, 2, 3):
            for tag, value in (("batch-size", 64.0), ("lm loss", 9.0 - step * seconds), ("iteration-time", seconds)):
                writer.add_scalar(tag, value, step)
        writer.close()
    store = str(tmp_path / "s.sqlite")
    command = ["import", str(tmp_path / "tb"), "--into", store, "--model", "gpt2-124m", "--layout", "dp8,mbs4,bf16"]
    stated = ["--set", "seq_len=1024", "--format", "json"]
    for added in (1, 0):
        done = run(*command, *stated)
        told = [(row["file"], row["rows"], row["added"]) for row in json.loads(done.stdout)]
        assert told == [("tb/a/run", 1, added), ("tb/b/run", 1, added)], done.stderr
    assert {row["from"]: row["sec_per_it"] for row in listed(store)} == {"tb/a/run log 1": 0.5, "tb/b/run log 1": 0.25}
    (tmp_path / "tb/b/run").rename(tmp_path / "tb/b/broken")
    (events,) = (tmp_path / "tb/b/broken").iterdir()
    events.write_bytes(events.read_bytes().replace(b"\x0a\x0eiteration-time", b"\x0a\x7fiteration-time"))
    done = run(*command, *stated)
    assert done.returncode == 2 and "1 of 2 files are not imported" in done.stderr and "tb/b/broken" in done.stderr


def test_repairs_are_asked_for_one_by_one(tmp_path: Path) -> None:
    store = str(tmp_path / "s.sqlite")
    command = [TRIMARAN, "import", FUGAKU, "--into", store, "--repairs", "ask"]
    for answers, quality in (("", None), ("y\nn\n", "misplaced"), ("y\ny\n", "corrected")):
        done = subprocess.run(command, input=answers, capture_output=True, text=True, check=False, timeout=60)
        assert "mem_gib blank to 19.56" in done.stderr and "Traceback" not in done.stderr
        if quality is None:
            assert done.returncode == 2 and "nothing is imported" in done.stderr and not Path(store).exists()
        else:
            assert len(listed(store, "--where", f"quality={quality}")) == 1, done.stderr


def test_rows_are_chosen_and_ordered(published: str) -> None:
    rows = listed(published, "--where", "date=2022-02-25", "--where", "status=ok", "--sort", "sec_per_it")
    assert [row["sec_per_it"] for row in rows][:2] == [92.75, 99.93] and len(rows) == 20
    assert len(listed(published, "--where", "status!=ok", "--where", "tp<=2")) == 3
    assert [row["quality"] for row in listed(published, "--where", "notes~milliseconds")] == []
    assert len(listed(published, "--where", "quality=repeat")) == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["list", "--where", "speed=3"], "'speed' is not a column"),
        (["list", "--where", "secperit<3"], "'secperit' is not a column: did you mean 'sec_per_it'?"),
        (["list", "--where", "fast"], "sec_per_it<120"),
        (["list", "--where", "status<ok"], "not a number"),
        (["list", "--where", "tp=many"], "'many'"),
        (["list", "--sort", "speed"], "'speed' is not a column"),
        (["show", "9999"], "no run 9999"),
        (["export", "-o", "out.xlsx"], ".csv or .parquet"),
        (["merge", "absent.sqlite"], "absent.sqlite does not exist"),
    ],
)
def test_a_mistake_is_told_in_one_line(published: str, options: list[str], says: str) -> None:
    done = run("store", published, *options)
    assert done.returncode == 2 and says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "speed=3"], "'speed' is not a column"),
        (["--set", "gsb=3"], "'gsb' is not a column of the table contract: did you mean 'gbs'?"),
        (["--set", "gbs"], "COLUMN=VALUE"),
        (["--set", "gbs=many"], "'many'"),
        (["--profile", "nobody"], "bloom-prequel"),
        (["--model", "bloom-175b"], "bloom-176b"),
        (["--as", "pickle"], "--as"),
    ],
)
def test_a_mistake_in_an_import_leaves_no_store(tmp_path: Path, options: list[str], says: str) -> None:
    done = run("import", FUGAKU, "--into", str(tmp_path / "s.sqlite"), *options)
    assert done.returncode == 2 and says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_a_log_is_imported_with_a_model_from_the_catalogue(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        "iteration 1/ 2 | elapsed time per iteration (ms): 900.0 | global batch size: 64 | lm loss: 9.0 |\n"
        "iteration 2/ 2 | elapsed time per iteration (ms): 500.0 | global batch size: 64 | lm loss: 8.0 |\n"
    )
    store = str(tmp_path / "s.sqlite")
    stated = ["--model", "gpt2-124m", "--cluster", "dgx-h100", "--set", "seq_len=1024", "--set", "mbs=4"]
    layout = [word for cell in ("dp=8", "tp=1", "pp=1", "precision=bf16") for word in ("--set", cell)]
    done = run("import", str(log), "--into", store, *stated, *layout)
    assert done.returncode == 0, done.stderr
    shown = run("store", store, "show", "1", "--format", "json")
    row = json.loads(shown.stdout)
    assert (row["hidden"], row["devices"], row["nodes"], row["sec_per_it"]) == (768, 8, 1, 0.5)
    assert (row["cluster"], row["stack"], row["step_times_s"]) == ("dgx-h100", "megatron", [0.9, 0.5])


def test_a_log_that_states_no_layout_is_given_one(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("iter 1: loss 4.2, time 900.00ms\niter 2: loss 4.1, time 250.00ms\n")
    store = str(tmp_path / "s.sqlite")
    stated = ["--model", "gpt2-124m", "--layout", "dp4,tp2,mbs4,bf16", "--set", "seq_len=1024", "--set", "gbs=64"]
    done = run("import", str(tmp_path / "run.log"), "--into", store, *stated, "--set", "optimizer=adam")
    assert done.returncode == 0, done.stderr
    row = json.loads(run("store", store, "show", "1", "--format", "json").stdout)
    assert (row["devices"], row["dp"], row["tp"], row["mbs"], row["quality"]) == (8, 4, 2, 4, "ok")
    done = run("import", str(tmp_path / "run.log"), "--into", store, "--layout", "dp4,z7")
    assert done.returncode == 2 and "'z7' is not understood" in done.stderr


def test_runs_are_compared_and_shown(tmp_path: Path) -> None:
    shape = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 256, "gbs": 8}
    path = str(tmp_path / "s.sqlite")
    with Store(path) as store:
        for mbs, center in ((1, 1.0), (2, 0.9)):
            times = tuple(center * (1 + 0.001 * step) for step in range(12))
            row = {**shape, "mbs": mbs, "step_times_s": times, "sec_per_it": center * 1.0055}
            store.add(Measurement.model_validate({**row, "evidence": "first\nsecond \x1b[2J"}))
    found = json.loads(run("store", path, "compare", "1", "2", "--format", "json").stdout)
    assert found["ratio"] == pytest.approx(0.9) and found["low"] < 0.9 < found["high"] < 1.0
    assert found["differs"]["mbs"] == [1, 2]
    said = run("store", path, "compare", "1", "2").stdout
    assert "B takes 10.00% less time than A" in said and "95% confidence" in said
    shown = run("store", path, "show", "2").stdout
    assert "evidence" in shown and "\x1b" not in shown


def test_stores_are_exported_and_merged(published: str, tmp_path: Path) -> None:
    where = ["--where", "table=T27", "--where", "status=oom"]
    for name in ("rows.csv", "rows.parquet"):
        done = run("store", published, "export", "-o", str(tmp_path / name), *where)
        assert done.stdout.startswith("2 rows"), done.stderr
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = pq.read_table(tmp_path / "rows.parquet")
    assert [row["dp"] for row in rows] == ["32", "32"] and table.column("dp").to_pylist() == [32, 32]
    assert set(table.column_names) == set(Measurement.model_fields)

    own = str(tmp_path / "own.sqlite")
    (csv_again,) = json.loads(run("import", str(tmp_path / "rows.csv"), "--into", own, "--format", "json").stdout)
    assert (csv_again["format"], csv_again["added"], csv_again["flagged"]) == ("csv", 2, None)
    assert run("store", own, "merge", published).stdout.startswith("125 of 127 runs added")
    assert run("store", own, "merge", published).stdout.startswith("0 of 127")


def test_rows_of_other_clusters_that_a_fit_leaves_out_are_told(tmp_path: Path) -> None:
    """They went in silence, and a row whose cluster is misspelt with them."""
    fitted = tmp_path / "c.toml"
    store = str(tmp_path / "s.sqlite")
    tables = [str(MEASUREMENTS / f"{name}.csv") for name in ("dlperf_v100", "fugaku_124m")]
    assert run("import", *tables, "--into", store).returncode == 0
    done = run("fit", store, "--cluster", "dlperf-v100", "--stack", "oneflow", "-o", str(fitted))
    assert done.returncode == 0
    assert "note: 56 of 92 rows are left out, of another cluster: 56 of fugaku-a64fx\n" in done.stderr
    assert "note: 18 of 36 rows are left out, of another stack: 18 of megatron\n" in done.stderr


def test_endings_in_capitals_are_the_same_endings(tmp_path: Path) -> None:
    """A table in capitals was taken for a damaged store, a page in capitals was refused."""
    table = tmp_path / "T.CSV"
    head, *rows = (MEASUREMENTS / "dlperf_v100.csv").read_text().splitlines()
    table.write_text("\n".join([head, *(row for row in rows if "dlperf-h1536xL16-B2," in row)]))
    for name in ("P.HTML", "F.PNG", "T2.CSV"):
        done = run("report", str(table), "-o", str(tmp_path / name))
        assert done.returncode == 0 and (tmp_path / name).exists(), done.stderr


def test_a_fit_names_rows_of_a_store_by_their_numbers_there(tmp_path: Path) -> None:
    """They were counted: where a trial was run twice, the row that was named was another one."""
    store = tmp_path / "s.sqlite"
    assert run("import", str(MEASUREMENTS / "dlperf_v100.csv"), "--into", str(store)).returncode == 0
    failed = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 256, "mbs": 1, "gbs": 8, "trial_key": "k"}
    failed |= {"status": "oom", "cluster": "dlperf-v100", "stack": "oneflow"}
    with Store(store) as opened:
        for _ in range(2):
            opened.add(Measurement.model_validate(failed))
        (number,) = (run.number for run in opened.runs() if run.measurement.trial_key == "k")
    done = run("fit", str(store), "--cluster", "dlperf-v100", "--stack", "oneflow", "-o", str(tmp_path / "c.toml"))
    assert f"row {number}: status is oom" in done.stderr, done.stderr
