"""Messages between a launcher and the process that forks ranks for it, over a SOCK_SEQPACKET socket."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

MESSAGE_BYTES, DESCRIPTORS = 1 << 17, 8


@dataclass(frozen=True)
class _Message:
    def encoded(self) -> bytes:
        """The message as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, message: bytes) -> Self:
        """The message that `encoded` made."""
        return cls(**json.loads(message))


@dataclass(frozen=True)
class ForkRequest(_Message):
    """Asks for one rank, in `folder` with `arguments`; `settles` is what `rank_process.settle` is given.

    Descriptors come along with it: the rank's stdout and stderr, then one for each name in `handed`, the variables
    that are to tell the rank their numbers.
    """

    settles: list[str]
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    handed: list[str]


@dataclass(frozen=True)
class ForkReport(_Message):
    """A rank's process: `exit_code` is None when it has been forked, and comes when it has ended."""

    pid: int
    exit_code: int | None = None
