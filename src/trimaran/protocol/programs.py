"""How the programs that other rooms start are called."""

from __future__ import annotations

import sys

# Arguments of an interpreter that make it one rank of a training.
TRAINER = ("-P", "-m", "trimaran.train.process.worker")
# The command of one rank under this interpreter.
WORKER: tuple[str, ...] = (sys.executable, *TRAINER)
