"""Trimaran's own `log.jsonl`, with the `job.json` that lies beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from trimaran.files.row_nouns import run_cells
from trimaran.nouns.columns import Cell
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.protocol.files import RunFile
from trimaran.protocol.job import TrainJob
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.json_text import json_object, number_in
from trimaran.store.importers.logs.steps import LogReading, Step, drafts_of
from trimaran.store.importers.text import read_text


def recognises(text: str) -> bool:
    """Whether the first line is one of `log.jsonl`."""
    line = json_object(text.lstrip().split("\n", 1)[0])
    return "iteration" in line and "sec_per_it" in line


def read(text: str, given: Mapping[str, Cell], path: Path) -> list[Draft]:
    """The row of one training; a line that is no JSON object (the last of a killed run) is left out."""
    lines = text.split("\n")
    reading = LogReading(cells=_job_cells(RunFile.JOB.of(path.parent)), guesses={"stack": "trimaran"})
    for line in lines:
        fields = json_object(line)
        if not isinstance(number := fields.get("iteration"), int):
            continue
        if isinstance(formula := fields.get("flops_formula"), str):
            reading.cells["flops_formula"] = formula
        gbs, memory = fields.get("global_batch"), number_in(fields, "peak_mem_gib")
        if memory is not None:
            reading.mem_gib_by_rank[0] = max(memory, reading.mem_gib_by_rank.get(0, 0.0))
        while reading.steps and reading.steps[-1].iteration >= number:
            reading.steps.pop()  # the training went back, and makes it again
        reading.steps.append(
            Step(
                iteration=number,
                sec_per_it=number_in(fields, "sec_per_it"),
                gbs=gbs if isinstance(gbs, int) else None,
                loss=number_in(fields, "lm_loss"),
                tflops=number_in(fields, "tflops"),
            )
        )
    return drafts_of(reading, lines, given)


def _job_cells(path: Path) -> dict[str, Cell]:
    """What the trainer was asked to do, where its job lies beside the log."""
    if not path.exists():
        return {}
    try:
        job = TrainJob.model_validate_json(read_text(path))
    except ValidationError as error:
        raise TrimaranError(f"{path}: {first_error(error)}; move it away to import the log without it") from None
    # Logs say themselves what their TFLOPs count; those that do not counted so.
    formula = "megatron_eq3_k4" if job.layout.recompute == "full" else "megatron_eq3_k3"
    return {**run_cells(job.workload, job.layout), "devices": job.layout.devices, "flops_formula": formula}
