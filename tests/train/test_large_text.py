"""Files of text, or of none, that are larger than what is wanted of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from test_tokenise import POEM, make_job
from trimaran.nouns.noun import TrimaranError
from trimaran.train.programs import tokenise
from trimaran.train.programs.tokenise import fingerprint, prepare
from trimaran.train.text.tokens import Tokens, read_index

MIB = 1 << 20
# What the process itself held at most: getrusage would begin with what the tests held that started it.
TOKENISED = """
import sys
from trimaran.protocol.job import DataJob
from trimaran.train.programs.run_job import run_job
from trimaran.train.programs.tokenise import tokenise
from trimaran.train.run.memory import peak_resident_gib
status = run_job(DataJob, tokenise, sys.argv[1:])
print(peak_resident_gib())
sys.exit(status)
"""


def test_of_a_file_that_is_larger_than_max_mib_no_more_is_read(tmp_path: Path) -> None:
    """One file of any size was the text, whole."""
    (tmp_path / "a.txt").write_text("a" + "ü" * MIB)
    (tmp_path / "b.txt").write_text(POEM)
    folder = prepare(make_job(tmp_path, paths=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], max_mib=0.5))
    index, tokens = read_index(folder), Tokens(folder)
    # half a MiB ends within a character
    assert (index.documents, index.text_bytes) == (1, MIB // 2 + 1)
    assert bytes(tokens.read(0, len(tokens) - 1).tolist()).decode() == "a" + "ü" * (MIB // 4)


def test_tokens_of_a_file_that_was_read_whole_are_not_taken_for_those_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x" * MIB)
    job = make_job(tmp_path, paths=[str(tmp_path / "a.txt")], max_mib=0.5)
    today = fingerprint(job)
    # as it was while size alone said when to stop
    monkeypatch.setattr(tokenise, "plain_text_size", lambda file, field: MIB // 2)
    assert fingerprint(job) != today


def test_of_a_file_in_a_folder_that_is_no_text_little_is_read(tmp_path: Path) -> None:
    """It was read whole before it was passed over: weights beside a text filled the memory."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(POEM)
    with (tmp_path / "text" / "weights.bin.part").open("wb") as file:
        file.write(b"\xff")
        file.truncate(1024 * MIB)
    path = tmp_path / "job.json"
    path.write_text(make_job(tmp_path, paths=[str(tmp_path / "text")]).model_dump_json())
    done = subprocess.run([sys.executable, "-c", TOKENISED, str(path)], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 0.5, "GiB"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("at", [5, MIB - 1, 2 * MIB + 7])
def test_the_byte_that_is_no_text_is_told_wherever_it_is(tmp_path: Path, at: int, mark: bytes) -> None:
    content = bytearray(mark + "ü".encode() * 2 * MIB)
    content[at : at + 1] = b"\xff"
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(TrimaranError, match=r"a\.txt is not UTF-8 text \(byte (\d+)\)") as raised:
        prepare(make_job(tmp_path, paths=[str(tmp_path / "a.txt")]))
    told = int(str(raised.value).partition("(byte ")[2].partition(")")[0])
    # a character that it cuts off begins a byte before
    assert told in (at - 1, at)


def test_a_text_is_the_same_however_it_falls_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "\ufeffone\r\ntwo\rthree\n€ü\r"
    (tmp_path / "a.txt").write_bytes(whole.encode())
    for piece in range(1, 12):
        monkeypatch.setattr("trimaran.train.text.text_files.PIECE_BYTES", piece)
        folder = prepare(make_job(tmp_path / str(piece), paths=[str(tmp_path / "a.txt")]))
        tokens = Tokens(folder)
        assert bytes(tokens.read(0, len(tokens) - 1).tolist()).decode() == "one\ntwo\nthree\n€ü\n"
