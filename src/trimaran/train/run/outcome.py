"""What a training leaves behind: `memory.RANK.json` of every rank and rank 0's `result.json`."""

from __future__ import annotations

from pathlib import Path

import torch

from trimaran.protocol.json_file import finite, write_json
from trimaran.train.engine.trainer import Trainer
from trimaran.train.run.log import History, perplexity


def write_result(trainer: Trainer, history: History, startup_s: dict[str, float], memory: dict[str, float]) -> None:
    """Write down this rank's memory and, on rank 0, the figures of all steps; all ranks must call it."""
    world, job = trainer.mesh.world, trainer.job
    out_dir = Path(job.out_dir)
    write_json(out_dir / f"memory.{world.index}.json", memory)
    summary = torch.zeros(world.size + 1, dtype=torch.float64, device=trainer.device)
    summary[world.index], summary[-1] = memory["peak"], trainer.flat.parameters / job.layout.dp
    world.all_reduce(summary)
    *peaks, parameters = summary.tolist()
    if world.index > 0:
        return
    figures = {
        "status": "ok",
        "steps": job.steps,
        "unknown_steps": job.steps - len(history.sec_per_it),
        "sec_per_it": history.sec_per_it,
        "losses": [finite(loss) for loss in history.losses],
        "grad_norms": [finite(norm) for norm in history.grad_norms],
        "validations": [
            {"step": step, "loss": finite(loss), "perplexity": finite(perplexity(loss))}
            for step, loss in history.validations.items()
        ],
        "skipped": history.skipped,
        "mem_gib_per_rank": peaks,
        "startup_s": startup_s,
        "parameters": round(parameters),
    }
    write_json(out_dir / "result.json", figures)
