"""A process from which CPU ranks are forked, so that what all of them import is imported once.

Importing takes a second of a core in every rank that is started, and a fork milliseconds. Ranks stay as isolated as
started ones: nothing runs here but imports, and every rank ends as a process of its own.

Asked through a SOCK_SEQPACKET socket, whose other end `trimaran.bench.launch.nursery` holds. A message asks for one
rank, in JSON: its `arguments` and `environment`, its `folder`, what it `settles` with, and in `handed` the names of
variables for descriptors that come along behind those of its stdout and stderr. The answer is its `pid`; `code`
follows when it has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import socket
from collections.abc import Iterator
from typing import Any

from trimaran.protocol.rank_process import settle
from trimaran.train.process.touched_pages import Pages, resident_pages_of_files, touch
from trimaran.train.run import rank

# What a rank imports as it goes; no thread is begun by any of it, which a fork would lose.
MODULES = ("course", "log", "loop", "mesh", "notices", "outcome", "source")

_MESSAGE_BYTES, _DESCRIPTORS = 1 << 17, 8


def serve(descriptor: int) -> int:
    """Fork ranks until the other end is closed. Returns the exit status: its own, or in a rank the rank's."""
    for module in MODULES:
        importlib.import_module(f"trimaran.train.{module}")
    pages, own_pid = resident_pages_of_files(), os.getpid()
    asking, ends = socket.socket(fileno=descriptor), selectors.DefaultSelector()
    ends.register(asking, selectors.EVENT_READ)
    for asked, descriptors in _requests(asking, ends):
        pid = os.fork()
        if pid == 0:
            _let_go(asking, ends)
            return _become_rank(asked, descriptors, own_pid, pages)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # here too: whoever is told the pid may end the group at once
        for received in descriptors:
            os.close(received)
        ends.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        asking.send(json.dumps({"pid": pid}).encode())
    return 0


def _requests(asking: socket.socket, ends: selectors.BaseSelector) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """What is asked for, with the descriptors that came along. Meanwhile ends of ranks are told."""
    while True:
        for key, _ in ends.select():
            if key.fileobj is not asking:
                _tell_end(asking, key.data)
                ends.unregister(key.fileobj)
                os.close(key.fd)
                continue
            message, descriptors, _, _ = socket.recv_fds(asking, _MESSAGE_BYTES, _DESCRIPTORS)
            if not message:
                return
            yield json.loads(message), descriptors


def _let_go(asking: socket.socket, ends: selectors.BaseSelector) -> None:
    """Close in a rank what is not its own."""
    others = [key.fd for key in ends.get_map().values() if key.fileobj is not asking]
    ends.close()
    asking.close()
    for pidfd in others:
        os.close(pidfd)


def _tell_end(asking: socket.socket, pid: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    asking.send(json.dumps({"pid": pid, "code": code}).encode())


def _become_rank(asked: dict[str, Any], descriptors: list[int], parent: int, pages: Pages) -> int:
    os.setpgid(0, 0)
    stdout, stderr, *handed = descriptors
    for given, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(given, standard)
        os.close(given)
    settle(parent, *asked["settles"])
    os.chdir(asked["folder"])
    os.environ.update(asked["environment"])
    os.environ.update(zip(asked["handed"], map(str, handed), strict=True))
    touch(pages)
    return rank.run(asked["arguments"])
