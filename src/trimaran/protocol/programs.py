"""How the programs that other rooms start are called."""

from __future__ import annotations

import sys

# Arguments of an interpreter that make it one rank of a training.
# -P: a file in the current folder must not stand in for a module of the trainer's
TRAINER = ("-P", "-m", "trimaran.train.process.worker")
# The command of one rank under this interpreter.
WORKER: tuple[str, ...] = (sys.executable, *TRAINER)
# ... and one rank of a probe.
PROBE = ("-P", "-m", "trimaran.probe.probe_worker")
# The ranks were started by torchrun or Slurm, and rank 0 alone is given the job, which it hands on.
JOINED = "--joined"
# Fork ranks on request through the socket of the number that follows (`trimaran.protocol.forks`).
NURSERY = "--nursery"
