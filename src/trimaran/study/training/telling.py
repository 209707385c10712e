"""What a training tells while it runs: lines of its log, and notices as sentences."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimaran.protocol.files import RunFile
from trimaran.protocol.notices import Notice


class Teller:
    """Passes on what the ranks write down from one start to their end, and keeps where they stand.

    `last_step` is the newest step made, those before this start included, `began_at` the one that this start went on
    from, `saved_at` the newest that a checkpoint has (0: none), `held_at` the newest that nodes hold, `stopped_at`
    the step at which they left as they were asked; `first_step_at` and `last_step_at` are when the first and the
    newest step of this start were seen, by the monotonic clock. `on_event` gets checkpoints, slow ranks and bad steps
    as notices, with `lost_s`, the seconds of the steps that they undo.
    """

    def __init__(
        self,
        out_dir: Path,
        on_step: Callable[[dict[str, Any]], None],
        on_notice: Callable[[str], None],
        on_event: Callable[[dict[str, Any]], None] = lambda notice: None,
    ) -> None:
        self._log, self._notices = LogTail(RunFile.LOG.of(out_dir)), LogTail(RunFile.NOTICES.of(out_dir))
        self._on_step, self._on_notice, self._on_event = on_step, on_notice, on_event
        self._step_s: dict[int, float] = {}  # of the steps that no checkpoint has
        self.began_at = self.resumed_at = self.last_step = self.saved_at = self.held_at = 0
        self._held_s = 0.0  # for which snapshots since the last checkpoint stopped the training
        self.stopped_at: int | None = None
        self.first_step_at: float | None = None
        self.last_step_at: float | None = None

    def tell(self) -> None:
        """Pass on what is new."""
        lines, notices = self._log.new_lines(), self._notices.new_lines()
        if notices:
            lines += self._log.new_lines()  # what is told of a step comes behind its line
        for notice in notices:
            self._notice(notice)
        happenings = deque(notices)
        for line in lines:
            # a resumed training's log begins with the lines of the earlier one
            if self.first_step_at is None and line["iteration"] <= self.resumed_at:
                continue
            if line["iteration"] <= self.last_step:
                self._go_back(happenings)
            self.last_step_at = time.monotonic()
            self.first_step_at = self.first_step_at or self.last_step_at
            self.last_step = line["iteration"]
            self._step_s[self.last_step] = line["sec_per_it"]
            self._on_step(line)
        for notice in happenings:
            self._happening(notice)

    def _go_back(self, happenings: deque[dict[str, Any]]) -> None:
        """Pass on what happened until the training went back, before steps that are made again are counted."""
        while happenings:
            notice = happenings.popleft()
            self._happening(notice)
            if notice.get("back_to") is not None:
                return

    def lost_s(self, saved_step: int) -> float:
        """Seconds of the steps of this start behind `saved_step`."""
        return sum(seconds for step, seconds in self._step_s.items() if step > saved_step)

    @property
    def made_steps(self) -> bool:
        """Whether the ranks have made a step since they were started."""
        return self.last_step > self.resumed_at

    def _notice(self, notice: dict[str, Any]) -> None:
        kind, step = notice["kind"], notice.get("step")
        if kind == Notice.RESUMED:
            self.began_at = self.resumed_at = self.last_step = self.saved_at = notice["step"]
            self._on_notice(f"going on from step {step} of {notice['path']}, written on {notice['layout']}")
            for sentence in notice["changed"]:
                self._on_notice(f"  from here on {sentence}")
        elif kind == Notice.SAVED:
            self.saved_at = notice["step"]
            self._on_notice(
                f"checkpoint of step {step} is written: the step waited {notice['blocked_s']:.3f} s, "
                f"writing took {notice['write_s']:.2f} s"
            )
        elif kind == Notice.HELD:
            if not self.held_at:
                gib = ", ".join(f"{node} {size:.3g} GiB" for node, size in notice["gib"].items())
                self._on_notice(
                    f"snapshot of step {step} is held in memory, by each node its own part and that of the node before "
                    f"it ({gib}): the step waited {notice['blocked_s']:.3f} s, sending took {notice['held_s']:.2f} s; "
                    f"later ones take its place"
                )
            self.held_at = notice["step"]
        elif kind == Notice.STOPPED:
            self.stopped_at = step
        elif kind not in (Notice.SLOW, Notice.BAD_LOSS):
            self._on_notice(notice["text"])

    def _happening(self, notice: dict[str, Any]) -> None:
        """Pass on what is an event, with what it undoes."""
        kind, back_to = notice["kind"], notice.get("back_to")
        if kind == Notice.SAVED:
            self._step_s = {step: seconds for step, seconds in self._step_s.items() if step > notice["step"]}
            notice["blocked_s"] += self._held_s
            self._held_s = 0.0
        elif kind == Notice.HELD:
            self._held_s += notice["blocked_s"]
        if back_to is not None:
            notice["lost_s"] = self.lost_s(back_to)
            self._step_s.clear()
            self.held_at = 0
            self.resumed_at, self.last_step = min(self.resumed_at, back_to), back_to
        if kind in (Notice.SAVED, Notice.NOT_SAVED, Notice.SLOW, Notice.BAD_LOSS):
            self._on_event(notice)


class LogTail:
    """Lines of a JSON-lines file that were not read before; an unfinished last line waits."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new_lines(self) -> list[dict[str, Any]]:
        """Whole lines since the last call, parsed."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            block = file.read()
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]
