"""Text from a model: `python -m trimaran.train.programs.sample JOB.json` prints the prompt and what follows it.

JOB.json is a `trimaran.protocol.job.SampleJob`. Every token is computed from the whole context, without a cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import printable
from trimaran.protocol.job import SampleJob
from trimaran.train.programs.run_job import run_job
from trimaran.train.state.weight_source import TOKENIZER_NAME, Source, open_source, whole_logits, whole_model
from trimaran.train.text.tokenizer import HuggingFace, load_tokenizer

# What byte-level decoding shows for a character of which some bytes are still missing.
_UNFINISHED = "\ufffd"


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """The next token by its (vocabulary,) logits: the likeliest at temperature 0, else drawn at random.

    With `top_k` it is drawn from so many of the likeliest tokens.
    """
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.float().cpu() / temperature
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))


@torch.inference_mode()
def continuation(source: Source, prompt: list[int], job: SampleJob, device: torch.device) -> Iterator[int]:
    """The tokens that follow the prompt's, as they are chosen."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    stage = whole_model(source, device, dtype)
    generator = torch.Generator().manual_seed(job.seed)
    tokens = list(prompt)
    for _ in range(job.tokens):
        context = torch.tensor([tokens[-source.model.max_positions :]], device=device)
        tokens.append(choose(whole_logits(stage, context, last=True)[0, -1], job.temperature, job.top_k, generator))
        yield tokens[-1]


def read_tokenizer(source: Source) -> HuggingFace:
    """The tokenizer in the folder of the weights. Raises TrimaranError where there is none."""
    path = source.folder / TOKENIZER_NAME
    if not path.exists():
        raise TrimaranError(f"{source.folder} has no {TOKENIZER_NAME}: put the one that it was trained with there")
    return load_tokenizer(path)


def sample(job: SampleJob) -> None:
    """Print the prompt and its continuation as it comes, up to the end of the document."""
    source = open_source(Path(job.source).expanduser())
    tokenizer = read_tokenizer(source)
    prompt = tokenizer.inner.encode(job.prompt, add_special_tokens=False).ids
    if tokenizer.vocab > source.model.vocab:
        raise TrimaranError(
            f"{source.folder}: its tokenizer has {tokenizer.vocab} tokens, its model {source.model.vocab}: "
            f"they do not belong together"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shown = job.prompt
    sys.stdout.write(printable(shown))
    tokens = list(prompt)
    # a model has learned the beginnings of documents as what follows the end of a document
    for token in continuation(source, prompt or [tokenizer.end_of_document], job, device):
        if token == tokenizer.end_of_document:
            break
        tokens.append(token)
        text = job.prompt + tokenizer.inner.decode(tokens[len(prompt) :])
        if not text.endswith(_UNFINISHED):
            sys.stdout.write(printable(text[len(shown) :]))
            sys.stdout.flush()
            shown = text
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(run_job(SampleJob, sample, sys.argv[1:]))
