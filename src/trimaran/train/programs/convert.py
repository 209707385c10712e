"""A checkpoint to a Hugging Face folder: `python -m trimaran.train.programs.convert JOB.json`.

JOB.json is a `trimaran.protocol.job.ConvertJob`.
"""

from __future__ import annotations

import sys

from trimaran.files.hugging_face_config import config_from_model
from trimaran.files.user_file import from_home
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import ConvertJob
from trimaran.train.programs.run_job import run_job
from trimaran.train.state.weight_files import TOKENIZER_NAME, HuggingFaceFiles, find_weights
from trimaran.train.text.tokenizer import load_tokenizer


def convert(job: ConvertJob) -> None:
    """Write the Hugging Face folder; weights keep the precision they are stored in.

    Raises TrimaranError where `output` exists, or the model is of no family that can be written.
    """
    output = from_home(job.output)
    if output.exists():
        raise TrimaranError(f"{output} exists: choose another folder or remove it")
    files = find_weights(from_home(job.source))
    family = job.family or (files.kind if isinstance(files, HuggingFaceFiles) else None)
    config_from_model(files.model, family)
    path = files.folder / TOKENIZER_NAME
    tokenizer = load_tokenizer(path) if path.exists() else None
    # PyTorch takes seconds to read, and nobody waits for them over a mistake that the files tell
    from trimaran.train.state.hugging_face import write_folder
    from trimaran.train.state.weight_source import source_of

    write_folder(files.model, source_of(files).read, output, tokenizer, family)


if __name__ == "__main__":
    sys.exit(run_job(ConvertJob, convert, sys.argv[1:]))
