"""Variant: the circumstances of a trial that are no part of its layout, as a dimension of a sweep."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, field_validator

from trimaran.nouns.noun import Noun, TrimaranError

# Variables that change how fast or how large a rank is, and nothing else.
TUNING_PREFIXES = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS_", "MALLOC_", "TCMALLOC_",
    "UCX_", "FI_", "HSA_", "DNNL_", "ONEDNN_", "ATEN_", "GLIBC_TUNABLES", "LD_",
)  # fmt: skip
# How ranks find each other and the harness; a variant that sets these would break the trial.
_HARNESS = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_LONGEST_VALUE = 4096
_THREADS, _COUNTS = "OMP_NUM_THREADS", re.compile(r"[1-9]\d{0,3}(?:,[1-9]\d{0,3})*")  # one for each nesting level


class Variant(Noun):
    """What a sweep tries beside the layout: one entry of `[[sweep.variants]]`; an empty one is the plain trial.

    `environment` is added to the ranks' own. `pin_cpus` gives each rank cores of its own, `clock_ghz` caps the
    processor's clock while the trial runs, `python` is another interpreter in which Trimaran and PyTorch are
    installed.
    """

    environment: dict[str, str] = Field(default_factory=dict)
    pin_cpus: bool = False
    clock_ghz: float | None = Field(default=None, gt=0, le=20)
    python: str | None = Field(default=None, min_length=1, description="absolute path of an interpreter")

    @field_validator("environment")
    @classmethod
    def _plain(cls, environment: Mapping[str, str]) -> Mapping[str, str]:
        for name, value in environment.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a variable: use letters, digits and _")
            if name in _HARNESS or name.startswith("TRIMARAN_"):
                raise ValueError(f"{name} is set by the harness: leave it out")
            if ";" in value or not value.isprintable() or len(value) > _LONGEST_VALUE:
                raise ValueError(
                    f"{name} is {value[:60]!r}: a value is one line of at most {_LONGEST_VALUE} characters without ;"
                )
            if name == _THREADS and not _COUNTS.fullmatch(value):
                raise ValueError(f"{name} is {value[:60]!r}: state the threads of a rank, as 2")
        return environment

    @field_validator("python")
    @classmethod
    def _absolute(cls, python: str | None) -> str | None:
        if python is not None and not (Path(python).is_absolute() and python.isprintable() and ";" not in python):
            raise ValueError(f"{python!r} is not an absolute path: write the interpreter's whole path")
        return python

    @property
    def threads_per_rank(self) -> int | None:
        """Threads that each rank computes with, where the variant says so (OMP_NUM_THREADS)."""
        return int(self.environment[_THREADS].split(",")[0]) if _THREADS in self.environment else None

    def text(self) -> str:
        """The row's `variant` column: `NAME=VALUE` joined by `;`, empty for the plain trial."""
        return ";".join(f"{name}={value}" for name, value in self._cells().items())

    def _cells(self) -> dict[str, str]:
        cells = dict(sorted(self.environment.items()))
        if self.pin_cpus:
            cells["pin_cpus"] = "yes"
        if self.clock_ghz is not None:
            cells["clock"] = f"{self.clock_ghz:g}GHz"
        if self.python is not None:
            cells["python"] = self.python
        return cells

    def foreign_code(self) -> str | None:
        """The first setting that makes a rank run a program or a library of its choice; None where none does.

        A bare library name is looked for where the system keeps its libraries; a path may lead anywhere, and a
        variable that is no tuning variable may do anything (PYTHONPATH, LD_LIBRARY_PATH).
        """
        if self.python is not None:
            return f"python = {self.python!r}"
        for name, value in self.environment.items():
            harmless = name.startswith(TUNING_PREFIXES) and (name == "LD_PRELOAD" or not name.startswith("LD_"))
            if "/" in value or not harmless:
                return f"environment.{name} = {value[:60]!r}"
        return None


PLAIN = Variant()


def require_trust(variants: tuple[Variant, ...], trusted: bool) -> None:
    """Raise TrimaranError where a recipe names code to run and the user has not said that it may."""
    for number, variant in enumerate(variants):
        if not trusted and (setting := variant.foreign_code()):
            raise TrimaranError(
                f"sweep.variants[{number}]: {setting} makes the ranks run code that the recipe names: read the "
                f"recipe, then add --trust"
            )
