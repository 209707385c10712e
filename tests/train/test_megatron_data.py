"""Megatron-LM's token files are read as it writes them, and written as it reads them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import DataJob
from trimaran.recipe.data_settings import DataSettings
from trimaran.train.programs.run_job import run_job
from trimaran.train.programs.tokenise import prepare, tokenise
from trimaran.train.text.megatron_data import read_megatron
from trimaran.train.text.tokens import Tokens, read_index

# Two documents, "hi" and "you", as bytes with 256 behind each: written out by hand from the format's description.
TOKENS = [104, 105, 256, 121, 111, 117, 256]
BIN = b"\x68\x00\x69\x00\x00\x01\x79\x00\x6f\x00\x75\x00\x00\x01"
IDX = (
    b"MMIDIDX\x00\x00"
    b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version 1
    b"\x08"  # uint16
    b"\x02\x00\x00\x00\x00\x00\x00\x00"  # 2 sequences
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # 3 bounds of documents
    b"\x03\x00\x00\x00\x04\x00\x00\x00"  # lengths 3 and 4
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00"  # first bytes 0 and 6
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"
)


def job_of(tmp_path: Path, **data: object) -> DataJob:
    return DataJob(data=DataSettings.model_validate(data), vocab=300, cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    (tmp_path / "corpus.bin").write_bytes(BIN)
    (tmp_path / "corpus.idx").write_bytes(IDX)
    return tmp_path / "corpus.idx"


def test_what_is_written_is_byte_for_byte_the_format(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "hi"}\n{"text": "you"}\n')
    job = job_of(tmp_path, paths=[str(tmp_path / "text.jsonl")])
    (tmp_path / "job.json").write_text(job.model_copy(update={"megatron": str(tmp_path / "out")}).model_dump_json())
    assert run_job(DataJob, tokenise, [str(tmp_path / "job.json")]) == 0
    tokens = Tokens(prepare(job))
    assert tokens.read(0, len(tokens)).tolist() == TOKENS
    assert (tmp_path / "out.bin").read_bytes() == BIN
    assert (tmp_path / "out.idx").read_bytes() == IDX


def test_a_pair_that_finds_no_room_leaves_nothing(
    tmp_path: Path, small_disk: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = small_disk(1)
    (tmp_path / "text.txt").write_text("all work and no play\n" * 40_000)
    job = job_of(tmp_path, paths=[str(tmp_path / "text.txt")]).model_copy(update={"megatron": str(disk / "out")})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    assert run_job(DataJob, tokenise, [str(tmp_path / "job.json")]) == 2
    said = capsys.readouterr().err
    assert "out.bin" in said and "free space" in said and not list(disk.iterdir())
    # a pair that is there stays
    for name in ("out.bin", "out.idx"):
        (disk / name).write_bytes(b"earlier")
    assert run_job(DataJob, tokenise, [str(tmp_path / "job.json")]) == 2
    assert {path.name: path.read_bytes() for path in disk.iterdir()} == dict.fromkeys(
        ("out.bin", "out.idx"), b"earlier"
    )


@pytest.mark.parametrize("half", [".idx", ".bin"])
def test_a_pair_is_trained_on_where_it_lies(tmp_path: Path, pair: Path, half: str) -> None:
    folder = prepare(job_of(tmp_path, paths=[str(pair.with_suffix(half))]))
    tokens = Tokens(folder)
    assert tokens.read(0, len(tokens)).tolist() == TOKENS
    assert tokens.index.documents == 2
    assert not list(folder.glob("*.bin"))


def test_an_index_of_32_bit_tokens_is_read(tmp_path: Path) -> None:
    np.array([7, 70000, 256], dtype="<i4").tofile(tmp_path / "c.bin")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 1, 2)
    (tmp_path / "c.idx").write_bytes(header + struct.pack("<i", 3) + struct.pack("<q", 0) + struct.pack("<qq", 0, 1))
    tokens = Tokens(prepare(job_of(tmp_path, paths=[str(tmp_path / "c.idx")])))
    assert tokens.read(0, 3).tolist() == [7, 70000, 256]


def test_a_pair_and_text_make_a_blend(tmp_path: Path, pair: Path) -> None:
    (tmp_path / "text.txt").write_text("abc")
    blend = [{"paths": [str(pair)], "weight": 1}, {"paths": [str(tmp_path / "text.txt")], "weight": 3}]
    job = job_of(tmp_path, blend=blend)
    tokens = Tokens(prepare(DataJob.model_validate_json(job.model_dump_json())))
    assert tokens.parts == [(0, 7), (7, 11)]
    assert tokens.read(5, 4).tolist() == [117, 256, 97, 98]
    assert tokens.index.weights == (1.0, 3.0)


@pytest.mark.parametrize(
    ("idx", "content", "says"),
    [
        (IDX[:20], BIN, "it has 20 bytes"),
        (b"X" + IDX[1:], BIN, "is not a Megatron-LM index"),
        (IDX[:-1], BIN, f"has {len(IDX) - 1} bytes, its header asks for {len(IDX)}"),
        (IDX, BIN[:-2], "has 12 bytes, its index asks for 14"),
        (IDX[:42] + b"\x02" + IDX[43:], BIN, "do not follow one another"),
        (IDX, None, "give both files"),
    ],
    ids=["short header", "magic", "cut index", "cut tokens", "gap", "no bin"],
)
def test_a_damaged_pair_is_told_in_one_line(tmp_path: Path, idx: bytes, content: bytes | None, says: str) -> None:
    (tmp_path / "c.idx").write_bytes(idx)
    if content is not None:
        (tmp_path / "c.bin").write_bytes(content)
    with pytest.raises(TrimaranError, match=says) as caught:
        read_megatron(tmp_path / "c.idx")
    assert "\n" not in str(caught.value)


def test_texts_are_named_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="paths and blend are both stated"):
        job_of(tmp_path, paths=["a.txt"], blend=[{"paths": ["b.txt"], "weight": 1}])


def test_a_bpe_cannot_be_trained_on_tokens(tmp_path: Path, pair: Path) -> None:
    with pytest.raises(TrimaranError, match=r"name the tokenizer\.json"):
        prepare(job_of(tmp_path, paths=[str(pair)], tokenizer="bpe"))


def test_every_folder_of_tokens_has_the_tokenizer_beside_it(tmp_path: Path) -> None:
    """Bytes too: what is sampled or given to Hugging Face later needs to be read."""
    from tokenizers import Tokenizer

    text = "grün\r\n\x00\x7f 漢字"
    (tmp_path / "text.txt").write_text(text, newline="")
    folder = prepare(job_of(tmp_path, paths=[str(tmp_path / "text.txt")]))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.token_to_id("<|endoftext|>") == read_index(folder).end_of_document == 256
