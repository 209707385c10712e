"""What a training leaves behind: `memory.RANK.json` of every rank and rank 0's `result.json`."""

from __future__ import annotations

import torch

from trimaran.protocol.files import RunFile
from trimaran.protocol.json_file import finite, write_json
from trimaran.protocol.result import RunResult
from trimaran.train.engine.trainer import Trainer
from trimaran.train.run.log import History, perplexity


def write_result(trainer: Trainer, history: History, startup_s: dict[str, float], memory: dict[str, float]) -> None:
    """Write down this rank's memory and, on rank 0, the figures of all steps; all ranks must call it."""
    world, job = trainer.mesh.world, trainer.job
    write_json(RunFile.MEMORY.of(job.out_dir, world.index), memory)
    summary = torch.zeros(world.size + 1, dtype=torch.float64, device=trainer.device)
    summary[world.index], summary[-1] = memory["peak"], trainer.flat.parameters
    world.all_reduce(summary)
    *peaks, parameters = summary.tolist()
    if world.index > 0:
        return
    result = RunResult(
        steps=job.steps,
        unknown_steps=job.steps - len(history.sec_per_it),
        sec_per_it=tuple(history.sec_per_it),
        losses=tuple(finite(loss) for loss in history.losses),
        grad_norms=tuple(finite(norm) for norm in history.grad_norms),
        validations=tuple(
            {"step": step, "loss": finite(loss), "perplexity": finite(perplexity(loss))}
            for step, loss in history.validations.items()
        ),
        skipped=history.skipped,
        mem_gib_per_rank=tuple(peaks),
        startup_s=startup_s,
        parameters=round(parameters),
    )
    write_json(RunFile.RESULT.of(job.out_dir), result.model_dump())
