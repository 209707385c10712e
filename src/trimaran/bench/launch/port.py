"""A TCP port that no other process can be given while a trial uses it."""

from __future__ import annotations

import errno
import socket

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.environment import LOOPBACK, LOOPBACK_INTERFACE

# Ranks that may wait for rank 0; the kernel holds more to its limit.
_QUEUE = 1024


class HeldPort:
    """A port that the kernel picked, held by a listening socket for as long as this object is open.

    `fileno` is handed to rank 0 of the trial, which accepts on it. Ranks that come before rank 0 wait in the socket's
    queue; where it did not listen yet they would be refused, and try again only after half a second.
    """

    def __init__(self, address: str = LOOPBACK) -> None:
        """Take a port of `address`, which is one of this machine's. Raises OSError where it is not."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self._socket.listen(_QUEUE)
        self.number: int = self._socket.getsockname()[1]

    def fileno(self) -> int:
        """The bound socket's file descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def loopback_port() -> HeldPort:
    """A port of the loopback, where ranks of one machine meet.

    Raises TrimaranError where nothing is reached there, as in a container without a network: ranks would try for ever,
    and a trial would be a hang that is laid to its layout.
    """
    try:
        port = HeldPort()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((LOOPBACK, port.number))  # sends nothing, and asks the kernel for the way
    except OSError as error:
        if error.errno not in (errno.ENETUNREACH, errno.EADDRNOTAVAIL):
            raise
        raise TrimaranError(
            f"ranks of one machine meet at {LOOPBACK}, which is not reached here ({error.strerror}): have "
            f"`ip -4 address show {LOOPBACK_INTERFACE}` show it, by `ip link set {LOOPBACK_INTERFACE} up` as root"
        ) from None
    return port
