"""Logs are read as users have them, packed or in UTF-16; what cannot be read is told with the way out."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trimaran.nouns.noun import TrimaranError
from trimaran.store.importers import text as importers_text
from trimaran.store.importers.formats import Asked, import_file
from trimaran.store.importers.profile import typed_cells

SHAPE: dict[str, str | int | float] = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "seq_len": 1024}
LOGS = sorted(path for path in (Path(__file__).parent / "logs").rglob("*.txt"))
STATED = Asked(given=typed_cells({**SHAPE, "mbs": 4}))
MEGATRON = "".join(
    f" iteration {n}/ 9 | elapsed time per iteration (ms): {ms}.0 | global batch size: 64 | lm loss: 9.{n} |\n"
    for n, ms in ((1, 900), (2, 500), (3, 510))
)


@pytest.mark.parametrize(
    "encode",
    [
        gzip.compress,
        lambda raw: raw.decode().encode("utf-16"),
        lambda raw: raw.decode().encode("utf-16-le"),
        lambda raw: gzip.compress(raw.decode().encode("utf-16-be")),
        lambda raw: raw.decode().replace("\n", "\0\0\0\0\n").encode(),
    ],
)
def test_a_log_that_gzip_packed_or_windows_wrote_is_read(tmp_path: Path, encode: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "train.log.gz"
    path.write_bytes(encode(MEGATRON.encode()))
    (row,) = import_file(path, STATED).rows
    assert row.step_times_s == (0.9, 0.5, 0.51)


def test_a_packed_file_that_is_damaged_too_large_or_of_another_program_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, packed = tmp_path / "train.log", gzip.compress(MEGATRON.encode())
    for content, says in (
        (packed[:60], "cannot be unpacked"),
        (packed[:20] + b"xxxx" + packed[24:], "cannot be unpacked"),
        (b"BZh91AY&SY", "bzip2: unpack it first"),
        (b"\x28\xb5\x2f\xfd....", "zstd: unpack it first"),
        (gzip.compress(b"x\n" * 2**20), "more than the 1 MiB that are read.*zcat"),
    ):
        path.write_bytes(content)
        monkeypatch.setattr(importers_text, "MAX_BYTES", 2**20)
        with pytest.raises(TrimaranError, match=says) as told:
            import_file(path, Asked())
        assert "\n" not in str(told.value)


def test_what_is_no_log_is_told_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "blank.log").write_text(" \n\n")
    (tmp_path / "empty.log").touch()
    (tmp_path / "other.log").write_text("epoch 1 took a while\n")
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path / "blank.log", "is empty"),
        (tmp_path / "empty.log", "is empty"),
        (tmp_path / "other.log", r"say which it is by --as \(trimaran, .*, or write its figures into a CSV"),
        (tmp_path, "a folder; name a file in it"),
        (tmp_path / "pipe", "a pipe; save what it gives to a file first"),
        (Path("-"), "a pipe; save what it gives to a file first"),
    ):
        with pytest.raises(TrimaranError, match=says):
            import_file(path, Asked())
    with pytest.raises(TrimaranError, match="is empty"):
        import_file(tmp_path / "blank.log", STATED, "megatron")


@pytest.mark.parametrize(
    "prefix",
    [
        "[default0]:", "0: ", " 12: ", "[1,3]<stdout>:", "[1,3]<stderr>: ", "[pod/llm-0/trainer] ",
        "2024-05-01T12:00:00.123456789Z ",
        "[2024-05-01 12:00:00] ", "node-3: [default7]:", "May 01 12:00:00 node01 python[123]: ",
        "\x1b[36m(RayTrainWorker pid=123, ip=10.0.0.1)\x1b[0m ",
        "[prterun-node-1-100629@1,3]<stdout>: ", "\x1b[36m(worker1, rank=1, pid=4112, ip=10.0.0.2)\x1b[0m ",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_what_launchers_put_before_lines_changes_no_row(tmp_path: Path, path: Path, prefix: str) -> None:
    stated = Asked(given=typed_cells({**SHAPE, "mbs": 4, "gbs": 64, "precision": "bf16", "optimizer": "adam"}))
    kept = {"source", "notes", "evidence", "quality", "trial_key"}
    if "deepspeed_zero3" in path.name:
        kept |= {"precision", "optimizer"}  # of JSON over several lines, where a prefix is not known
    behind = tmp_path / path.name
    behind.write_text("".join(f"{prefix}{line}\n" for line in path.read_text().splitlines()))
    here, there = (import_file(each, stated) for each in (path, behind))
    assert (here.format, len(here.rows)) == (there.format, len(there.rows))
    assert [row.model_dump(exclude=kept) for row in there.rows] == [row.model_dump(exclude=kept) for row in here.rows]


def test_a_line_that_is_too_long_is_cut_in_a_log_and_refused_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("config: " + "x" * 200_000 + "\n" + MEGATRON)
    (row,) = import_file(tmp_path / "train.log", STATED).rows
    assert row.step_times_s == (0.9, 0.5, 0.51)
    (tmp_path / "t.csv").write_text(
        "layers,hidden,heads,seq_len,vocab,mbs,gbs,notes\n1,2,2,2,2,2,2," + "x" * 200_000 + "\n"
    )
    (tmp_path / "t.md").write_text("| MBS | Sec/it | Notes |\n|--|--|--|\n| 1 | 2.0 | " + "x" * 200_000 + " |\n")
    for name in ("t.csv", "t.md"):
        with pytest.raises(TrimaranError, match="a line of 200"):
            import_file(tmp_path / name, STATED)


def test_two_steps_that_were_written_into_one_line_do_not_become_one(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(MEGATRON.replace("\n", "", 1))
    (row,) = import_file(path, STATED).rows
    assert (row.step_times_s, row.losses) == ((0.5, 0.51), (9.2, 9.3)) and "mean of" not in (row.notes or "")


def test_a_number_that_the_file_ends_in_is_no_figure_yet(tmp_path: Path) -> None:
    """A log is read while its trainer writes it: of `tps: 10,050` the file may hold `tps: 10,0`."""
    titan = "step: {}  loss:  9.0  memory: 66.91GiB(37.51%)  tps: {}"
    path = tmp_path / "titan.log"
    path.write_text(titan.format(1, "9,000\n") + titan.format(2, "10,000\n") + titan.format(3, "10,0"))
    stated = Asked(given=typed_cells({**SHAPE, "mbs": 1, "gbs": 8, "dp": 8, "tp": 1, "pp": 1}))
    (row,) = import_file(path, stated).rows
    assert row.tokens_per_s_per_gpu == 10_000 and len(row.step_times_s) == 2
    path.write_text(MEGATRON + "srun: error: node1: task 3: Exited with exit code 1")
    (row,) = import_file(path, STATED).rows
    assert row.status == "fail", "what says how the run ended stays"


@pytest.mark.parametrize(
    "table",
    [
        "model,dp,tp,pp,mbs,gbs,seq_len,sec_per_it\nllama3-8b,8,1,1,2,128,8192,13.37\n",
        'model,layout_label,gbs,seq_len,sec_per_it\nllama3-8b,"dp8,mbs2,bf16",128,8192,13.37\n',
        '"seq_len","layers","hidden","heads","vocab","dp","mbs","gbs","sec_per_it"\n8192,32,4096,32,128256,8,2,128,13.37\n',
    ],
)
def test_a_table_that_names_its_model_or_quotes_its_columns_is_recognised(tmp_path: Path, table: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(table)
    found = import_file(path, Asked())
    assert (found.format, found.refused) == ("csv", ())
    assert [(row.layers, row.hidden, row.gbs, row.sec_per_it) for row in found.rows] == [(32, 4096, 128, 13.37)]
