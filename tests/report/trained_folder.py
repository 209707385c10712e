"""The folder of a training with a known life, as a training leaves it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob
from trimaran.recipe.train_settings import TrainSettings
from trimaran.study.training.events import EVENTS, Event, EventKind, EventLog

STEPS, STEP_S, TOKENS_PER_S = 400, 2.0, 1024.0
# Seconds of this life: two checkpoints a hundred steps of 0.5 s each, a crash 30 steps behind one, and a queue.
SAVES, SAVE_S, LOST, DOWN_S, WAITED_S, OTHER_S = 8, 0.5, 30, 45.0, 15.0, 20.0
# Of the first start, half of the other time, those in a queue; and for which a crash may go unnoticed.
QUEUE_S, UNNOTICED_S = 4.0, 1.5
BEGAN = datetime.datetime(2026, 3, 1, 12, 0, tzinfo=datetime.UTC)


def trained_folder(folder: Path) -> Path:
    """A training of 400 steps in `folder`/train, its events beside it."""
    out = folder / "train"
    out.mkdir(parents=True)
    model = Model(layers=2, hidden=32, heads=2, vocab=257, max_positions=32)
    workload, layout = Workload(model=model, seq_len=32, global_batch=64), parse_layout("dp2,pp2,mbs2")
    job = TrainJob(
        workload=workload, layout=layout, stage_split=(1, 1), train=TrainSettings(steps=STEPS), data_dir="data",
        out_dir=str(out), steps=STEPS,
    )  # fmt: skip
    RunFile.JOB.of(out).write_text(job.model_dump_json())
    lines = [
        {"iteration": step, "sec_per_it": STEP_S, "lm_loss": 5.5 - step / 100, "tokens_per_s": TOKENS_PER_S,
         "validation_loss": 6.0 - step / 100 if step % 100 == 0 else None}
        for step in (*range(1, 11), *range(6, STEPS + 1))  # it went back once, and made steps 6 to 10 again
    ]  # fmt: skip
    RunFile.LOG.of(out).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    log, now = EventLog(out.with_name(EVENTS)), BEGAN

    def note(kind: EventKind, step: int, after_s: float, **cells: object) -> None:
        nonlocal now
        now += datetime.timedelta(seconds=after_s)
        stated = {"at": now.isoformat(timespec="milliseconds"), "event": kind, "layout": "dp2,pp2,mbs2"}
        log.add(Event.model_validate(stated | {"step": step, "saved_step": step // 50 * 50} | cells))

    note(EventKind.BEGAN, 0, 0.0)
    first_s = OTHER_S / 2 + STEP_S
    note(EventKind.FIRST_STEP, 1, first_s, seconds=first_s, waited_s=QUEUE_S)
    bad = "the loss is not finite: nan; goes back to step 5, and on with the data behind step 10"
    note(EventKind.BAD_LOSS, 10, 9 * STEP_S, lost_steps=5, lost_s=5 * STEP_S, why=bad)
    for saved in range(50, 201, 50):
        since = 45 if saved == 50 else 50
        note(EventKind.SAVED, saved, since * STEP_S + SAVE_S, seconds=SAVE_S)
    why = "1.8 times the others' median over 20 steps: 0.180 s of its own a step, 0.100 s are usual"
    note(EventKind.SLOW, 220, 20 * STEP_S, rank=3, node="gpu-node-17", why=why)
    note(EventKind.CRASH, 230, 10 * STEP_S, rank=3, node="gpu-node-17", lost_steps=LOST, lost_s=LOST * STEP_S,
         seconds=UNNOTICED_S, why="rank 3 was killed by SIGKILL")  # fmt: skip
    note(EventKind.WENT_ON, 201, DOWN_S + WAITED_S + STEP_S, seconds=DOWN_S + WAITED_S + STEP_S, waited_s=WAITED_S)
    for saved in range(250, STEPS + 1, 50):
        since = 49 if saved == 250 else 50
        note(EventKind.SAVED, saved, since * STEP_S + SAVE_S, seconds=SAVE_S)
    note(EventKind.FINISHED, STEPS, OTHER_S / 2)
    return out
