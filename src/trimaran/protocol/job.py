"""Jobs: what the programs that other rooms start are asked to do, as JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from trimaran.layout.layout import Layout
from trimaran.nouns.noun import Noun, TrimaranError, first_error
from trimaran.nouns.workload import Workload
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.train_settings import TrainSettings


class Training(Noun):
    """What follows on a text: a sample of it is to be there, first weights, and before a training trackers too.

    `trials` by themselves are neither tracked nor validated. They begin with the training's weights: what a mixture's
    routers have learned decides its experts' load.
    """

    workload: Workload
    train: TrainSettings
    trials: bool = False


class DataJob(Noun):
    """What `python -m trimaran.train.programs.tokenise JOB.json` is asked to do: text in, token files out.

    `vocab` is the model's vocabulary: a BPE is trained to it, and a larger tokenizer is refused.
    Token files go into a folder of `cache_dir` named after their content, once.
    """

    data: DataSettings
    vocab: int = Field(gt=1)
    cache_dir: str
    megatron: str | None = Field(default=None, description="prefix of Megatron-LM files to write besides")
    training: Training | None = Field(default=None, description="what is to follow, refused here if at all")


class SampleJob(Noun):
    """What `python -m trimaran.train.programs.sample JOB.json` is asked to do: a prompt in, its continuation out."""

    source: str = Field(description="a checkpoint, a folder of them, or a Hugging Face folder")
    prompt: str = ""
    tokens: int = Field(default=200, gt=0)
    temperature: float = Field(default=0.8, ge=0, description="0: the likeliest token")
    top_k: int | None = Field(default=None, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**63)


class ConvertJob(Noun):
    """What `python -m trimaran.train.programs.convert JOB.json` is asked: checkpoint in, Hugging Face folder out."""

    source: str
    output: str
    family: str | None = Field(default=None, description="Hugging Face family to write; None: the first that fits")


class TrainJob(Noun):
    """All that the ranks of one training need; written as JSON and read by every rank.

    `stage_split` is resolved: training decides nothing about the layout.
    """

    workload: Workload
    layout: Layout
    stage_split: tuple[int, ...]
    train: TrainSettings
    data_dir: str = Field(description="folder of token files made by trimaran.train.programs.tokenise")
    out_dir: str = Field(description="folder for log.jsonl, log.txt, heartbeat files and result.json")
    steps: int = Field(gt=0, description="steps to run now, which may be fewer than train.steps")
    device: Literal["cpu", "cuda"] = "cpu"
    record_timeline: bool = Field(
        default=False, description="write what the first pipeline does in the last step to timeline.STAGE.json"
    )
    threads_per_rank: int = Field(default=1, gt=0)
    peak_tflops: float | None = Field(default=None, gt=0, description="measured matmul peak of one rank, for MFU")
    checkpoint_dir: str | None = Field(default=None, description="folder of the training's checkpoints; None: none")
    resume: bool = Field(default=False, description="go on from the newest checkpoint there")
    track: bool = Field(default=False, description="tell the trackers of train.track of every step")
    trace_steps: int = Field(default=0, ge=0, description="steps to profile into trace.RANK.json")
    earlier_logs: tuple[str, ...] = Field(
        default=(), description="log.jsonl of the starts that are gone on from, newest first"
    )

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

    @property
    def has_checkpoints(self) -> bool:
        """Whether checkpoints are written, or one that is there is gone on from."""
        return self.saves or (self.checkpoint_dir is not None and self.resume)


Job = TypeVar("Job", bound=Noun)


def read_job(kind: type[Job], path: Path) -> Job:
    """The job that a file states. Raises TrimaranError naming the file and the field."""
    try:
        if path.exists() and not path.is_file():
            raise TrimaranError(f"job {path} cannot be read: it is not a regular file")
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise TrimaranError(f"job {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise TrimaranError(f"job {path}: {first_error(error)}") from None
