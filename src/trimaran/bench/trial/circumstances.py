"""What surrounds a run: where, when and with what it is made, noted as it begins for a row that is made later."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from trimaran.bench.trial.machine import code_version, libraries, machine, tuning_environment
from trimaran.files.catalogue import write_atomically
from trimaran.files.user_file import MIB, read_text
from trimaran.nouns.noun import Noun, TrimaranError
from trimaran.nouns.variant import Variant
from trimaran.protocol.files import RunFile
from trimaran.recipe.recipe import Recipe


class Circumstances(Noun):
    """The columns of a row that say where, when and with what the run was made."""

    source: str
    system: str
    date: str
    comparable_group: str
    code_version: str
    machine: str
    libraries: dict[str, str]
    environment: dict[str, str]
    created_at: str

    @classmethod
    def now(cls, recipe: Recipe, variant: Variant) -> Self:
        """Those of a run that begins now. Raises TrimaranError where the ranks' interpreter cannot serve."""
        moment = datetime.datetime.now(datetime.UTC)
        return cls(
            source="trimaran bench",
            system=f"Trimaran {code_version()}",
            date=moment.strftime("%Y-%m-%d"),
            comparable_group=f"{recipe.name} {moment:%Y-%m-%d}",
            code_version=code_version(),
            machine=machine(),
            libraries=_libraries(recipe, variant),
            environment=tuning_environment({**os.environ, **variant.environment}),
            created_at=moment.isoformat(timespec="seconds"),
        )

    @classmethod
    def noted(cls, out_dir: Path) -> Self | None:
        """Those that the folder of a run holds; None for a run of an earlier version, which noted none."""
        path = RunFile.CIRCUMSTANCES.of(out_dir)
        try:
            return cls.model_validate_json(read_text(path, f"circumstances {path}", MIB, "run the trial again"))
        except (TrimaranError, ValidationError):
            return None

    def note(self, out_dir: Path) -> None:
        """Write them into the folder of a run. Raises TrimaranError where it has no room for them."""
        write_atomically(RunFile.CIRCUMSTANCES.of(out_dir), self.model_dump_json(indent=1))


def _libraries(recipe: Recipe, variant: Variant) -> dict[str, str]:
    """Versions of the libraries that the ranks run with; none where their interpreter is of the nodes or an image."""
    slurm = recipe.sweep.slurm
    elsewhere = slurm is not None and slurm.python is not None and variant.python is None
    return {} if elsewhere else libraries(variant.python or sys.executable)
