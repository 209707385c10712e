"""One rank of a probe: `python -m trimaran.probe.probe_worker SETTINGS.json`, started once per rank.

Ranks meet through the file `rendezvous` beside the settings; rank 0 leaves `result.json` there.
Standard input is the life line: when it closes, the starter is gone and the rank leaves.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trimaran.train.process.allocator import restart_with_kept_memory
from trimaran.train.process.leave import leave


def main(arguments: list[str]) -> None:
    """Measure as one rank, with memory managed as the trainer's ranks have it."""
    restart_with_kept_memory()
    from trimaran.probe.probe_rank import run

    run(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
    leave(0)
