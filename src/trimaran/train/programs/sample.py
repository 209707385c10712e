"""Text from a model: `python -m trimaran.train.programs.sample JOB.json` prints the prompt and what follows it.

JOB.json is a `trimaran.protocol.job.SampleJob`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trimaran.files.user_file import from_home
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import printable
from trimaran.protocol.job import SampleJob
from trimaran.train.programs.run_job import run_job
from trimaran.train.state.weight_files import TOKENIZER_NAME, find_weights
from trimaran.train.text.tokenizer import HuggingFace, load_tokenizer

# What byte-level decoding shows for a character of which some bytes are still missing.
_UNFINISHED = "\ufffd"


def read_tokenizer(folder: Path) -> HuggingFace:
    """The tokenizer in the folder of the weights. Raises TrimaranError where there is none."""
    path = folder / TOKENIZER_NAME
    if not path.exists():
        raise TrimaranError(f"{folder} has no {TOKENIZER_NAME}: put the one that it was trained with there")
    return load_tokenizer(path)


def sample(job: SampleJob) -> None:
    """Print the prompt and its continuation as it comes, up to the end of the document.

    Raises TrimaranError where there is no tokenizer, or one of more tokens than the model has.
    """
    files = find_weights(from_home(job.source))
    tokenizer = read_tokenizer(files.folder)
    prompt = tokenizer.inner.encode(job.prompt, add_special_tokens=False).ids
    if tokenizer.vocab > files.model.vocab:
        raise TrimaranError(
            f"{files.folder}: its tokenizer has {tokenizer.vocab} tokens, its model {files.model.vocab}: "
            f"they do not belong together"
        )
    # PyTorch takes seconds to read, and nobody waits for them over a mistake that the files tell
    from trimaran.train.programs.continuation import continuation

    shown = ""
    tokens = list(prompt)
    # the prompt is decoded along: some tokenizers leave out the space that a text begins with
    begins = len(tokenizer.inner.decode(prompt))
    # a model has learned the beginnings of documents as what follows the end of a document
    for token in continuation(files, prompt or [tokenizer.end_of_document], job):
        if not shown:  # the prompt comes with the first token, when the weights are known to be sound
            shown = job.prompt
            sys.stdout.write(printable(shown))
        if token == tokenizer.end_of_document:
            break
        tokens.append(token)
        text = job.prompt + tokenizer.inner.decode(tokens)[begins:]
        if not text.endswith(_UNFINISHED):
            sys.stdout.write(printable(text[len(shown) :]))
            sys.stdout.flush()
            shown = text
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(run_job(SampleJob, sample, sys.argv[1:]))
