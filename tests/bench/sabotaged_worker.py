"""The real trainer with one thing wrong: `sabotaged_worker.py {"LAYOUT": "SABOTAGE"} JOB.json`.

The last rank does it at the start of its third step, while the others wait for it in a collective. As of the trainer,
ranks are forked from a process that is started with `--nursery FD` for the job.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

from trimaran.train.process.allocator import restart_with_kept_memory

restart_with_kept_memory()

faulthandler.register(signal.SIGUSR1)

from trimaran.protocol.programs import NURSERY  # noqa: E402
from trimaran.train.run import rank as ranks  # noqa: E402


def sleep_in_a_collective() -> None:
    while True:
        time.sleep(1)


HOARD: list[bytes] = []


def eat() -> None:
    """More with every step, as what is leaked."""
    HOARD.append(b"x" * (512 << 20))


def run(arguments: list[str]) -> int:
    job = json.loads(Path(arguments[0]).read_text())
    layout = job["layout"]
    sabotage = json.loads(sys.argv[1])[f"dp{layout['dp']},tp{layout['tp']},pp{layout['pp']},mbs{layout['mbs']}"]
    out_dir, rank, world = Path(job["out_dir"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def fill_disk() -> None:
        with (out_dir / "junk").open("wb", buffering=0) as junk:
            while junk.write(bytes(1 << 20)):
                pass

    at_step = {
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "hang": sleep_in_a_collective,
        "hang-first": sleep_in_a_collective,
        "eat": eat,
        "fill-disk": fill_disk,
    }
    if sabotage in at_step and rank == world - 1:
        from trimaran.train.engine.trainer import Trainer

        step = Trainer.step

        def sabotaged(self: Trainer) -> object:
            first = 0 if sabotage == "hang-first" else 2
            if self.step_number == first or (sabotage == "eat" and self.step_number > first):
                at_step[sabotage]()
            return step(self)

        Trainer.step = sabotaged  # type: ignore[method-assign,assignment]
    status = ranks.run(arguments)
    if sabotage == "garbage" and rank == 0:
        (out_dir / "result.json").write_bytes(os.urandom(4096))
    return status


if sys.argv[2] == NURSERY:
    from trimaran.train.process.forking import serve

    ranks.import_trainer(checkpoints=False)
    sys.exit(serve(int(sys.argv[3]), run))
sys.exit(run(sys.argv[2:]))
