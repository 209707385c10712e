"""Formats that can be imported, and the one way in: a file becomes rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimaran.nouns.columns import Cell
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.store.importers import csv_table, markdown
from trimaran.store.importers.document_rows import Reading, read_document
from trimaran.store.importers.doubts import examine
from trimaran.store.importers.draft import Accept, Draft, finish
from trimaran.store.importers.event_file import event_files, event_runs, event_text
from trimaran.store.importers.links import read_links as links
from trimaran.store.importers.links.read_links import TOOLS
from trimaran.store.importers.logs import (
    composer,
    deepspeed,
    hugging_face,
    megatron,
    nanogpt,
    nanotron,
    nemo,
    olmo_core,
    tensorboard,
    torchtitan,
    trimaran_jsonl,
    wandb_history,
    wandb_summary,
)
from trimaran.store.importers.logs.steps import whole
from trimaran.store.importers.profile import Profile, profile_for, typed_cells
from trimaran.store.importers.same_run import with_key
from trimaran.store.importers.text import CUT, REPLACED, read_text, without_prefixes


@dataclass(frozen=True)
class Asked:
    """What the user states about a file: a profile, cells (`--set`), and whether to make proposed repairs."""

    profile: Profile | None = None
    given: Mapping[str, Cell] = field(default_factory=dict)
    accept: Accept = lambda proposal: False


@dataclass(frozen=True)
class Imported:
    """What came of a file: rows, the rows that cannot be read, repairs not made, headings not read, remarks.

    `ended` is when a log's last step was logged, in seconds by the log's own clock.
    """

    rows: tuple[Measurement, ...]
    refused: tuple[str, ...]
    proposals: tuple[str, ...]
    unread: tuple[str, ...]
    remarks: tuple[str, ...]
    format: str
    profile: str
    ended: float | None = None


@dataclass(frozen=True)
class Format:
    """One format: whether a text is of it, and its rows."""

    name: str
    recognises: Callable[[str], bool]
    read: Callable[[str, Asked, Path], Reading]


def _of_log(read: Callable[[str, Mapping[str, Cell]], list[Draft]]) -> Callable[[str, Asked, Path], Reading]:
    return lambda text, asked, path: Reading(drafts=read(whole(without_prefixes(text)), _stated(asked)))


def _stated(asked: Asked) -> dict[str, Cell]:
    """For a log: what the user sets, then what the profile does."""
    profile = typed_cells(asked.profile.set) if asked.profile else {}
    return {**profile, **{name: value for name, value in asked.given.items() if value is not None}}


def _markdown(text: str, asked: Asked, path: Path) -> Reading:
    tables = markdown.read_tables(text)
    if not tables:
        raise TrimaranError(f"{path} holds no Markdown table: state what it is with --as")
    profile = asked.profile or profile_for(markdown.title_of(text)) or Profile()
    expected, remarks = profile.table_count, []
    if expected is not None and expected != len(tables):
        differs = f"profile {profile.name} is of a version with {expected} tables, this one has {len(tables)}"
        way_out = "" if asked.profile else ": not used; write one for this version, or give it by --profile"
        remarks = [differs + way_out]
        profile = asked.profile or Profile()
    reading = read_document(tables, profile, asked.given, asked.accept)
    reading.profile, reading.remarks = profile.name, remarks
    return reading


FORMATS: tuple[Format, ...] = (
    Format("trimaran", trimaran_jsonl.recognises, lambda t, a, p: Reading(trimaran_jsonl.read(t, _stated(a), p))),
    Format("wandb", wandb_summary.recognises, _of_log(wandb_summary.read)),
    Format("tensorboard", tensorboard.recognises, _of_log(tensorboard.read)),
    Format("wandb-history", wandb_history.recognises, _of_log(wandb_history.read)),
    Format("torchtitan", torchtitan.recognises, _of_log(torchtitan.read)),
    Format("nanotron", nanotron.recognises, _of_log(nanotron.read)),
    Format("nemo", nemo.recognises, _of_log(nemo.read)),
    Format("olmo-core", olmo_core.recognises, _of_log(olmo_core.read)),
    Format("hugging-face", hugging_face.recognises, _of_log(hugging_face.read)),
    Format("csv", csv_table.recognises, lambda t, a, p: csv_table.read(t, _stated(a), p)),
    Format("markdown", lambda text: bool(markdown.read_tables(text)), _markdown),
    # behind documents, which may quote lines of Megatron's log; its own may hold DeepSpeed's configuration
    Format("megatron", megatron.recognises, _of_log(megatron.read)),
    # its header, when shown, has told a Trainer's log above
    Format("hugging-face", hugging_face.recognises_bare, _of_log(hugging_face.read)),
    Format("composer", composer.recognises, _of_log(composer.read)),
    Format("nanogpt", nanogpt.recognises, _of_log(nanogpt.read)),
    Format("deepspeed", deepspeed.recognises, _of_log(deepspeed.read)),
)

# What a document of a format has where it cannot be read as it stands; logs are read without it.
_SPOILT = {"csv": REPLACED, "markdown": CUT}
# What every file of SQLite begins with.
_DATABASE = "SQLite format 3"


def sources_of(paths: Sequence[Path]) -> dict[Path, str]:
    """What is imported for each path, and how it is called: a folder of TensorBoard's gives all runs that lie in it."""
    named: dict[Path, str] = {}
    for path in paths:
        runs = event_runs(path) if path.is_dir() else []
        name = path.absolute().name  # the folder `.` has one too
        named |= {run: "/".join((name, *run.relative_to(path).parts)) for run in runs} or {path: name}
    return named


def import_file(path: Path, asked: Asked, form: str = "auto", source: str = "") -> Imported:
    """Read a file of any format (`form` names one) into rows; doubtful ones are flagged or repaired as asked.

    Rows tell it as their `source`, by default the file's name without its ending. Raises TrimaranError where the file
    cannot be read, is empty, or is of no known format.
    """
    events = event_files(path)
    text = event_text(events) if events else read_text(path, strict=form in ("csv", "markdown"))
    if events and not text:
        raise TrimaranError(f"{path} holds no scalar of TensorBoard: name the run's own folder, or its log")
    if not text.strip():
        raise TrimaranError(f"{path} is empty: it holds no text, so there is nothing to import")
    if text.startswith(_DATABASE):
        raise TrimaranError(
            f"{path} is a database, no log: `trimaran store INTO.sqlite merge {path}` takes a store's rows"
        )
    chosen = _format(path, text, form)
    if _SPOILT.get(chosen.name, "\0") in text:
        read_text(path, strict=True)  # a table in another encoding is refused, as where it is predicted
    reading = chosen.read(text, asked, path)
    examine([draft for draft in reading.drafts if draft.cells.get("quality") is None], asked.accept)
    ended = next((draft.ended for draft in reversed(reading.drafts) if draft.ended is not None), None)
    proposals = tuple(proposal for draft in reading.drafts for proposal in draft.proposals)
    finished: list[Measurement | str] = []
    reading.drafts.reverse()
    while reading.drafts:  # a draft goes when its row is there: a table may have 100,000 of both
        finished.append(finish(reading.drafts.pop(), source or path.stem))
    return Imported(
        rows=tuple(with_key(row) for row in finished if isinstance(row, Measurement)),
        refused=(*reading.refused, *(row for row in finished if isinstance(row, str))),
        proposals=proposals,
        unread=tuple(sorted(reading.unread)),
        remarks=tuple(reading.remarks),
        format=chosen.name,
        profile=reading.profile or (asked.profile.name if asked.profile else ""),
        ended=ended,
    )


def _format(path: Path, text: str, form: str) -> Format:
    names = ", ".join(dict.fromkeys(known.name for known in FORMATS))
    if form in TOOLS or (form == "auto" and links.recognises(text)):
        raise TrimaranError(f"{path} measures a link, and no run: import it --into a cluster's .toml")
    if form != "auto":
        for known in FORMATS:
            if known.name == form:
                return known
        raise TrimaranError(f"--as {form!r} is not known: it is auto or one of {names}")
    for known in FORMATS:
        if known.recognises(text):
            return known
    raise TrimaranError(
        f"{path} is of no format that is recognised: say which it is by --as ({names}), or write its figures into a "
        f"CSV with the columns of a table"
    )
