"""The samples of a job: what it trains on, and what is held out of that."""

from __future__ import annotations

from pathlib import Path

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import Workload
from trimaran.protocol.job import TrainJob
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.text.sampler import Sampler
from trimaran.train.text.tokens import Tokens


def open_data(job: TrainJob) -> tuple[Sampler, Sampler | None]:
    """The job's text in the job's order, and what is held out of it where the training is to be validated.

    A trial, which has fewer steps than the training, is not.
    Raises TrimaranError where it does not fit the model, or is too little.
    """
    tokens, vocab = Tokens(Path(job.data_dir)), job.workload.model.vocab
    if tokens.index.vocab > vocab:
        raise TrimaranError(
            f"model.vocab {vocab} is smaller than the {tokens.index.vocab} of the data's tokenizer "
            f"({tokens.index.tokenizer}): raise vocab or tokenise anew"
        )
    training = Sampler(tokens, job.workload.seq_len, job.train.seed, validation=job.train.validation)
    if job.train.eval_every is None or job.steps < job.train.steps:
        return training, None
    return training, held_out_samples(tokens, job.workload, job.train)


def held_out_samples(tokens: Tokens, workload: Workload, settings: TrainSettings) -> Sampler:
    """What a training is validated on. Raises TrimaranError where it is less than one validation takes."""
    held_out = Sampler(tokens, workload.seq_len, settings.seed, validation=settings.validation, held_out=True)
    wanted = settings.eval_steps * workload.global_batch
    if held_out.samples_per_epoch < wanted:
        raise TrimaranError(
            f"train.eval_steps {settings.eval_steps} x global_batch {workload.global_batch} = {wanted} samples are "
            f"more than the {held_out.samples_per_epoch} held out: lower eval_steps or raise train.validation"
        )
    return held_out


def validation_is_due(job: TrainJob, step: int) -> bool:
    """Whether the training is validated after `step` steps: every so many, and at the end."""
    every = job.train.eval_every
    return every is not None and (step % every == 0 or step == job.train.steps)
