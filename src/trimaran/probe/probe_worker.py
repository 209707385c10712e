"""One rank of a probe: `python -m trimaran.probe.probe_worker SETTINGS.json`, started once per rank.

`--nursery FD` starts a process instead from which the ranks of a probe on CPUs are forked
(`trimaran.train.process.forking`).
Ranks meet through the file `rendezvous` beside the settings; rank 0 leaves `result.json` there.
Standard input is the life line of a rank that was started: when it closes, the starter is gone and the rank leaves.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from trimaran.protocol.programs import NURSERY
from trimaran.train.process.allocator import restart_with_kept_memory
from trimaran.train.process.leave import leave
from trimaran.train.run.importing import importing


def main(arguments: list[str]) -> int:
    """Measure as one rank, with memory managed as the trainer's ranks have it; returns the exit status."""
    restart_with_kept_memory()
    with importing():
        from trimaran.probe import probe_rank

    def run(arguments: list[str]) -> int:
        probe_rank.run(Path(arguments[0]))
        return 0

    if arguments[:1] != [NURSERY]:
        threading.Thread(target=_leave_with_starter, daemon=True).start()
        return run(arguments)
    from trimaran.train.process.forking import serve

    return serve(int(arguments[1]), run)


def _leave_with_starter() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
