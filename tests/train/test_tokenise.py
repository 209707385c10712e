from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import tokenizers

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import DataJob
from trimaran.recipe.data_settings import DataSettings
from trimaran.train.programs import tokenise
from trimaran.train.programs.run_job import run_job
from trimaran.train.programs.tokenise import prepare
from trimaran.train.text.tokens import Tokens, read_index

POEM = "the owl and the pussycat went to sea\nin a beautiful pea-green boat ü\n"


def make_job(tmp_path: Path, vocab: int = 300, **data: object) -> DataJob:
    return DataJob(data=DataSettings.model_validate(data), vocab=vocab, cache_dir=str(tmp_path / "cache"))


def test_bytes_come_back_as_they_were_with_an_end_after_each_document(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(POEM)
    folder = prepare(make_job(tmp_path, paths=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]))
    tokens = Tokens(folder)
    expected = [*POEM.encode(), 256]
    assert tokens.read(0, len(tokens)).tolist() == expected * 2
    assert (tokens.index.documents, tokens.index.text_bytes) == (2, 2 * len(POEM.encode()))


def test_the_same_text_is_tokenised_once_and_changed_text_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(POEM)
    job = make_job(tmp_path, paths=[str(tmp_path / "a.txt")])
    first = prepare(job)
    with monkeypatch.context() as patched:
        patched.setattr(tokenise, "_write", lambda *_: pytest.fail("tokenised twice"))
        assert prepare(job) == first
    (tmp_path / "a.txt").write_text(POEM.upper())
    assert prepare(job) != first


def test_tokens_that_were_read_otherwise_are_not_taken_for_those_of_today(tmp_path: Path) -> None:
    """Text that gives other tokens than it did needs another FORMAT: folders of before would serve its old ones."""
    (tmp_path / "1.JSONL").write_text(json.dumps({"text": "cut at two words"}) + "\n" + json.dumps({"text": "\ud83d."}))
    (tmp_path / "2.txt").write_text(POEM, encoding="utf-8-sig")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "two": 1, "</s>": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.enable_truncation(2)
    inner.save(str(tmp_path / "tokenizer.json"))
    checksum = hashlib.sha256()
    paths = [str(tmp_path / "1.JSONL"), str(tmp_path / "2.txt")]
    for tokenizer in ("bytes", str(tmp_path / "tokenizer.json")):
        tokens = Tokens(prepare(make_job(tmp_path, paths=paths, tokenizer=tokenizer)))
        checksum.update(tokens.read(0, len(tokens)).astype("<i8").tobytes())
    assert (tokenise.FORMAT, checksum.hexdigest()[:16]) == (4, "151f0d236df1bfc1")


def test_what_dead_processes_left_unfinished_is_removed_after_a_day(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    long_ago, cache = time.time() - 2 * 86400, tmp_path / "cache"

    def leave(name: str, *, folder_at: float, file_at: float) -> Path:
        (cache / name).mkdir(parents=True)
        (cache / name / "tokens-000-00000.bin").touch()
        os.utime(cache / name / "tokens-000-00000.bin", (file_at, file_at))
        os.utime(cache / name, (folder_at, folder_at))
        return cache / name

    left = leave(f"a.partial.{dead.pid}", folder_at=long_ago, file_at=long_ago)
    kept = {
        leave(f"b.partial.{dead.pid}", folder_at=time.time(), file_at=time.time()),  # perhaps at work elsewhere
        leave(f"c.partial.{dead.pid}", folder_at=long_ago, file_at=time.time()),
        leave(f"d.partial.{os.getpid()}", folder_at=long_ago, file_at=long_ago),
        leave("e", folder_at=long_ago, file_at=long_ago),
    }
    (tmp_path / "a.txt").write_text(POEM)
    made = prepare(make_job(tmp_path, paths=[str(tmp_path / "a.txt")]))
    assert not left.exists() and set(cache.iterdir()) == {*kept, made}


def test_it_tells_what_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokenise._Progress, "EVERY_S", 0.0)
    monkeypatch.setattr(tokenise, "DOCUMENTS_AT_ONCE", 2)
    for n in range(10):
        (tmp_path / f"{n}.txt").write_text("z" * (1 << 20))
    prepare(make_job(tmp_path, paths=[str(tmp_path / f"{n}.txt") for n in range(10)]))
    told = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in told] == [
        f"progress: tokenised {done}.0 of 10.0 MiB" for done in (2, 4, 6, 8)
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_bpe_learns_from_records_and_gives_the_text_back(tmp_path: Path, kind: str) -> None:
    texts = [f"{i} {POEM}" for i in range(200)]
    if kind == "jsonl":
        (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "text.parquet")
    job = make_job(tmp_path, vocab=320, paths=[str(tmp_path / f"text.{kind}")], tokenizer="bpe", text_field="body")
    folder = prepare(job)
    tokens = Tokens(folder)
    assert tokens.index.vocab <= 320
    assert len(tokens) < sum(map(len, texts)) / 2

    from tokenizers import Tokenizer

    bpe = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokens.read(0, len(tokens)).tolist()
    assert bpe.decode(ids[: ids.index(tokens.index.end_of_document)]) == texts[0]
    again = job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": str(folder / "tokenizer.json")})})
    assert Tokens(prepare(again)).read(0, len(tokens)).tolist() == ids


def test_a_tokenizer_that_was_saved_to_cut_and_fill_up_documents_gives_all_their_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    (tmp_path / "a.txt").write_text(POEM)
    (tmp_path / "b.txt").write_text(POEM * 10)
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    plain = prepare(make_job(tmp_path, paths=paths, tokenizer="bpe"))
    saved = Tokenizer.from_file(str(plain / "tokenizer.json"))
    saved.enable_truncation(16)
    saved.enable_padding(length=32)
    saved.save(str(tmp_path / "tokenizer.json"))
    tokens = Tokens(prepare(make_job(tmp_path, paths=paths, tokenizer=str(tmp_path / "tokenizer.json"))))
    expected = Tokens(plain)
    assert tokens.read(0, len(tokens)).tolist() == expected.read(0, len(expected)).tolist()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_byte_order_mark_and_half_a_pair_of_utf_16_are_no_text(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.txt").write_text("cab", "utf-8-sig")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "a\ud800b"}), "utf-8-sig")
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    folder = prepare(make_job(tmp_path, paths=paths, tokenizer=tokenizer))
    tokens = Tokens(folder)

    from tokenizers import Tokenizer

    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert saved.decode(tokens.read(0, len(tokens)).tolist(), skip_special_tokens=False) == (
        "cab<|endoftext|>a?b<|endoftext|>"
    )


@pytest.mark.parametrize("end", ["</s>", "<eos>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"])
def test_the_end_of_a_document_is_what_the_tokenizers_of_trained_families_call_it(tmp_path: Path, end: str) -> None:
    """Llama 2's and BLOOM's, Gemma's, Llama 3's, DeepSeek's."""
    from tokenizers import AddedToken, Tokenizer, models

    inner = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    inner.add_special_tokens([AddedToken(end, special=True)])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("ab")
    job = make_job(tmp_path, paths=[str(tmp_path / "a.txt")], tokenizer=str(tmp_path / "tokenizer.json"))
    assert Tokens(prepare(job)).read(0, 3).tolist() == [0, 1, 2]


def test_a_tag_of_html_is_no_end_of_a_document(tmp_path: Path) -> None:
    """Gemma's tokenizers have a token for the end of a text that is struck through."""
    from tokenizers import AddedToken, Tokenizer, models

    inner = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    inner.add_tokens([AddedToken("</s>")])
    inner.add_special_tokens([AddedToken("<eos>", special=True)])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("ab</s>")
    job = make_job(tmp_path, paths=[str(tmp_path / "a.txt")], tokenizer=str(tmp_path / "tokenizer.json"))
    assert Tokens(prepare(job)).read(0, 4).tolist() == [0, 1, 2, 3]


def test_a_tokenizer_without_a_token_is_told_in_one_line(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(POEM)
    job = make_job(tmp_path, paths=[str(tmp_path / "a.txt")], tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(TrimaranError, match="has no end-of-document token"):
        prepare(job)


def test_reading_crosses_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": f"{i:03d}"}) for i in range(9)))
    monkeypatch.setattr(tokenise, "FILE_TOKENS", 10)
    tokens = Tokens(prepare(make_job(tmp_path, paths=[str(tmp_path / "text.jsonl")])))
    assert len(tokens.index.files) == 5
    text = bytes(t for t in tokens.read(2, 30).tolist() if t < 256).decode()
    assert text == "000001002003004005006007008"[2 : 2 + len(text)]
    assert len(text) == 22


def test_max_mib_stops_reading(tmp_path: Path) -> None:
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text("x" * 100_000)
    folder = prepare(make_job(tmp_path, paths=[str(tmp_path)], max_mib=0.2))
    assert read_index(folder).documents == 3


@pytest.mark.parametrize("first", ["records", "no text", "CRLF"])
def test_what_max_mib_lets_be_read_counts_however_large_the_files_before_it(tmp_path: Path, first: str) -> None:
    """Of 0.1 MiB asked for, the first file is as large and holds less."""
    size = int(0.1 * (1 << 20)) + 1
    name, content = {
        "records": ("a.jsonl", json.dumps({"text": POEM, "padding": "x" * size}).encode()),
        "no text": ("a.dat", b"\xff" * size),
        "CRLF": ("a.txt", b"\r\n" * (size // 2 + 1)),
    }[first]
    text = tmp_path / "text"
    text.mkdir()
    (text / name).write_bytes(content)
    (text / "b.txt").write_text(POEM)
    job = make_job(tmp_path, paths=[str(text)], max_mib=0.1)
    before = prepare(job)
    (text / "b.txt").write_text(POEM.upper())
    after = prepare(job)
    assert after != before
    tokens = Tokens(after)
    assert POEM.upper().encode() in bytes(t for t in tokens.read(0, len(tokens)).tolist() if t < 256)


def test_what_max_mib_leaves_unread_does_not_count(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x" * 200_000)
    job = make_job(tmp_path, paths=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], max_mib=0.1)
    before = prepare(job)
    (tmp_path / "b.txt").write_text(POEM)
    assert prepare(job) == before


@pytest.mark.parametrize("room", [16, 24_000], ids=["tokenizer", "tokens"])
def test_what_finds_no_room_is_told_in_the_systems_words_and_nothing_stays(tmp_path: Path, room: int) -> None:
    (tmp_path / "a.txt").write_text(POEM * 1_000)
    job = make_job(tmp_path, paths=[str(tmp_path / "a.txt")])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(TrimaranError, match="cannot be written: File too large; free space or choose another path"):
            prepare(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({}, {"paths": ["nowhere"]}, "nowhere does not exist"),
        ({"a.txt": ""}, {"paths": ["a.txt"]}, "hold no text"),
        ({"a.txt": POEM}, {"paths": ["a.txt"], "tokenizer": "a.txt"}, "neither 'bytes', 'bpe' nor"),
        ({"a.jsonl": '{"text": "x"}\n{"txt": 1}'}, {"paths": ["a.jsonl"]}, "line 2 is not a JSON object in UTF-8 with"),
        ({"a.jsonl": '{"text": "x"}\n' + "[" * 100_000}, {"paths": ["a.jsonl"]}, "line 2 is not a JSON object in"),
        ({"a.parquet": "no"}, {"paths": ["a.parquet"]}, "is not a Parquet file"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: dict[str, str],
    settings: dict[str, object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "job.json").write_text(make_job(tmp_path, **settings).model_dump_json())
    assert run_job(DataJob, tokenise.tokenise, ["job.json"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list((tmp_path / "cache").glob("*/index.json"))


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("bpe", "a BPE needs a vocabulary of 257 at least, model.vocab is 200"),
        ("bytes", "257 tokens, model.vocab is 200"),
    ],
)
def test_a_vocabulary_too_small_is_refused_with_both_numbers(tmp_path: Path, tokenizer: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(POEM)
    with pytest.raises(TrimaranError, match=message):
        prepare(make_job(tmp_path, vocab=200, paths=[str(tmp_path / "a.txt")], tokenizer=tokenizer))


def test_of_a_lost_token_file_the_way_out_is_one(tmp_path: Path) -> None:
    """To prepare the data again did nothing: the folder has its index still."""
    (tmp_path / "a.txt").write_text(POEM)
    job = make_job(tmp_path, paths=[str(tmp_path / "a.txt")])
    folder = prepare(job)
    (folder / read_index(folder).files[0].name).unlink()
    with pytest.raises(TrimaranError, match="delete the folder and prepare the data again"):
        Tokens(prepare(job))
    shutil.rmtree(folder)
    assert len(Tokens(prepare(job))) > len(POEM.encode())
