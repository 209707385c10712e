"""Recorder: what this rank did when in an iteration, for a timeline."""

from __future__ import annotations

import time

import torch

from trimaran.layout.schedule import Action
from trimaran.nouns.timeline import Event, EventKind, Timeline
from trimaran.train.comm.group import Group


class Recorder:
    """Cuts an iteration into events: each lap reaches from the end of the lap before it to now.

    Outside of `start` and `stop` a lap costs nothing. A lap waits for the device, whose work would otherwise be
    counted where it is waited for and not where it is done.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._events: list[Event] = []
        self._begin: float | None = None
        self._last = 0.0

    def start(self, world: Group) -> None:
        """Begin an iteration together with all ranks of `world`: its time starts when they have met.

        Ranks of one machine read one clock, so that none that comes late from the meeting is early ever after.
        """
        world.meet(self._device)
        begin = time.perf_counter()
        if world.memory is not None:
            begin = min(theirs.item() for theirs in world.all_gather(torch.tensor([begin], dtype=torch.float64)))
        self._begin, self._last = begin, time.perf_counter()

    def lap(self, kind: EventKind, action: Action | None = None) -> None:
        """Record the time since the last lap as an event of this kind."""
        if self._begin is None:
            return
        self.synchronize()
        now = time.perf_counter()
        self._events.append(
            Event(
                rank=self._rank,
                kind=kind,
                start_s=self._last - self._begin,
                end_s=now - self._begin,
                micro_batch=action.micro_batch if action else None,
                stage=action.stage if action else None,
            )
        )
        self._last = now

    def synchronize(self) -> None:
        """Return once the device has done all it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def stop(self) -> Timeline:
        """The events of the iteration."""
        self._begin = None
        return Timeline(events=tuple(self._events), origin="measured")
