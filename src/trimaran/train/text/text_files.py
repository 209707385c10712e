"""Documents of text files: plain text, JSON lines, packed or not, and Parquet, by file or by folder."""

from __future__ import annotations

import codecs
import gzip
import json
import math
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader, IncrementalNewlineDecoder
from pathlib import Path

from trimaran.files.user_file import from_home, open_file, regular_file
from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.data_settings import BlendedText, DataSettings, is_megatron

STDLIB = "python-stdlib"
MIB = 1 << 20
# A file that is a single document is read whole, but piece by piece: of what is no text the first one says so.
DOCUMENT_BYTES = 16 << 30
PIECE_BYTES = 1 << 20
# A first line that is longer is no record.
RECORD_BYTES = 64 << 20

# Parquet row groups are read a batch of rows at a time, so that memory stays bounded.
PARQUET_ROWS = 1024


def text_files(text: BlendedText) -> list[Path]:
    """All files that `paths` name except token files, sorted within each folder.

    Raises TrimaranError for a path that is not there, and for a folder that cannot be read, in it or below it.
    """
    files: list[Path] = []
    for given in text_paths(text):
        path = Path(sysconfig.get_paths()["stdlib"]) if given == STDLIB else from_home(given)
        try:
            if path.is_file():
                files.append(path)
            elif path.is_dir():
                files += sorted(p for p in _inside(path, []) if given != STDLIB or p.suffix == ".py")
            elif not path.exists():
                raise TrimaranError(f"data.paths: {given} does not exist: correct the path, or use {STDLIB!r}")
            else:
                regular_file(path, f"data.paths: {given}", None)
        except OSError as error:
            raise TrimaranError(
                f"data.paths: {error.filename or given} cannot be read: {error.strerror or error}; let it be "
                f"read, or name what is beside it"
            ) from None
    if not files and text_paths(text):
        raise TrimaranError(f"data.paths: {', '.join(text.paths)} hold no files: name a folder that does")
    return files


def text_size(text: BlendedText, max_mib: float | None) -> float:
    """Bytes of the files of a text, of which no more than `max_mib` are read."""
    size = float(sum(file.stat().st_size for file in text_files(text)))
    return size if max_mib is None else min(size, max_mib * MIB)


def plain_text_size(file: Path, field: str) -> int:
    """Bytes of the text of a file that is a single document; 0 where it holds records or is not text.

    The size of the text in records is known only once they are parsed.
    """
    if form(file, field) in _RECORDS:
        return 0
    try:
        return sum(len(piece.encode()) for piece in _pieces(file))
    except UnicodeDecodeError:
        return 0


def text_paths(text: BlendedText) -> list[str]:
    """The paths of a text that are not token files."""
    return [path for path in text.paths if not is_megatron(path)]


def _inside(folder: Path, read: list[Path]) -> Iterator[Path]:
    """Files of a folder and of all folders in it, linked ones too; those that were `read` already are passed over.

    Raises OSError for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    read.append(folder.resolve())
    links: list[Path] = []
    for name, folders, files in os.walk(folder, onerror=refuse):
        here = Path(name)
        folders[:] = [f for f in sorted(folders) if _wanted(f) and (here / f).resolve() not in read]
        links += [here / f for f in folders if (here / f).is_symlink()]
        yield from (here / f for f in files if _wanted(f) and (here / f).is_file())
    for link in links:
        if not any(link.resolve().is_relative_to(before) for before in read):
            yield from _inside(link, read)


def _wanted(name: str) -> bool:
    """Whether a file or folder in a folder is read: not if it is hidden, of an installed package or a disk's own."""
    return not name.startswith(".") and name not in ("site-packages", "__pycache__", "lost+found")


def documents(text: BlendedText, settings: DataSettings) -> Iterator[str]:
    """Every document of every file of a text, until `max_mib` of text were read; of a file that has more its beginning.

    A file that is named has to be readable text, and so has one of records; in a folder, other files are passed over.
    Raises TrimaranError naming a file that cannot be read, or where none holds text.
    """
    named = {from_home(path) for path in text.paths}
    left = most = math.inf if settings.max_mib is None else settings.max_mib * MIB
    any_document = False
    for file in text_files(text):
        try:
            for document in _read(file, settings.text_field, most):
                if not document:
                    continue
                any_document = True
                yield document
                left -= len(document.encode(errors="replace"))
                if left <= 0:
                    return
        except OSError as error:
            reason = error.strerror or str(error).splitlines()[0]  # the reader of Parquet has words alone
            raise TrimaranError(f"data.paths: {file} cannot be read: {reason}") from None
        except UnicodeDecodeError as error:
            if file in named or form(file, settings.text_field) in _RECORDS:
                raise TrimaranError(
                    f"data.paths: {file} is not UTF-8 text (byte {error.start}): convert it or leave it out"
                ) from None
    if not any_document and text_paths(text):
        raise TrimaranError(f"data.paths: {', '.join(text.paths)} hold no text: name files that do")


def _read(file: Path, field: str, most: float) -> Iterator[str]:
    if (kind := form(file, field)) in _RECORDS:
        yield from _RECORDS[kind](file, field)
    else:
        yield _document(file, most)


def form(file: Path, field: str) -> str:
    """What a file holds, as its name ends: of records that are packed, both endings.

    A .json whose first line is a record is JSON lines, as the corpora that Megatron-LM reads are called. Raises OSError
    where it cannot be read.
    """
    name = file.name.lower().replace(".ndjson", ".jsonl")  # another word for JSON lines
    if name.endswith(".json") and _begins_with_a_record(file, field):
        return ".jsonl"
    return next((known for known in _RECORDS if name.endswith(known)), file.suffix.lower())


def _begins_with_a_record(file: Path, field: str) -> bool:
    with open_file(file, f"data.paths: {file}", None) as opened:
        try:
            first = json.loads(opened.readline(RECORD_BYTES))
        except (ValueError, RecursionError):
            return False
    return isinstance(first, dict) and isinstance(first.get(field), str)


def _document(file: Path, most: float) -> str:
    """The text of a file that is a single document, of one with more than `most` bytes to the character of the last."""
    read: list[str] = []
    for piece in _pieces(file):
        encoded = piece.encode() if most < math.inf else b""
        before = encoded[: max(0, math.ceil(most) - 1)] if len(encoded) > most else None
        read.append(piece if before is None else piece[: len(before.decode(errors="ignore")) + 1])
        most -= len(encoded)
        if most <= 0:
            break
    return "".join(read)


def _pieces(file: Path) -> Iterator[str]:
    """The text of such a file. Raises UnicodeDecodeError, whose `start` counts from the first byte of the file."""
    decoder = IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    end = 0
    with open_file(file, f"data.paths: {file}", DOCUMENT_BYTES) as opened:
        while True:
            block = opened.read(PIECE_BYTES)
            end += len(block)
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                # what could not be decoded ends where the block does, and begins where the last one left off
                first = end - len(error.object) + error.start
                raise UnicodeDecodeError(error.encoding, b"", first, first + 1, error.reason) from None
            if not block:
                return


def _read_jsonl(file: Path, field: str) -> Iterator[str]:
    with _unpacked(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode("utf-8-sig"))[field]
            except (ValueError, KeyError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise TrimaranError(
                    f"data.paths: {file}, line {number} is not a JSON object in UTF-8 with a text field {field!r}: "
                    f"mend the line or set data.text_field"
                )
            # JSON may escape half of a pair of UTF-16, which is no character; tokenizers take none
            yield text.encode(errors="replace").decode()


@contextmanager
def _unpacked(file: Path) -> Iterator[Iterable[bytes]]:
    """The file's lines, unpacked where its name says that they are packed. Raises OSError where it is damaged."""
    with open_file(file, f"data.paths: {file}", None) as opened:
        if file.suffix.lower() == ".gz":
            try:
                with gzip.GzipFile(fileobj=opened) as lines:
                    yield lines
            except (EOFError, zlib.error) as error:
                raise OSError(f"{error}: fetch it again") from None
        elif file.suffix.lower() == ".zst":
            import pyarrow

            with BufferedReader(pyarrow.CompressedInputStream(opened, "zstd")) as lines:
                yield lines
        else:
            yield opened


def _read_parquet(file: Path, field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(regular_file(file, f"data.paths: {file}", None))
        if field not in table.schema_arrow.names:
            raise TrimaranError(
                f"data.paths: {file} has no column {field!r} (it has {', '.join(table.schema_arrow.names)}): "
                f"set data.text_field"
            )
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[field]):
            for text in batch.column(0).to_pylist():
                if isinstance(text, str):
                    yield text
                elif text is not None:
                    raise TrimaranError(
                        f"data.paths: {file}, column {field!r} is of {batch.column(0).type} and not of text: "
                        f"set data.text_field to a column that is"
                    )
    except pyarrow.ArrowException as error:
        raise TrimaranError(f"data.paths: {file} is not a Parquet file ({str(error).splitlines()[0]})") from None


# Formats whose files hold many documents as records; any other file is a single document. Texts are mostly published as
# JSON lines that are packed, and some of them are called .json.gz.
_RECORDS = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    **dict.fromkeys((".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst"), _read_jsonl),
}
