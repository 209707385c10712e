"""A TCP port on the loopback that no other process can be given while a trial uses it."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class HeldPort:
    """A port that the kernel picked, held by a bound socket for as long as this object is open.

    The socket is bound with SO_REUSEADDR and never listens itself: the kernel then gives its
    port to nobody who asks for any free one, while rank 0 of the trial, which asks for this one
    with SO_REUSEADDR too, can listen on it. `fileno` may be handed to rank 0 instead, which
    then listens on the loopback alone.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """The bound socket's file descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()
