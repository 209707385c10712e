"""A checkpoint to a Hugging Face folder: `python -m trimaran.train.programs.convert JOB.json`.

JOB.json is a `trimaran.protocol.job.ConvertJob`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trimaran.protocol.job import ConvertJob
from trimaran.train.programs.run_job import run_job
from trimaran.train.state.hugging_face import write_folder
from trimaran.train.state.weight_source import TOKENIZER_NAME, open_source
from trimaran.train.text.tokenizer import load_tokenizer


def convert(job: ConvertJob) -> None:
    """Write the Hugging Face folder; weights keep the precision they are stored in."""
    source = open_source(Path(job.source).expanduser())
    tokenizer = source.folder / TOKENIZER_NAME
    output = Path(job.output).expanduser()
    if tokenizer.exists():
        write_folder(source.model, source.read, output, tokenizer, load_tokenizer(tokenizer).end_of_document)
    else:
        write_folder(source.model, source.read, output)


if __name__ == "__main__":
    sys.exit(run_job(ConvertJob, convert, sys.argv[1:]))
