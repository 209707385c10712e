"""The store: measurements in one SQLite file, safe against kill -9 and against two sweeps at once."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from trimaran.files.user_file import regular_file
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.store.claims import Claims
from trimaran.store.digest import as_earlier, digest_of
from trimaran.store.filter import Condition
from trimaran.store.owner import Owner
from trimaran.store.remedy import remedy
from trimaran.store.schema import APPLICATION_ID, VERSION, migrate, version_of
from trimaran.store.shared_rows import SharedRows, copied, is_shared, made_after, place
from trimaran.store.sql_row import FIELDS, from_cells, quoted, to_cells

BUSY_TIMEOUT_S = 60.0
_STEP_TIMES = FIELDS.index("step_times_s")
_INSERT = (
    f"INSERT INTO measurement (attempt, {', '.join(map(quoted, FIELDS))}) VALUES (?, {', '.join('?' * len(FIELDS))})"
)
# What would run, or show other rows, in a store that somebody else has changed.
_FOREIGN = "SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'view') LIMIT 1"
# A file of such a name is expected to be text, or another format.
_TABLES = (".csv", ".tsv", ".md", ".json", ".toml", ".txt", ".log", ".parquet")


@dataclass(frozen=True)
class Run:
    """A stored measurement: its number in the store, and which attempt at its trial it was."""

    number: int
    attempt: int
    measurement: Measurement


class Store:
    """Measurements and the claims of running trials.

    Every write is one transaction, durable when the call returns. Errors of the file or the
    disk are TrimaranErrors of one line that name the file; what was stored before stays.

    On a file system that hosts share, the database is this process's alone, in memory: rows lie in files beside, each
    of one process (`shared_rows`), and are merged as they come.
    """

    _connection: sqlite3.Connection

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        """Open the file at `path`, making it (and its folder) unless `create` is false."""
        self.path = Path(path)
        self._claims = Claims(self.path.with_name(f"{self.path.name}.claims"))
        if not create and not self.path.exists():
            raise TrimaranError(f"store {self.path} does not exist: name the file that bench or tune wrote")
        if not create and self.path.is_file() and self.path.stat().st_size == 0:
            raise TrimaranError(f"store {self.path} is empty (0 bytes): name the file that bench or tune wrote")
        if self.path.suffix.lower() in _TABLES and not self.path.exists():
            raise TrimaranError(
                f"store {self.path} would be a database under the name of a table: name it {self.path.stem}.sqlite"
            )
        if self.path.exists():
            regular_file(self.path, f"store {self.path}", None)
            # not by opening it: closing it again would end the locks that another connection of this process holds
            if not os.access(self.path, os.R_OK):
                raise TrimaranError(f"store {self.path} cannot be read: check its permissions")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrimaranError(f"store {self.path}: its folder cannot be made ({error.strerror})") from None
        rows = self.path.with_name(f"{self.path.name}.rows")
        self._shared = SharedRows(rows) if rows.is_dir() or is_shared(self.path.parent) else None
        if self._shared:
            self._open_shared()
            return
        try:
            self._open(str(self.path))
        except TrimaranError:
            writable = os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
            log = self.path.with_name(f"{self.path.name}-wal")
            if create or writable or not self.path.is_file() or (log.exists() and log.stat().st_size):
                raise
            # a store in its write-ahead mode opens only where it may be written, unless it is declared never to change
            self._open(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1")

    def _open_shared(self) -> None:
        """A database in memory, of what the file holds, which nobody writes any more, and of all files of rows."""
        try:
            if not self.path.exists():
                self._open(":memory:")
                place(self.path, self._connection.serialize())
                self._connection.close()
            with tempfile.TemporaryDirectory() as folder:
                self._open(str(copied(self.path, Path(folder))))
                memory = sqlite3.connect(":memory:", isolation_level=None)
                self._connection.backup(memory)
                self._connection.close()
        except OSError as error:
            raise TrimaranError(f"store {self.path} cannot be opened ({error.strerror}): check its folder") from None
        self._connection = memory
        self._connection.row_factory = sqlite3.Row
        self._merge()

    def _merge(self) -> None:
        """Take in what other processes have stored since."""
        if self._shared and (rows := self._shared.new()):
            with self._writing():
                for row in rows:
                    self._insert(row, by_time=True)

    def _open(self, name: str) -> None:
        read_only = name.startswith("file:///")
        with self._explained():
            self._connection = sqlite3.connect(name, timeout=BUSY_TIMEOUT_S, isolation_level=None, uri=read_only)
        self._connection.row_factory = sqlite3.Row
        try:
            with self._explained():
                self._prepare(read_only=read_only)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and give claims back."""
        self._claims.close()
        if self._shared:
            self._shared.close()
        self._connection.close()

    def require_writable(self) -> None:
        """Raise TrimaranError where no row can be stored: asked ahead of what takes long to measure one."""
        if self._shared:
            self._shared.require_writable()
            return
        with self._writing():
            # SQLite begins a transaction of a file that may only be read, and refuses its first change
            self._connection.execute("DELETE FROM measurement WHERE FALSE")

    def add(self, measurement: Measurement) -> None:
        """Store one run. A trial that was run before gets a further attempt; its claim ends."""
        if self._shared:
            before = self.trial(measurement.trial_key) if measurement.trial_key else None
            self._shared.add([made_after(before, measurement)])
            self._merge()
        else:
            with self._writing():
                self._insert(measurement)
        if measurement.trial_key:
            self._claims.release(measurement.trial_key)

    def add_new(self, measurements: Iterable[Measurement]) -> int:
        """Store the runs that are not there yet, all or none; how many they were. A claim stays.

        A run is there, too, where it was stored before rows kept their whole layout and model. Of a trial that was run
        here as well, the run that was made last is its last attempt, whenever it was stored; one that does not say
        when it was made is taken for older than those that do, and among such the one of more steps for the last: a
        log that was imported again when it had grown.
        """
        return self.add_new_of([measurements])[0]

    def add_new_of(self, sources: Iterable[Iterable[Measurement]]) -> list[int]:
        """As `add_new`, from several sources that may be read while rows are stored: all or none, how many of each."""
        added, rows = [], []
        self._merge()
        with self._writing():
            stored = self._connection.execute(f"SELECT {', '.join(map(quoted, FIELDS))} FROM measurement")
            known = {digest_of(tuple(row)) for row in stored}
            for measurements in sources:
                before = len(known)
                for measurement in measurements:
                    cells = to_cells(measurement)
                    digest = digest_of(cells)
                    if digest in known or any(digest_of(kept) in known for kept in as_earlier(measurement, cells)):
                        continue
                    known.add(digest)
                    if self._shared:
                        rows.append(measurement)
                    else:
                        self._insert(measurement, cells, by_time=True)
                added.append(len(known) - before)
        if self._shared:
            self._shared.add(rows)
            self._merge()
        return added

    def each(self, *, recipe: str | None = None, every_attempt: bool = False) -> Iterator[Run]:
        """As `runs`, one by one: a store may have more rows than one wants to hold."""
        conditions, values = [], []
        if recipe is not None:
            conditions.append("recipe = ?")
            values.append(recipe)
        if not every_attempt:
            conditions.append(
                "NOT EXISTS (SELECT 1 FROM measurement later WHERE later.trial_key = measurement.trial_key "
                "AND later.attempt > measurement.attempt)"
            )
        self._merge()
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        with self._explained():
            for row in self._connection.execute(f"SELECT * FROM measurement {where} ORDER BY id", values):
                yield Run(row["id"], row["attempt"], from_cells(row))

    def chosen(self, conditions: Sequence[Condition] = (), *, every_attempt: bool = False) -> Chosen:
        """The runs that meet all conditions, read anew by every loop over them."""
        return Chosen(self, tuple(conditions), every_attempt)

    def showing(self, rows: Iterable[Measurement]) -> list[Measurement]:
        """The stored runs with the losses of one of `rows`, or with its times where it has no losses."""
        self._merge()
        alike = {("losses", row.losses) if row.losses else ("step_times_s", row.step_times_s) for row in rows}
        with self._explained():
            return [
                from_cells(found)
                for name, figures in sorted(alike)
                if figures
                for found in self._connection.execute(
                    f"SELECT * FROM measurement WHERE {name} = ? ORDER BY id", (json.dumps(figures),)
                )
            ]

    def keys(self) -> frozenset[str]:
        """The keys of all trials that are stored."""
        self._merge()
        with self._explained():
            found = self._connection.execute("SELECT DISTINCT trial_key FROM measurement WHERE trial_key IS NOT NULL")
            return frozenset(key for (key,) in found)

    def count(self) -> int:
        """How many runs are stored, every attempt counted."""
        self._merge()
        with self._explained():
            return int(self._connection.execute("SELECT COUNT(*) FROM measurement").fetchone()[0])

    def measurements(self, *, recipe: str | None = None, every_attempt: bool = False) -> list[Measurement]:
        """All runs in the order they were stored; of a trial run again only the last, unless asked."""
        return [run.measurement for run in self.runs(recipe=recipe, every_attempt=every_attempt)]

    def runs(self, *, recipe: str | None = None, every_attempt: bool = False) -> list[Run]:
        """As `measurements`, each with its number in this store."""
        return list(self.each(recipe=recipe, every_attempt=every_attempt))

    def run(self, number: int) -> Run:
        """One run by its number. Raises TrimaranError where there is none."""
        self._merge()
        with self._explained():
            row = self._connection.execute("SELECT * FROM measurement WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise TrimaranError(
                f"store {self.path} has no run {number}: `trimaran store {self.path} list` numbers them"
            )
        return Run(row["id"], row["attempt"], from_cells(row))

    def trial(self, key: str) -> Measurement | None:
        """The last run of a trial, or None where it was never finished."""
        self._merge()
        with self._explained():
            row = self._connection.execute(
                "SELECT * FROM measurement WHERE trial_key = ? ORDER BY attempt DESC LIMIT 1", (key,)
            ).fetchone()
        return None if row is None else from_cells(row)

    def attempts(self, key: str) -> int:
        """How many runs of a trial are stored."""
        self._merge()
        with self._explained():
            return self._attempts(key)

    def claim(self, key: str, *, attempts_seen: int = 0) -> bool:
        """Claim a trial before running it, so that no other sweep runs it meanwhile.

        False where a living process holds it, or where a run beyond `attempts_seen` was stored since the caller
        looked. The claim of a dead process is taken over. Where the holder cannot be looked up (another machine,
        another container), it has lapsed once its heartbeat has not changed for `LOST_AFTER_S`; that takes as many
        seconds of asking. `add` ends a claim.
        """
        if not self._claims.take(key):
            return False
        if self.attempts(key) > attempts_seen:
            self._claims.release(key)
            return False
        return True

    def holds(self, key: str) -> bool:
        """Whether this process still holds its claim: one that was stopped for long may have lost it."""
        return self._claims.holds(key)

    def holder(self, key: str) -> Owner | None:
        """Who holds the claim of a trial; None where nobody does."""
        return self._claims.holder(key)

    def release(self, key: str) -> None:
        """Give a claim of this process back without a row, as after Ctrl-C."""
        self._claims.release(key)

    def _insert(
        self, measurement: Measurement, cells: Sequence[object] | None = None, *, by_time: bool = False
    ) -> None:
        """Store a run as its trial's last attempt or, `by_time`, ahead of those that were made later."""
        attempt, key = 1, measurement.trial_key
        if key:
            later = self._first_after(key, measurement) if by_time else None
            attempt = self._attempts(key) + 1 if later is None else later
            if later is not None:
                # through negative numbers, since SQLite holds the pair unique while it changes row after row
                for change in ("attempt = -attempt - 1 WHERE attempt >= ?", "attempt = -attempt WHERE attempt < -?"):
                    self._connection.execute(f"UPDATE measurement SET {change} AND trial_key = ?", (later, key))
        self._connection.execute(_INSERT, [attempt, *(cells or to_cells(measurement))])

    def _first_after(self, key: str, measurement: Measurement) -> int | None:
        """The first attempt at a trial that was made after a run, None where none was."""
        moment = measurement.created_at or ""
        # times that begin alike are longer as text where they are more
        times = len(str(to_cells(measurement)[_STEP_TIMES])) if not moment else math.inf
        row = self._connection.execute(
            "SELECT MIN(attempt) FROM measurement WHERE trial_key = ? AND (COALESCE(created_at, '') > ? "
            "OR (created_at IS NULL AND LENGTH(step_times_s) > ?))",
            (key, moment, times),
        ).fetchone()
        return None if row[0] is None else int(row[0])

    def _attempts(self, key: str) -> int:
        row = self._connection.execute("SELECT MAX(attempt) FROM measurement WHERE trial_key = ?", (key,)).fetchone()
        return int(row[0] or 0)

    def _prepare(self, *, read_only: bool) -> None:
        # functions that a foreign file's views or triggers name must not run
        self._connection.execute("PRAGMA trusted_schema = OFF")
        application, version, tables = self._identity()
        if foreign := self._connection.execute(_FOREIGN).fetchone():
            raise TrimaranError(
                f"store {self.path} has a {foreign[0]} {foreign[1]!r}, and Trimaran makes none: it is not a store that "
                f"Trimaran wrote; take its rows over with `DROP {foreign[0].upper()}`, or name another file"
            )
        if application != APPLICATION_ID and tables:
            raise TrimaranError(f"store {self.path} is a database of another program: name another file")
        if version > VERSION:
            raise TrimaranError(
                f"store {self.path} has schema version {version}, this Trimaran reads up to {VERSION}: upgrade Trimaran"
            )
        self._connection.execute("PRAGMA synchronous = FULL")
        if version < VERSION and not read_only:
            self._use_write_ahead_log()
            with self._transaction():
                migrate(self._connection)

    def _identity(self) -> tuple[int, int, int]:
        """Application id, schema version and number of tables, all of one moment."""
        self._connection.execute("BEGIN")
        try:
            tables = self._connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
            application = self._connection.execute("PRAGMA application_id").fetchone()[0]
            return application, version_of(self._connection), tables
        finally:
            self._connection.execute("COMMIT")

    def _use_write_ahead_log(self) -> None:
        # two processes that open a new file at once may meet here, where SQLite does not wait by itself
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._explained(), self._transaction():
            yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's errors as one line that says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            raise TrimaranError(f"store {self.path}: {remedy(self.path, error, BUSY_TIMEOUT_S)}") from None


@dataclass(frozen=True)
class Chosen:
    """Runs of an open store that meet conditions. A loop reads them one by one, and the next loop reads them anew."""

    store: Store
    conditions: tuple[Condition, ...]
    every_attempt: bool

    def __iter__(self) -> Iterator[Run]:
        for run in self.store.each(every_attempt=self.every_attempt):
            if all(condition(run.measurement) for condition in self.conditions):
                yield run

    @property
    def measurements(self) -> ChosenMeasurements:
        """Their measurements alone."""
        return ChosenMeasurements(self)


@dataclass(frozen=True)
class ChosenMeasurements:
    """The measurements of runs that are read anew by every loop."""

    runs: Chosen

    def __iter__(self) -> Iterator[Measurement]:
        return (run.measurement for run in self.runs)
