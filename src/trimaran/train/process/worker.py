"""One rank of a training: `python -m trimaran.train.process.worker JOB.json`, started once per rank.

`--nursery FD` starts a process instead from which ranks are forked (`forking.py`).
With `--joined` the ranks were started by torchrun or Slurm: rank 0 alone is given the job, and hands it on.

JOB.json is a `trimaran.protocol.job.TrainJob`. Reads the variables of `trimaran.protocol.environment` as torchrun
sets them. Exit status: 0 trained; 2 the user's mistake, told in one line; 41 out of memory; 75 saved and left as it was
asked (`trimaran.protocol.exits`, by a signal of `trimaran.protocol.wishes`); 1 anything else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from pathlib import Path

from trimaran.protocol.programs import NURSERY
from trimaran.train.process.allocator import restart_with_kept_memory
from trimaran.train.process.leave import leave


def main(arguments: list[str]) -> int:
    """Run one rank; returns the exit status."""
    faulthandler.register(signal.SIGUSR1)  # a harness that finds this rank silent asks for its stacks
    restart_with_kept_memory()
    from trimaran.train.run.rank import import_trainer, run

    if arguments[:1] != [NURSERY]:
        return run(arguments)
    from trimaran.train.process.forking import serve

    import_trainer(checkpoints=False)
    return serve(int(arguments[1]), run, _import_for)


def _import_for(path: Path) -> None:
    """Import what the ranks of a training with checkpoints need besides, which those of a trial do not."""
    from trimaran.nouns.noun import TrimaranError
    from trimaran.protocol.job import TrainJob, read_job
    from trimaran.train.run.rank import import_trainer

    with contextlib.suppress(TrimaranError):  # the rank says what is wrong with its job
        if read_job(TrainJob, path).has_checkpoints:
            import_trainer(checkpoints=True)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
