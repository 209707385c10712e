"""The collectives that a rank of a trial waited in when it was asked, by PyTorch's flight recorder."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from trimaran.protocol.files import RunFile

_LIMIT_BYTES = 4 << 20
_SHOWN, _SHOWN_CHARACTERS = 3, 400


class _Entry(BaseModel):
    """One collective or send, of version 2.x of the recorder's JSON."""

    model_config = ConfigDict(extra="ignore")
    profiling_name: str
    state: str
    retired: bool
    process_group: tuple[str, ...] = ()
    collective_seq_id: int
    p2p_seq_id: int
    is_p2p: bool
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()

    def text(self) -> str:
        number = self.p2p_seq_id if self.is_p2p else self.collective_seq_id
        tensors = ", ".join(
            f"{dtype} {'x'.join(map(str, size))}"
            for size, dtype in zip(self.input_sizes, self.input_dtypes, strict=False)
        )
        of = f" of {self.process_group[-1]}" if self.process_group else ""
        return f"{self.profiling_name} {number}{of} ({tensors}; {self.state})"


class _Flight(BaseModel):
    model_config = ConfigDict(extra="ignore")
    entries: tuple[_Entry, ...] = ()


def waited_in(out_dir: Path, rank: int) -> str | None:
    """A line on what `rank` waited in, by its file of JSON; None where it left none, or none that can be read."""
    try:
        with RunFile.FLIGHT.of(out_dir, rank).open("rb") as file:
            flight = _Flight.model_validate(json.loads(file.read(_LIMIT_BYTES)))
    except (OSError, ValueError, RecursionError, ValidationError):
        return None
    waiting = [entry.text() for entry in flight.entries if not (entry.retired or entry.state == "completed")]
    if waiting:
        more = f" and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
        return f"rank {rank} waited in {', '.join(waiting[:_SHOWN])[:_SHOWN_CHARACTERS]}{more}"
    return f"rank {rank} waited in nothing that PyTorch's flight recorder records"
