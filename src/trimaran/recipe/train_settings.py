"""TrainSettings: steps, learning rate, optimizer, validation and checkpoints of a training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from trimaran.nouns.faults import MOST_RESTARTS
from trimaran.nouns.noun import Noun

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
# What a training does at a step whose loss or gradient is bad.
OnBadLoss = Literal["stop", "skip", "go_back"]

# What a learning-rate schedule may be stated in.
SCHEDULE_UNITS = ("steps", "samples", "tokens")


class TrainSettings(Noun):
    """How to train: steps, learning-rate schedule, optimizer, clipping, seed, checkpoints."""

    steps: int = Field(default=60, gt=0, le=1_000_000_000)
    seed: int = Field(default=1234, ge=0, lt=2**63)
    learning_rate: float = Field(default=1e-3, gt=0)
    min_learning_rate: float = Field(default=1e-4, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(default=None, gt=0, description="None: all steps")
    warmup_samples: int = Field(default=0, ge=0)
    decay_samples: int | None = Field(default=None, gt=0, description="the schedule is by samples, not steps")
    warmup_tokens: int = Field(default=0, ge=0)
    decay_tokens: int | None = Field(default=None, gt=0, description="the schedule is by tokens, not steps")
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    outer_learning_rate: float = Field(
        default=0.7, gt=0, description="of the optimizer by which replicas agree after local steps"
    )
    outer_momentum: float = Field(default=0.9, ge=0, lt=1, description="its momentum, Nesterov's")
    outer_mixing: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="share of its own weights that a replica keeps where the others' come late",
    )
    clip_grad: float = Field(default=1.0, ge=0, description="0: no clipping")
    balance_loss: float = Field(
        default=0.0, ge=0, description="weight of the loss that evens out experts' load; 0: none"
    )
    router_z_loss: float = Field(default=0.0, ge=0, description="weight of the routers' z-loss; 0: none")
    router_bias_rate: float = Field(
        default=1e-3, ge=0, description="by how much a step moves the biases of routers that have them"
    )
    document_mask: bool = Field(default=False, description="attention stays within a document, positions begin with it")
    validation: float = Field(default=0.0, ge=0, lt=1, description="share of every text held out, at its end")
    eval_every: int | None = Field(default=None, gt=0, description="steps between validations; None: none")
    eval_steps: int = Field(default=8, gt=0, description="global batches of one validation")
    init_from: str | None = Field(
        default=None, min_length=1, description="checkpoint or Hugging Face folder to begin with; None: drawn"
    )
    checkpoint_every: int | None = Field(
        default=None, ge=0, description="steps between checkpoints; None: by checkpoint_minutes; 0: none at all"
    )
    checkpoint_minutes: float = Field(
        default=10.0, gt=0, le=1e6, description="minutes between checkpoints, at least 50 times what one stops a step"
    )
    snapshot_seconds: float = Field(
        default=30.0,
        ge=0,
        le=1e6,
        description="seconds between snapshots that nodes hold in memory for each other; 0: none",
    )
    restarts: int = Field(
        default=3,
        ge=0,
        le=MOST_RESTARTS,
        description="starts anew after faults, in a row without a newer checkpoint; 0: none",
    )
    keep_checkpoints: int = Field(default=3, gt=0, description="the newest so many are kept")
    on_bad_loss: OnBadLoss = Field(
        default="stop",
        description="stop: go on, until there are bad_steps of them; skip: the batch teaches nothing; go_back: to the "
        "newest checkpoint, and on with the data behind the bad batch",
    )
    bad_steps: int = Field(
        default=10, gt=0, description="so many bad steps in a row end the training; of go_back, without a checkpoint"
    )
    spike_sigmas: float = Field(
        default=0.0, ge=0, description="a loss so far above the median of the last good ones is bad too; 0: none is"
    )
    spike_steps: int = Field(default=100, ge=10, le=10_000, description="how many good losses that median is of")
    track: tuple[TrackerName, ...] = Field(default=("tensorboard",), description="what else is told of every step")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "min_learning_rate" in self.model_fields_set and self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} exceeds learning_rate {self.learning_rate:g}: "
                f"the rate decays to it, so lower it"
            )
        spans = {unit: (getattr(self, f"warmup_{unit}"), getattr(self, f"decay_{unit}")) for unit in SCHEDULE_UNITS}
        if len(stated := [unit for unit in SCHEDULE_UNITS if any(spans[unit])]) > 1:
            raise ValueError(f"warmup_ and decay_ are stated in {' and '.join(stated)}: use one unit")
        for unit, (warmup, decay) in spans.items():
            needs_one = decay is not None or unit != "steps"  # steps that are not stated are all of them
            if warmup and needs_one and (decay or 0) <= warmup:
                raise ValueError(f"warmup_{unit} {warmup} needs a larger decay_{unit} than {decay}: state one")
        if self.on_bad_loss == "go_back" and self.checkpoint_every == 0:
            raise ValueError(
                'on_bad_loss is "go_back" and checkpoint_every is 0, so there is nothing to go back to: '
                "state checkpoint_minutes"
            )
        if self.eval_every and not self.validation:
            raise ValueError(
                f"eval_every {self.eval_every} validates on held-out text, and validation is 0: "
                f"set validation to a share such as 0.01"
            )
        return self
