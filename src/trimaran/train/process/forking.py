"""A process from which CPU ranks are forked, so that what all of them import is imported once.

Importing takes a second of a core in every rank that is started, and a fork milliseconds. Ranks stay as isolated as
started ones: nothing runs here but imports, and every rank ends as a process of its own.

Asked through a socket, whose other end `trimaran.protocol.nursery` holds, in messages of
`trimaran.protocol.forks`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from trimaran.protocol.forks import DESCRIPTORS, MESSAGE_BYTES, ForkReport, ForkRequest
from trimaran.protocol.rank_process import settle
from trimaran.train.process.touched_pages import Pages, resident_pages_of_files, touch

# What a rank does with its arguments; it returns the exit status.
Run = Callable[[list[str]], int]


def serve(descriptor: int, run: Run, import_for: Callable[[Path], None] | None = None) -> int:
    """Fork ranks until the other end is closed. Returns the exit status: its own, or in a rank the rank's.

    What all ranks need is to be imported before, and what the first of them needs besides by `import_for`, which is
    given its job's file; no thread may be begun by any of it, which a fork would lose.
    """
    parent, pages = os.getpid(), None
    asking, ends = socket.socket(fileno=descriptor), selectors.DefaultSelector()
    ends.register(asking, selectors.EVENT_READ)
    for request, descriptors in _requests(asking, ends):
        if pages is None:
            if import_for is not None and request.arguments:
                import_for(Path(request.folder, request.arguments[0]))
            pages = resident_pages_of_files()
        pid = os.fork()
        if pid == 0:
            _let_go(asking, ends)
            return _become_rank(run, request, descriptors, parent, pages)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # here too: whoever is told the pid may end the group at once
        for received in descriptors:
            os.close(received)
        ends.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        asking.send(ForkReport(pid).encoded())
    return 0


def _requests(asking: socket.socket, ends: selectors.BaseSelector) -> Iterator[tuple[ForkRequest, list[int]]]:
    """What is asked for, with the descriptors that came along. Meanwhile ends of ranks are told."""
    while True:
        for key, _ in ends.select():
            if key.fileobj is not asking:
                _tell_end(asking, key.data)
                ends.unregister(key.fileobj)
                os.close(key.fd)
                continue
            message, descriptors, _, _ = socket.recv_fds(asking, MESSAGE_BYTES, DESCRIPTORS)
            if not message:
                return
            yield ForkRequest.decoded(message), descriptors


def _let_go(asking: socket.socket, ends: selectors.BaseSelector) -> None:
    """Close in a rank the sockets of the process that it was forked from."""
    others = [key.fd for key in ends.get_map().values() if key.fileobj is not asking]
    ends.close()
    asking.close()
    for pidfd in others:
        os.close(pidfd)


def _tell_end(asking: socket.socket, pid: int) -> None:
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    asking.send(ForkReport(pid, exit_code).encoded())


def _become_rank(run: Run, request: ForkRequest, descriptors: list[int], parent: int, pages: Pages) -> int:
    os.setpgid(0, 0)
    stdout, stderr, *handed = descriptors
    for given, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(given, standard)
        os.close(given)
    cores, cgroup, data_bytes = request.settles
    settle(parent, cores, cgroup, data_bytes)
    os.chdir(request.folder)
    os.environ.update(request.environment)
    os.environ.update(zip(request.handed, map(str, handed), strict=True))
    touch(pages)
    return run(request.arguments)
