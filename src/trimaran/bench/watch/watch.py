"""Seeing a started trial through to its end, whatever that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from trimaran.bench.launch.contract import Launch, Loss, Ranks
from trimaran.bench.launch.held_memory import HeldMemory, resident_gib
from trimaran.bench.watch.limits import Limits
from trimaran.bench.watch.pulse import Pulse, Silence
from trimaran.protocol.files import RunFile

Cause = Literal["exited", "hang", "timeout", "memory", "flood", "lost"]
_LOOK_EVERY_S = 0.05
_LOOK_CLOSER_EVERY_S = 0.5
STACKS_WITHIN_S = 1.0
# Ranks that take so much more memory from one look to the next are at work, whatever signs they give.
_GROWTH_GIB = 4 / 1024


@dataclass(frozen=True)
class Ending:
    """How the processes of a trial ended, as seen from outside.

    `first_failed` are the ranks that had ended badly when that was first noticed; those that
    followed failed because of them or were ended by the watch. `hung` are the ranks that a hang is laid to: those that
    are stopped, or else the one that fell silent first.
    """

    cause: Cause
    sentence: str
    exit_codes: tuple[int | None, ...]
    first_failed: tuple[int, ...]
    steps: int
    silence_s: tuple[float, ...]
    over_memory: bool
    loss: Loss | None = None
    remarks: Mapping[int, str] = field(default_factory=dict)
    hung: tuple[int, ...] = ()


def watch(ranks: Ranks, launch: Launch, limits: Limits, on_step: Callable[[int], None]) -> Ending:
    """Wait until all ranks have ended, or end them when a limit is broken.

    However this function is left, by an exception or Ctrl-C too, no process of the trial is left.
    """
    watcher = _Watch(ranks, launch, limits, on_step)
    hung: tuple[int, ...] = ()
    try:
        cause, sentence = watcher.until_the_end()
        codes = ranks.exit_codes()
        if cause == "hang":
            ranks.ask_for_stacks()
            time.sleep(STACKS_WITHIN_S)
            # of ranks that wait for one that is stopped, any may have been silent first
            stopped = ranks.stopped()
            hung = stopped or ((watcher.silence.rank,) if watcher.silence else ())
            sentence = "; ".join([*(f"rank {rank} is stopped" for rank in stopped), sentence])
        elif watcher.first_failed and None in codes:
            ranks.find_lost()  # ranks fail when they lose others, long before anybody tells of a node
        suspect = cause in ("hang", "lost") or (cause == "exited" and watcher.first_failed)
        loss = ranks.taken_away() if suspect else None
        if loss:
            sentence = f"{loss.sentence}; {sentence}" if cause == "hang" else loss.sentence
            cause = "lost"
        remarks = ranks.remarks()
    finally:
        ranks.kill()
    return Ending(
        cause=cause,
        sentence=sentence,
        exit_codes=codes,
        first_failed=watcher.first_failed,
        steps=watcher.pulse.steps,
        silence_s=watcher.pulse.ages_s(),
        over_memory=ranks.over_memory(),
        loss=loss,
        remarks=remarks,
        hung=hung,
    )


class _Watch:
    def __init__(self, ranks: Ranks, launch: Launch, limits: Limits, on_step: Callable[[int], None]) -> None:
        self._ranks, self._launch, self._limits, self._on_step = ranks, launch, limits, on_step
        self._started = time.monotonic()
        self._failed_at = 0.0
        self._held_gib = 0.0
        self._memory = HeldMemory(ranks.process_ids(), limits.memory_gib)
        self._lost_asked_at = self._started
        self.pulse = Pulse(launch.out_dir, launch.ranks)
        self.first_failed: tuple[int, ...] = ()
        self.silence: Silence | None = None

    def until_the_end(self) -> tuple[Cause, str]:
        closer_look = 0.0
        while True:
            began = time.monotonic()
            codes = self._ranks.exit_codes()
            self._note_failures(codes)
            if None not in codes:
                return "exited", "all ranks ended"
            self._observe()
            now = time.monotonic()
            if self.first_failed:
                # a rank that fails takes its peers with it within moments, or leaves them waiting for ever
                if now - self._failed_at > self._limits.peers_s:
                    return "exited", f"rank {self.first_failed[0]} ended and the others were stopped"
            elif now >= closer_look:
                closer_look = now + _LOOK_CLOSER_EVERY_S
                self._find_lost(codes, now)
                # what fills the memory or the disk is slow too, and that is not the reason to give
                broken = self._broken_resource() or self._broken_limit(codes, now)
                if broken and not (broken[0] == "hang" and self._grows()):
                    return broken
            # of a thousand ranks whose files lie on a network the looks alone would keep its server busy
            time.sleep(max(_LOOK_EVERY_S, time.monotonic() - began))

    def _observe(self) -> None:
        before = self.pulse.steps
        self.pulse.observe()
        if self.pulse.steps > before:
            self._on_step(self.pulse.steps)

    def _note_failures(self, codes: tuple[int | None, ...]) -> None:
        failed = tuple(rank for rank, code in enumerate(codes) if code not in (None, 0))
        if failed and not self.first_failed:
            self.first_failed, self._failed_at = failed, time.monotonic()

    def _grows(self) -> bool:
        before, self._held_gib = self._held_gib, resident_gib(self._ranks.process_ids())
        return self._held_gib > before + _GROWTH_GIB

    def _find_lost(self, codes: tuple[int | None, ...], now: float) -> None:
        """Ask for ranks that went with their nodes as they began, when they may be silent for longer than in a step.

        Before all have given a first sign there may be nobody yet to ask, as while a container is made.
        """
        silent_s = max((age for age, code in zip(self.pulse.ages_s(), codes, strict=True) if code is None), default=0.0)
        if self.pulse.all_begun and min(silent_s, now - self._lost_asked_at) > self._limits.hang_s:
            self._lost_asked_at = now
            self._ranks.find_lost()

    def _broken_limit(self, codes: tuple[int | None, ...], now: float) -> tuple[Cause, str] | None:
        if now - self._started > self._limits.timeout_s:
            return "timeout", f"{self.pulse.steps} steps in {self._limits.timeout_s:g} s, the trial's time limit"
        running = [rank for rank, code in enumerate(codes) if code is None]
        if silence := self.pulse.silent(running, self._limits, self._ranks.stopped):
            self.silence = silence
            return "hang", silence.sentence
        return None

    def _broken_resource(self) -> tuple[Cause, str] | None:
        if loss := self._ranks.taken_away():
            return "lost", loss.sentence
        if shortage := self._memory.shortage(self._ranks.process_ids()):
            return "lost" if shortage.by_others else "memory", shortage.sentence
        for rank in range(self._launch.ranks):
            for log in (kind.of(self._launch.out_dir, rank) for kind in (RunFile.STDOUT, RunFile.STDERR)):
                mib = log.stat().st_size / 2**20 if log.exists() else 0.0
                if mib > self._limits.log_mib:
                    return "flood", f"rank {rank} wrote {mib:.0f} MiB of output, {self._limits.log_mib:.0f} are allowed"
        return None
