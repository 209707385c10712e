"""The tokens that a model writes behind others. Each is computed from the whole context, without a cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import SampleJob
from trimaran.train.state.weight_files import CheckpointFiles, HuggingFaceFiles
from trimaran.train.state.weight_source import source_of, whole_logits, whole_model


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """The next token by its (vocabulary,) logits: the likeliest at temperature 0, else drawn at random.

    With `top_k` it is drawn from so many of the likeliest tokens. Raises TrimaranError where logits are no numbers.
    """
    if bool(logits.isnan().any()):
        raise TrimaranError(
            "the model's scores are not numbers: weights of it are not finite; take an earlier checkpoint"
        )
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.double().cpu()
    logits = (logits - logits.max()) / temperature  # the likeliest stays finite, however low the temperature
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))


@torch.inference_mode()
def continuation(files: HuggingFaceFiles | CheckpointFiles, prompt: list[int], job: SampleJob) -> Iterator[int]:
    """The tokens that follow the prompt's, as they are chosen, by the weights in `files`; on a GPU where one is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    stage = whole_model(source_of(files), device, dtype)
    generator = torch.Generator().manual_seed(job.seed)
    tokens = list(prompt)
    for _ in range(job.tokens):
        context = torch.tensor([tokens[-files.model.max_positions :]], device=device)
        tokens.append(choose(whole_logits(stage, context, last=True)[0, -1], job.temperature, job.top_k, generator))
        yield tokens[-1]
