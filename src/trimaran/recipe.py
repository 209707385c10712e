"""Recipe: one TOML file that states a study. plan, bench, tune, predict and train read their parts."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from trimaran.cluster import Cluster
from trimaran.columns import BY_NAME
from trimaran.layout import Layout
from trimaran.noun import Noun
from trimaran.shaping import ShapedNetwork
from trimaran.slurm import SlurmSettings
from trimaran.stack import Stack
from trimaran.variant import PLAIN, Variant
from trimaran.workload import Workload

_FOLDER_NAME = re.compile(r"\w[\w.+ -]{0,99}")


_STDLIB = ("python-stdlib",)
_Paths = tuple[Annotated[str, Field(min_length=1)], ...]


class BlendedText(Noun):
    """One text of a blend, and the share of samples that come from it (weights need not add up to 1)."""

    paths: _Paths = Field(min_length=1)
    weight: float = Field(gt=0, le=1e9)


class DataSettings(Noun):
    """Text to train on: files or folders, and how they are tokenised.

    `paths` are .txt-like, .jsonl or .parquet files, folders of them, Megatron-LM's .bin and .idx
    (used where they lie), or the word `python-stdlib` for the source of the running Python's
    standard library. `blend` names several texts instead, each with a weight.
    `tokenizer` is `bytes`, `bpe` (trained on the text to the model's vocabulary) or a
    path to a `tokenizer.json`.
    """

    paths: _Paths = _STDLIB
    blend: tuple[BlendedText, ...] = ()
    tokenizer: str = "bytes"
    text_field: str = "text"
    max_mib: float | None = Field(default=None, gt=0, description="stop reading a text after so much of it")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.blend and self.paths != _STDLIB:
            raise ValueError("paths and blend are both stated: name every text in blend, or none")
        return self

    @property
    def texts(self) -> tuple[BlendedText, ...]:
        """The texts of the blend, or the one text that there is."""
        return self.blend or (BlendedText(paths=self.paths, weight=1.0),)


class DataJob(Noun):
    """What `python -m trimaran.train.data JOB.json` is asked to do: text in, token files out.

    `vocab` is the model's vocabulary: a BPE is trained to it, and a larger tokenizer is refused.
    Token files go into a folder of `cache_dir` named after their content, once.
    """

    data: DataSettings
    vocab: int = Field(gt=1)
    cache_dir: str
    megatron: str | None = Field(default=None, description="prefix of Megatron-LM files to write besides")


class SampleJob(Noun):
    """What `python -m trimaran.train.sample JOB.json` is asked to do: a prompt in, its continuation out."""

    source: str = Field(description="a checkpoint, a folder of them, or a Hugging Face folder")
    prompt: str = ""
    tokens: int = Field(default=200, gt=0)
    temperature: float = Field(default=0.8, ge=0, description="0: the likeliest token")
    top_k: int | None = Field(default=None, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**63)


class ConvertJob(Noun):
    """What `python -m trimaran.train.convert JOB.json` is asked to do: a checkpoint in, a Hugging Face folder out."""

    source: str
    output: str


TrackerName = Literal["tensorboard", "wandb", "mlflow"]

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
    clip_grad: float = Field(default=1.0, ge=0, description="0: no clipping")
    document_mask: bool = Field(default=False, description="attention stays within a document, positions begin with it")
    validation: float = Field(default=0.0, ge=0, lt=1, description="share of every text held out, at its end")
    eval_every: int | None = Field(default=None, gt=0, description="steps between validations; None: none")
    eval_steps: int = Field(default=8, gt=0, description="global batches of one validation")
    init_from: str | None = Field(
        default=None, min_length=1, description="checkpoint or Hugging Face folder to begin with; None: drawn"
    )
    checkpoint_every: int | None = Field(
        default=None, ge=0, description="steps between checkpoints; None: one at the end; 0: none at all"
    )
    keep_checkpoints: int = Field(default=3, gt=0, description="the newest so many are kept")
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
            if warmup and unit != "steps" and (decay is None or decay <= warmup):
                raise ValueError(f"warmup_{unit} {warmup} needs a larger decay_{unit} than {decay}: state one")
        if self.eval_every and not self.validation:
            raise ValueError(
                f"eval_every {self.eval_every} validates on held-out text, and validation is 0: "
                f"set validation to a share such as 0.01"
            )
        return self


class SweepSettings(Noun):
    """What to measure: layouts as given, or the most promising of the plan."""

    layouts: tuple[str, ...] = Field(default=(), description="short notation; empty: chosen by the plan")
    min_trials: int = Field(default=1, gt=0, le=1_000_000)
    max_trials: int = Field(default=24, gt=0, le=1_000_000)
    steps: int = Field(default=6, gt=1, le=1_000_000_000, description="steps of one trial")
    warmup_steps: int = Field(default=2, gt=0, description="steps before the timed ones")
    timeout_s: float = Field(default=600.0, gt=0, le=1e8)
    devices: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        default=(), description="device counts to consider; empty: up to the cluster's"
    )
    fixed: dict[str, int | str | bool] = Field(default_factory=dict, description="layout fields held fixed")
    mem_margin: float = Field(default=0.05, ge=0, lt=1, description="share of memory the planner leaves free")
    networks: tuple[ShapedNetwork, ...] = Field(
        default=(), description="networks to measure every layout on, shaped inside this machine; empty: its own"
    )
    margin: float = Field(default=0.02, gt=0, lt=1, description="stop once the winner is this certain (relative)")
    slurm: SlurmSettings | None = Field(default=None, description="None: the ranks are processes of this machine")
    variants: tuple[Variant, ...] = Field(default=(), description="each layout is run under each; empty: plainly")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if unknown := sorted(set(self.fixed) - set(Layout.model_fields)):
            raise ValueError(f"fixed.{unknown[0]} is not a layout field: it is one of {', '.join(Layout.model_fields)}")
        if self.min_trials > self.max_trials:
            raise ValueError(
                f"min_trials {self.min_trials} exceeds max_trials {self.max_trials}: lower the one or raise the other"
            )
        if len({variant.text() for variant in self.variants}) < len(self.variants):
            raise ValueError("variants holds the same variant twice: drop one")
        names = [network.name for network in self.networks]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"networks has {twice!r} {names.count(twice)} times: give each a name of its own")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves none of steps {self.steps} to be timed: raise steps"
            )
        return self


class StudyTable(Noun):
    """One published table of a study: which rows of a packaged table it is, and the question that it asks.

    `where` chooses rows by columns (`{source = "004_c1a2cf81af8065a2", table = "T11"}`); a list of values takes any
    of them. `compares` are the columns by whose values the answer is told.
    """

    name: str = Field(pattern=r"^[\w.-]{1,60}$")
    question: str = Field(min_length=1)
    compares: tuple[str, ...] = Field(min_length=1)
    packaged: str = "seeds"
    where: dict[str, str | tuple[str, ...]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in (*self.compares, *self.where):
            if name not in BY_NAME:
                raise ValueError(f"{name!r} is no column of the table contract: see trimaran.columns")
        return self


class Recipe(Noun):
    """A study: model and workload, cluster, stack, sweep, data, training, and the published tables it is about."""

    name: str = Field(description="also the folder of the study")
    workload: Workload
    cluster: Cluster | None = Field(default=None, description="None: probe this machine")
    stack: Stack
    data: DataSettings = DataSettings()
    sweep: SweepSettings = SweepSettings()
    train: TrainSettings = TrainSettings()
    tables: tuple[StudyTable, ...] = Field(default=(), description="published tables that the study repeats")

    @property
    def variant(self) -> Variant:
        """What tune and train run under: the only variant of the sweep, or none."""
        return self.sweep.variants[0] if len(self.sweep.variants) == 1 else PLAIN

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not _FOLDER_NAME.fullmatch(name):
            raise ValueError("a study's folder has this name: use letters, digits, spaces and . _ + -, at most 100")
        return name


class TrainJob(Noun):
    """All that the ranks of one training need; written as JSON and read by every rank.

    `stage_split` is resolved: training decides nothing about the layout.
    """

    workload: Workload
    layout: Layout
    stage_split: tuple[int, ...]
    train: TrainSettings
    data_dir: str = Field(description="folder of token files made by trimaran.train.data")
    out_dir: str = Field(description="folder for log.jsonl, log.txt, heartbeat files and result.json")
    steps: int = Field(gt=0, description="steps to run now, which may be fewer than train.steps")
    device: Literal["cpu", "cuda"] = "cpu"
    record_timeline: bool = Field(
        default=False, description="write what the first pipeline does in the last step to timeline.RANK.json"
    )
    threads_per_rank: int = Field(default=1, gt=0)
    peak_tflops: float | None = Field(default=None, gt=0, description="measured matmul peak of one rank, for MFU")
    checkpoint_dir: str | None = Field(default=None, description="folder of the training's checkpoints; None: none")
    resume: bool = Field(default=False, description="go on from the newest checkpoint there")
    track: bool = Field(default=False, description="tell the trackers of train.track of every step")
    trace_steps: int = Field(default=0, ge=0, description="steps to profile into trace.RANK.json")
    earlier_log: str | None = Field(default=None, description="log.jsonl of the training that is gone on from")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.stage_split) != self.layout.pp * self.layout.vpp:
            raise ValueError(
                f"stage_split has {len(self.stage_split)} stages, but the layout has "
                f"PP {self.layout.pp} x VPP {self.layout.vpp}"
            )
        return self

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written; those that are there can be gone on from whether or not."""
        return self.checkpoint_dir is not None and self.train.checkpoint_every != 0
