"""Documents: the rows of Markdown tables, with what the text, a profile and the user state about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimaran.nouns.columns import BY_NAME, FIGURES, Cell, parse_cell
from trimaran.nouns.spoken.printed import says_nothing
from trimaran.store.importers.calculators import layers_by_flops, resolve_family
from trimaran.store.importers.cells import (
    names_degrees,
    read_count,
    read_date,
    read_degrees,
    read_figure,
    read_layout,
    read_network,
    read_tokens,
)
from trimaran.store.importers.draft import Accept, Draft
from trimaran.store.importers.headings import NETWORK, SIZE, WORDS, column_of, unit_of
from trimaran.store.importers.logs.megatron import times_by_tflops
from trimaran.store.importers.markdown import PrintedTable
from trimaran.store.importers.profile import Profile, TableProfile, filled_in, typed_cells
from trimaran.store.importers.statements import Stated, read_statements, stated_gbs

MAX_CELL = 1000


@dataclass
class Reading:
    """What came of a file: drafts, rows that cannot be read, headings that were not read, remarks on the whole."""

    drafts: list[Draft] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)
    profile: str = ""


def read_document(
    tables: Sequence[PrintedTable], profile: Profile, given: Mapping[str, Cell], accept: Accept
) -> Reading:
    """Every row of every table. `given` are the user's own statements, which win over the profile's."""
    reading = Reading()
    for table in tables:
        _Table(table, profile, given, accept, reading).read()
    return reading


class _Table:
    """One table on its way into drafts."""

    def __init__(
        self, table: PrintedTable, profile: Profile, given: Mapping[str, Cell], accept: Accept, reading: Reading
    ) -> None:
        self._table, self._profile, self._given, self._accept, self._reading = table, profile, given, accept, reading
        self._stated = profile.tables(table.number)
        self._columns = [self._column(heading) for heading in table.header]
        self._text = self._statements()
        self._times = times_by_tflops(table.code)

    def read(self) -> None:
        """Add the table's rows to the reading."""
        layouts = [read_layout(heading) for heading in self._table.header[1:]]
        wide = self._columns[:1] in (["mbs"], [NETWORK]) and layouts and all(cells is not None for cells in layouts)
        if not wide:
            pairs = zip(self._table.header, self._columns, strict=True)
            self._reading.unread |= {
                heading for heading, column in pairs if column is None and not names_degrees(heading)
            }
        for number, cells in enumerate(self._table.rows, start=1):
            where = f"T{self._table.number} row {number}"
            if len(cells) != len(self._table.header):
                self._refuse(where, f"it has {len(cells)} cells, the header {len(self._table.header)}")
            elif any(len(cell) > MAX_CELL for cell in cells):
                self._refuse(where, f"a cell has more than {MAX_CELL} characters")
            elif wide:
                self._wide_row(number, cells, [layout or {} for layout in layouts])
            else:
                self._row(number, cells)

    def _refuse(self, where: str, reason: str) -> None:
        self._reading.refused.append(f"{where}: {reason}")

    def _column(self, heading: str) -> str | None:
        for stated in (*self._stated, self._profile):
            if heading in stated.columns:
                return stated.columns[heading] or ""
        return column_of(heading)

    def _word(self, heading: str, column: str, text: str) -> str:
        for stated in (*self._stated, self._profile):
            if text in stated.words.get(heading, {}):
                return stated.words[heading][text]
        return WORDS.get(column, {}).get(text.lower(), text)

    def _statements(self) -> Stated:
        """What the text above says, the nearest last."""
        return read_statements((*self._table.preamble, *self._table.headings, *self._table.section_text))

    def _draft(self, row: str) -> Draft:
        section = " > ".join(self._table.headings)
        return Draft(f"T{self._table.number}", row, section, stated_gbs=stated_gbs(self._table.text))

    def _row(self, number: int, cells: Sequence[str]) -> None:
        draft = self._draft(str(number))
        size, tokens, endings = "", "", []
        shifted = self._shifted(draft, cells)
        for heading, column, printed in zip(self._table.header, self._columns, cells, strict=True):
            text = self._word(heading, column or "", printed)
            if column == SIZE:
                size = text
            elif column == NETWORK:
                draft.cells |= read_network(text)
            elif column in FIGURES:
                endings += [] if shifted else [self._measured(draft, column, text, unit_of(heading))]
            elif column == "notes":
                self._notes(draft, text, heading)
            elif column == "gbs" and unit_of(heading).lower() == "tokens":
                tokens = text
            elif not self._told(draft, heading, column, text):
                return
        self._close(draft, size, endings, " ".join(cells), tokens)

    def _shifted(self, draft: Draft, cells: Sequence[str]) -> bool:
        """Whether the figures stand one column too far right, as a memory figure under Sec/it tells."""
        figures = {c: read_figure(c, text) for c, text in zip(self._columns, cells, strict=True) if c in FIGURES}
        alien = next((column for column, figure in figures.items() if figure.alien), None)
        if alien is None:
            return False
        draft.cells |= {column: figure.value for column, figure in figures.items() if not figure.alien}
        draft.cells["status"] = "not_run"
        left: dict[str, Cell] = {
            column: read_figure(column, text).value
            for column, text in zip(self._columns, cells[1:], strict=False)
            if column in FIGURES
        }
        sentence = f"{cells[self._columns.index(alien)]!r} under {alien}: the figures are shifted to the right"
        if all(value is not None for value in left.values()):
            draft.propose("misplaced", sentence, {**left, "status": "ok"}, self._accept)
        else:
            draft.doubt("misplaced", sentence)
        return True

    def _wide_row(self, number: int, cells: Sequence[str], layouts: Sequence[Mapping[str, int]]) -> None:
        """A row whose every cell but the first is a measurement of the layout in its heading."""
        for heading, text, layout in zip(self._table.header[1:], cells[1:], layouts, strict=True):
            draft = self._draft(f"{number}:{heading}")
            if self._columns[0] == NETWORK:
                draft.cells |= read_network(cells[0])
            elif not self._stated_cell(draft, "mbs", cells[0]):
                return
            draft.cells |= layout
            self._close(draft, "", [self._measured(draft, "sec_per_it", text)], text)

    def _told(self, draft: Draft, heading: str, column: str | None, text: str) -> bool:
        """Fill what a cell says of what was run, if it says anything; a cell that cannot be read refuses its row."""
        if says_nothing(text, none_is_a_word=True):
            return True
        return self._stated_cell(draft, column, text) if column else self._degrees(draft, heading, text)

    def _stated_cell(self, draft: Draft, column: str, text: str) -> bool:
        """Fill a cell that says what was run; a cell that cannot be read refuses its row."""
        count = read_count(text)
        try:
            value = parse_cell(BY_NAME[column], count.value)
        except ValueError as error:
            self._refuse(draft.name, str(error))
            return False
        draft.cells[column] = value
        if count.variant:
            draft.cells["variant"] = ";".join(count.variant)
        draft.notes += count.notes
        return True

    def _degrees(self, draft: Draft, heading: str, text: str) -> bool:
        """Fill the degrees of a cell whose heading names several; one that has not as many refuses its row."""
        try:
            draft.cells |= read_degrees(heading, text)
        except ValueError as error:
            self._refuse(draft.name, str(error))
            return False
        return True

    def _batch_of_tokens(self, draft: Draft, text: str) -> bool:
        """Fill the global batch that is printed in tokens; one that is no whole number of sequences refuses its row."""
        seq_len = draft.count("seq_len")
        sequences = read_tokens(text, seq_len) if seq_len else None
        if sequences is None:
            self._refuse(
                draft.name, f"gbs is {text!r} tokens, and seq_len {seq_len} makes no whole number of it: state gbs"
            )
            return False
        draft.cells["gbs"] = sequences
        draft.notes.append(f"gbs of {text} tokens")
        return True

    def _measured(self, draft: Draft, column: str, text: str, unit: str = "") -> str | None:
        """Fill a measured cell; what it says about how the run ended."""
        figure = read_figure(column, text, unit)
        if figure.value is not None:
            draft.cells[column] = figure.value
        if figure.note:
            draft.notes.append(figure.note)
        if figure.estimate:
            draft.doubt("estimate", f"{column} is marked ^: an estimate, not measured")
        if figure.doubted:
            draft.doubt("suspect", f"{column} is marked ?? by its authors: not understood")
        if figure.status == "unreadable":
            draft.doubt("ambiguous", f"{column} cannot be read")
            return None
        return figure.status

    def _notes(self, draft: Draft, text: str, heading: str) -> None:
        date, rest = read_date(text, self._profile.year)
        if date is not None:
            draft.cells["date"] = date
        if rest not in ("", "-"):
            draft.notes.append(f"printed note: {rest}" if heading.lower().startswith("note") else f"{heading} {rest}")

    def _close(self, draft: Draft, size: str, endings: Sequence[str | None], printed: str, tokens: str = "") -> None:
        """Everything that is stated elsewhere, the nearest to the row first; a batch in `tokens` needs it."""
        number = self._table.number
        for stated_row in self._profile.rows(number, draft.row):
            draft.cells |= typed_cells(stated_row.set)
            draft.notes.append(f"stated by profile {self._profile.name}: {stated_row.why}")
        draft.fill(self._given)
        for stated in self._stated:
            draft.fill(typed_cells(stated.sizes.get(size, {})))
            draft.fill(typed_cells(stated.set))
        draft.fill(self._text.by_size.get(size, {}))
        draft.fill(typed_cells(self._profile.sizes.get(size, {})))
        draft.fill(self._text.cells)
        draft.fill(typed_cells(self._profile.set))
        if self._profile.name:
            draft.notes.append(f"what is not printed is stated by profile {self._profile.name}")
        if tokens and not self._batch_of_tokens(draft, tokens):
            return
        _derive(draft, self._stated)
        if "sec_per_it" not in self._columns:
            _time_from_log(draft, self._times)
        if any(stated.infer_layers for stated in self._stated):
            _infer_layers(draft)
        draft.cells["status"] = draft.cells.get("status") or _status(draft, endings, printed)
        group = draft.cells.get("comparable_group")
        if isinstance(group, str):
            not_run = draft.cells["status"] == "not_run"
            draft.cells["comparable_group"] = None if not_run else filled_in(group, draft.cells)
        if draft.cells.get("pp") == 1:
            draft.cells["schedule"] = "none"
        self._reading.drafts.append(draft)


def _derive(draft: Draft, stated: Sequence[TableProfile]) -> None:
    """Nodes, devices, DP and global batch, where the others give them."""
    draft.derive()
    per_replica, dp = next((table.gbs_per_dp for table in stated if table.gbs_per_dp), None), draft.count("dp")
    draft.fill({"gbs": per_replica * dp if per_replica and dp else None})
    resolve_family(draft)


def _time_from_log(draft: Draft, times: Mapping[float, float]) -> None:
    """The time of the log line above the table that prints the row's TFLOPs."""
    tflops = draft.number("tflops")
    seconds = times.get(tflops) if tflops is not None else None
    if seconds is not None and draft.cells.get("sec_per_it") is None:
        draft.cells["sec_per_it"] = seconds
        draft.notes.append(f"sec_per_it from the log line above the table that prints {tflops:g} TFLOPs")


def _infer_layers(draft: Draft) -> None:
    layers = layers_by_flops(draft)
    if layers is None or draft.cells.get("layers") is not None:
        return
    draft.cells["layers"] = round(layers)
    draft.notes.append(f"layers inferred from TFLOPs and Sec/it by {draft.cells['flops_formula']} ({layers:.2f})")
    if abs(layers - round(layers)) > 0.25:
        draft.doubt("ambiguous", "the inferred layers are no whole number")


def _status(draft: Draft, endings: Sequence[str | None], printed: str) -> str:
    """How the run ended, by its measured cells; a failed one whose row speaks of hanging hung."""
    for ended in ("oom", "hang"):
        if ended in endings:
            return ended
    if "fail" in endings:
        return "hang" if "hangs" in printed.lower() else "fail"
    measured = any(draft.cells.get(name) is not None for name in FIGURES)
    return "ok" if measured else "not_run"
