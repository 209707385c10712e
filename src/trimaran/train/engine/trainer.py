"""Trainer: a rank's part of the model, its engine and its optimizer, and the step that joins them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from trimaran.layout.schedule import Action
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import TrainJob
from trimaran.train.comm.mesh import Mesh
from trimaran.train.engine.bad_steps import Losses
from trimaran.train.engine.chosen_sums import chosen_sums
from trimaran.train.engine.data_parallel import DataParallel
from trimaran.train.engine.expert_load import ExpertCounts, ExpertLoad
from trimaran.train.engine.flat_weights import FlatWeights, compute_dtype
from trimaran.train.engine.learning_rate import Position, learning_rate
from trimaran.train.engine.loss_scale import LossScale
from trimaran.train.engine.optimizers import make_optimizer
from trimaran.train.engine.outer_optimizer import OuterOptimizer
from trimaran.train.engine.pipeline_engine import PipelineEngine
from trimaran.train.engine.recorder import Recorder
from trimaran.train.model.gpt import Stage
from trimaran.train.model.mixture.experts import Experts
from trimaran.train.model.positions import documents_of
from trimaran.train.model.weight import Initial
from trimaran.train.text.sampler import Sampler


class Save(IntEnum):
    """What is to be done with the state behind a step."""

    NO = 0
    HOLD = 1  # in the memory of nodes, which hold it for each other
    WRITE = 2  # as a checkpoint


@dataclass(frozen=True)
class StepResult:
    """Figures of a step, the same on every rank; `zeros` counts gradients that are exactly zero.

    Of replicas that train apart `loss` and `zeros` are means, and `grad_norm` is the root of their squares' mean.

    `stop`: a rank was told to leave; `save`: what rank 0 wants done with the state. `bad` says what is wrong with the
    loss or its gradient, `skipped` whether the weights were left as they are. `own_s` are each rank's own seconds of
    the step before, without those in which it waited for others. `load` is that of a mixture's experts.
    """

    loss: float
    grad_norm: float
    zeros: int
    learning_rate: float
    global_batch: int
    skipped: bool
    loss_scale: float = 1.0
    stop: bool = False
    save: Save = Save.NO
    bad: str | None = None
    own_s: tuple[float, ...] = ()
    load: ExpertLoad | None = None


class Trainer:
    """All that a rank needs to train, and its position in the data. `initial` are the first weights."""

    def __init__(
        self,
        job: TrainJob,
        mesh: Mesh,
        sampler: Sampler,
        device: torch.device,
        initial: Initial,
        on_action: Callable[[Action], None] = lambda action: None,
    ) -> None:
        layout, workload = job.layout, job.workload
        self.job, self.mesh, self.device = job, mesh, device
        self.stage = Stage(workload.model, layout, job.stage_split, mesh)
        self._counts = ExpertCounts(job, self.stage, mesh, device) if workload.model.experts else None
        self.flat = FlatWeights(self.stage, layout, mesh, initial, device)
        for module in self.stage.modules():
            if isinstance(module, Experts):
                module.make_code()
        self.sums = chosen_sums(layout, self.flat)
        tied = workload.model.tied_embedding
        self.data_parallel = DataParallel(self.stage, self.flat, layout, mesh, self.sums, tied=tied)
        self.optimizer = make_optimizer(workload.optimizer, self.flat, job.train)
        self.outer = OuterOptimizer(self.flat, self.sums, layout, job.train, tied=tied) if layout.local_steps else None
        # replicas that train apart, and which of them this is
        copies = mesh.holders["dense"].copies
        self.apart, self.replica = (copies.size, copies.index) if self.outer else (1, 0)
        self.loss_scale = LossScale(layout.precision, workload.tokens_per_step)
        self.losses = Losses(job.train)
        slices = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        shape = (layout.mbs, workload.seq_len // slices, workload.model.hidden)
        new_activation = partial(torch.empty, shape, dtype=compute_dtype(layout), device=device)
        self.recorder = Recorder(mesh.pp.index, device)

        def after(action: Action) -> None:
            self.data_parallel.after(action)
            on_action(action)

        self.engine = PipelineEngine(
            self.stage, layout.schedule, mesh.pp, mesh.pp_returning, new_activation, after, self.recorder
        )
        self._sampler = sampler
        self.step_number = 0
        self.consumed_samples = 0
        # set where this rank was told to stop, or is rank 0, which says when to save; all learn of it with the loss
        self.stop_wanted, self.save_wanted = False, Save.NO
        self.own_s = 0.0  # what this rank tells the others of the last step

    @property
    def global_batch(self) -> int:
        """Sequences of the next step, which a ramp-up changes."""
        return self.job.workload.batch_at(self.consumed_samples)

    @property
    def states(self) -> dict[str, tuple[Tensor, ...]]:
        """What optimizers and error feedback keep, by name."""
        outer = {} if self.outer is None else {"outer_weights": self.outer.weights, **self.outer.state}
        return {**self.optimizer.state, **self.sums.state, **outer}

    def counts(self) -> dict[str, float]:
        """What a checkpoint has to keep beside the tensors."""
        return {"updates": self.optimizer.steps, **self.loss_scale.counts()}

    def go_on_from(self, step: int, consumed_samples: int, counts: dict[str, float]) -> None:
        """Go on with a training whose master weights and optimizer state were put in place."""
        self.step_number, self.consumed_samples = step, consumed_samples
        self.optimizer.steps = round(counts["updates"])
        self.loss_scale.go_on_from(counts)
        self.data_parallel.publish()

    def forward_backward(self) -> torch.Tensor:
        """Gradients of the next global batch, summed over all ranks that share a weight, times the loss scale.

        Replicas that train apart have those of their own part of it, as of a whole batch.

        Returns this rank's share of the mean loss, without the scale; the shares of all ranks add up to it.
        """
        batch = self.global_batch
        tokens, targets, documents = self._batch(self._sampler, self.consumed_samples, batch)
        scale = self.apart * self.loss_scale.scale / (batch * self.job.workload.seq_len)
        self.data_parallel.begin(len(tokens))
        if self._counts is not None:
            self._counts.begin(scale)
        loss = self.engine.run(tokens, targets, scale, documents)
        self.data_parallel.finish()
        loss /= self.apart * self.loss_scale.scale
        self.recorder.lap("reduce")
        return loss if self.mesh.tp.index == 0 else torch.zeros_like(loss)

    def _batch(
        self, sampler: Sampler, first: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """This replica's part of `count` samples, (micro-batches, micro-batch, s): tokens, targets, documents.

        Of tokens and targets those of this rank's part of the sequences. Raises TrimaranError where one is none of
        the model's, as in token files that another tokenizer has made: under TP no rank would miss it.
        """
        layout, vocab = self.job.layout, self.job.workload.model.vocab
        own_first, own_count = layout.samples_of(self.mesh.dp.index, count)
        samples = sampler.batch(first + own_first, own_count)
        for token in (samples.min(), samples.max()):
            if not 0 <= token < vocab:
                raise TrimaranError(
                    f"data: the text holds token {token}, model.vocab {vocab} ends at {vocab - 1}: name as "
                    f"data.tokenizer what its token files were made with, and raise vocab to that"
                )
        text = torch.from_numpy(samples).to(self.device)
        tokens, targets = text[:, :-1], text[:, 1:]
        documents = documents_of(tokens, sampler.end_of_document) if self.job.train.document_mask else None
        tokens, targets = (self.mesh.sequence.of(whole, 1) for whole in (tokens, targets))
        shape = (own_count // layout.mbs, layout.mbs, -1)
        return tokens.reshape(shape), targets.reshape(shape), None if documents is None else documents.reshape(shape)

    def evaluate(self, held_out: Sampler) -> float:
        """Mean loss over the first `eval_steps` global batches of held-out text, the same on every rank."""
        steps, batch = self.job.train.eval_steps, self.job.workload.global_batch
        scale = 1.0 / (steps * batch * self.job.workload.seq_len)
        losses = [
            self.engine.evaluate(tokens, targets, scale, documents)
            for tokens, targets, documents in (self._batch(held_out, step * batch, batch) for step in range(steps))
        ]
        share = torch.stack(losses).sum()
        if self.mesh.tp.index:
            share.zero_()
        self.mesh.world.all_reduce(share)
        return share.item()

    def step(self) -> StepResult:
        """Make a step.

        A loss or gradient that is not finite skips the update of the weights, and so does a leap unless the recipe's
        `on_bad_loss` is "stop".
        """
        batch = self.global_batch
        position = Position(self.step_number, self.consumed_samples, batch, self.job.workload.seq_len)
        rate = learning_rate(self.job.train, position)
        loss_share = self.forward_backward()
        world = self.mesh.world
        ranks_end = 4 + world.size
        sums = torch.zeros(ranks_end + self.apart, dtype=loss_share.dtype, device=loss_share.device)
        sums[0], sums[1] = loss_share, self.flat.zeros() / self.apart
        sums[2], sums[3], sums[4 + world.index] = float(self.stop_wanted), float(self.save_wanted), self.own_s
        sums[ranks_end + self.replica] = self.flat.squared_norm()
        figures = len(sums)
        if self._counts is not None:
            sums = torch.cat((sums, self._counts.counted().to(sums.device)))
        world.all_reduce(sums)
        self.recorder.lap("wait")
        loss, zeros, stops, saves, *others = sums[:figures].tolist()
        own_s, squared_norms = others[: world.size], others[world.size :]
        load = None if self._counts is None else self._counts.load(sums[figures:], batch)
        loss_scale = self.loss_scale.scale
        grad_norm = _norm(sum(squared_norms) / self.apart) / loss_scale
        # under fp16 a gradient that is too large is in order as long as it can lower the loss scale
        bad = self.losses.judge(loss, None if loss_scale > 1.0 else grad_norm)
        overflow = not (math.isfinite(loss) and math.isfinite(grad_norm))
        skipped = overflow or (bad is not None and self.job.train.on_bad_loss != "stop")
        if not skipped:
            self.optimizer.step(rate, _norm(squared_norms[self.replica]) / loss_scale, loss_scale)
            if self._counts is not None and load is not None:
                self._counts.move_biases(self.flat, load)
        if skipped and self.outer is None:
            self.sums.forget()  # the batch is to teach nothing, nor is what was not sent of it later
        agreed = self.outer is not None and self.outer.after(self.step_number + 1)
        if agreed or not skipped:
            self.data_parallel.publish()
        self.loss_scale.update(overflow=overflow)
        self.flat.clear_grads()
        self.recorder.lap("step")
        self.step_number += 1
        self.consumed_samples += batch
        return StepResult(
            loss,
            grad_norm,
            round(zeros),
            rate,
            batch,
            skipped,
            loss_scale,
            stops > 0,
            Save(round(saves)),
            bad,
            tuple(own_s),
            load,
        )


def _norm(squared: float) -> float:
    """Its root; not a number where a gradient is none."""
    return math.sqrt(squared) if squared >= 0 else math.nan
