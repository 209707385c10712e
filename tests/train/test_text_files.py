"""Files and folders of text: which are read, as what, and what is told of those that cannot be."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from processes import bound_by_permissions
from test_tokenise import POEM, make_job
from trimaran.nouns.noun import TrimaranError
from trimaran.train.programs import tokenise
from trimaran.train.programs.tokenise import prepare
from trimaran.train.text.tokens import Tokens, read_index


def test_a_folder_passes_over_what_is_not_text_but_a_named_file_may_not_be_so(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(POEM)
    (tmp_path / "text" / "b.dat").write_bytes(b"\xff\xfe\x00\x80" * 10)
    assert read_index(prepare(make_job(tmp_path, paths=[str(tmp_path / "text")]))).documents == 1
    with pytest.raises(TrimaranError, match=r"b\.dat is not UTF-8 text"):
        prepare(make_job(tmp_path, paths=[str(tmp_path / "text" / "b.dat")]))


@pytest.mark.parametrize("kind", ["JSONL", "ndjson", "json", "parquet"])
def test_records_are_known_by_their_ending_in_capitals_and_in_other_words_too(tmp_path: Path, kind: str) -> None:
    """`.JSONL` was one document with its braces in it, and `.Parquet` in a folder was left out in silence."""
    (tmp_path / "text").mkdir()
    if kind != "parquet":
        (tmp_path / "text" / f"a.{kind}").write_text('{"text": "abc"}\n{"text": "d"}\n')
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": ["abc", "d"]}), tmp_path / "text" / "a.Parquet")
    tokens = Tokens(prepare(make_job(tmp_path, paths=[str(tmp_path / "text")])))
    assert tokens.read(0, len(tokens)).tolist() == [*b"abc", 256, *b"d", 256]


def test_a_folder_holds_the_folders_that_it_links_to_each_once(tmp_path: Path) -> None:
    """A corpus of links to shared folders was left out in silence, but for what lay in it by itself."""
    text, shared = tmp_path / "text", tmp_path / "shared"
    for path, words in {text / "own/a.txt": "a", shared / "deep/b.txt": "b", tmp_path / "more/c.txt": "c"}.items():
        path.parent.mkdir(parents=True)
        path.write_text(words)
    (text / "own" / "linked").symlink_to(shared)
    (text / "twice").symlink_to(shared / "deep")
    (text / "own" / "in_turn").symlink_to(text)
    (shared / "deep" / "further").symlink_to(tmp_path / "more")
    (tmp_path / "more" / "back").symlink_to(shared)
    (text / ".hidden").symlink_to(shared)
    (text / "gone").symlink_to(tmp_path / "nowhere")
    tokens = Tokens(prepare(make_job(tmp_path, paths=[str(text)])))
    assert sorted(tokens.read(0, len(tokens)).tolist()) == [*b"abc", 256, 256, 256]


def packed(lines: bytes, path: Path) -> bytes:
    """What a packed file of lines holds: two parts, one after the other, as tools that pack in parallel leave it."""
    middle = len(lines) // 2
    halves = lines[:middle], lines[middle:]
    if path.suffix.lower() == ".gz":
        return b"".join(gzip.compress(half) for half in halves)
    codec = pytest.importorskip("pyarrow").Codec("zstd")
    return b"".join(codec.compress(half, asbytes=True) for half in halves)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.JSON.gz", "a.jsonl.zst", "a.json.ZST", "a.ndjson.gz"])
def test_packed_lines_of_a_folder_are_read_and_not_passed_over(tmp_path: Path, name: str) -> None:
    """Beside a page of words about them, these words alone were the text."""
    path = tmp_path / "text" / name
    path.parent.mkdir()
    path.write_bytes(packed(b'{"text": "abc"}\n' * 3000 + b'{"text": "d"}\n', path))
    (tmp_path / "text" / "b.md").write_text("e")
    job = make_job(tmp_path, paths=[str(path.parent)])
    folder = prepare(job)
    tokens = Tokens(folder)
    assert tokens.read(0, len(tokens)).tolist() == [*b"abc", 256] * 3000 + [*b"d", 256, *b"e", 256]
    path.write_bytes(packed(b'{"text": "f"}\n', path))
    assert prepare(job) != folder


@pytest.mark.parametrize("content", ['{"text": 1}', '{\n"text": "a"\n}\n', '["text"]\n', "", "[" * 100_000])
def test_a_json_that_does_not_begin_with_a_record_is_one_document(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "b.md").write_text("e")
    tokens = Tokens(prepare(make_job(tmp_path, paths=[str(tmp_path / "a.json"), str(tmp_path / "b.md")])))
    document = [*content.encode(), 256] if content else []
    assert tokens.read(0, len(tokens)).tolist() == [*document, *b"e", 256]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_packed_lines_that_are_cut_short_or_damaged_are_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = packed(b"".join(b'{"text": "%d"}\n' % number for number in range(10_000)), path)
    damaged = whole[:500] + bytes(200) + whole[700:]  # Zstandard has checksums only where it was asked for them
    for content in (whole[: len(whole) // 3], b"plain", *([damaged] if path.suffix == ".gz" else [])):
        path.write_bytes(content)
        with pytest.raises(
            TrimaranError, match=r"a\.jsonl\.\w+(, line 1 is|, line \d+ is not a JSON| cannot be read: )"
        ):
            prepare(make_job(tmp_path, paths=[str(path)]))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_records_of_a_folder_are_read_to_their_end_or_refused(tmp_path: Path, kind: str) -> None:
    """Of records in a folder, those after a byte that is not UTF-8 were left out in silence."""
    (tmp_path / "text").mkdir()
    path = tmp_path / "text" / f"a.{kind}"
    if kind == "jsonl":
        good = b'{"text": "abc"}\n' * 2_000
        path.write_bytes(good + b'{"text": "\xff"}\n' + good)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        letters = np.frombuffer(b"ab\xff\xfe", np.uint8)
        offsets = np.array([0, 2, 4], np.int32)
        texts = pyarrow.Array.from_buffers(
            pyarrow.string(), 2, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(letters)]
        )
        parquet.write_table(pyarrow.table({"text": texts}), path)
    said = {"jsonl": r"line 2001 is not a JSON object in UTF-8", "parquet": "is not UTF-8 text"}[kind]
    (tmp_path / "text" / "b.txt").write_text(POEM)
    with pytest.raises(TrimaranError, match=said):
        prepare(make_job(tmp_path, paths=[str(tmp_path / "text")]))


@pytest.mark.parametrize(
    ("values", "said"), [([b"abc"], "is of binary and not of text"), (["abc"] * 3_000, "cannot be read: Couldn't")]
)
def test_a_column_that_is_not_of_text_and_a_damaged_one_are_told(
    tmp_path: Path, values: list[object], said: str
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": values}), path)
    if "Couldn't" in said:
        content = bytearray(path.read_bytes())
        content[4:40] = bytes(byte ^ 0x5A for byte in content[4:40])
        path.write_bytes(content)
    (tmp_path / "b.txt").write_text(POEM)
    with pytest.raises(TrimaranError, match=said):
        prepare(make_job(tmp_path, paths=[str(tmp_path / "b.txt"), str(path)]))


@pytest.mark.parametrize("mode", [0o000, 0o400], ids=["not listed", "listed alone"])
@pytest.mark.parametrize("within", [".", "deep"])
def test_a_folder_that_cannot_be_read_is_told_and_not_passed_over(tmp_path: Path, within: str, mode: int) -> None:
    """A training on what was left of the text did not say so; of a folder that was named itself, that it held none."""
    corpus = tmp_path / "corpus"
    locked = corpus / within
    locked.mkdir(parents=True)
    for folder in (tmp_path, locked):
        (folder / "a.txt").write_text(POEM)
    job = make_job(tmp_path, paths=[str(tmp_path / "a.txt"), str(corpus)])
    (tmp_path / "job.json").write_text(job.model_dump_json())
    program = [sys.executable, "-m", tokenise.__name__, str(tmp_path / "job.json")]
    locked.chmod(mode)
    try:
        done = subprocess.run([*bound_by_permissions(), *program], capture_output=True, text=True, check=False)
    finally:
        locked.chmod(0o700)
    cannot = f"data.paths: {locked if mode == 0 else locked / 'a.txt'} cannot be read: Permission denied; "
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert cannot in done.stderr
