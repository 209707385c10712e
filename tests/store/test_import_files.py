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
STATED = Asked(given=typed_cells({**SHAPE, "mbs": 4}))
MEGATRON = "".join(
    f" iteration {n}/ 9 | elapsed time per iteration (ms): {ms}.0 | global batch size: 64 | lm loss: 9.{n} |\n"
    for n, ms in ((1, 900), (2, 500), (3, 510))
)


@pytest.mark.parametrize("encode", [gzip.compress, lambda raw: raw.decode().encode("utf-16")])
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
        (gzip.compress(b"x\n" * 2**20), "more than 1 MiB"),
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
