"""Make the calibrations that Trimaran ships, from the published tables that it ships.

    python benchmarks/calibrate.py

Writes src/trimaran/catalog/calibrations/<cluster>.<stack>.toml, each with its held-out error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimaran.cost.calibration import Calibration, save_calibration
from trimaran.cost.case import Case
from trimaran.cost.fit.solve import Observation, batches, calibrate, leave_out, predict_memory, predict_times
from trimaran.files.row_nouns import nouns_of
from trimaran.files.row_table import packaged_table
from trimaran.nouns.columns import FIT_QUALITIES
from trimaran.nouns.noun import TrimaranError

FOLDER = Path(__file__).parent.parent / "src" / "trimaran" / "catalog" / "calibrations"


@dataclass(frozen=True)
class Source:
    """Rows of packaged tables that calibrate a stack on one or more clusters of the same machines."""

    tables: tuple[str, ...]
    stack: str
    clusters: tuple[str, ...]


SOURCES = (
    Source(("seeds", "fugaku_124m"), "megatron-cpu", ("fugaku-a64fx", "fugaku-a64fx-2.2ghz")),
    Source(("seeds",), "megatron-deepspeed", ("jean-zay-v100-16gb", "jean-zay-v100-32gb")),
    Source(("seeds",), "megatron-deepspeed", ("jean-zay-a100-80gb",)),
    Source(("seeds",), "gpipe", ("aws-p3-2xlarge",)),
    Source(("seeds",), "torch-pipe", ("aws-p3-16xlarge",)),
    Source(("seeds",), "megatron", ("aws-p3-16xlarge",)),
    Source(("vtrain_single_node",), "megatron-deepspeed", ("a100-8x-node",)),
    Source(("dlperf_v100",), "megatron", ("dlperf-v100",)),
    Source(("dlperf_v100",), "oneflow", ("dlperf-v100",)),
    Source(("llm_foundry_a100_40gb",), "torch-fsdp", ("llm-foundry-a100-40gb",)),
)


def observations(source: Source) -> tuple[list[Observation], list[str]]:
    """The rows as a fit sees them, and the group that each belongs to: table, or comparable group."""
    seen, groups = [], []
    for table in source.tables:
        for row in packaged_table(table).measurements:
            chosen = row.stack == source.stack and row.cluster in source.clusters
            if not chosen or row.quality not in FIT_QUALITIES or row.status != "ok":
                continue
            try:
                nouns = nouns_of(row)
            except TrimaranError:
                continue
            day = row.date or "" if table == "seeds" else ""
            weighed = None if row.quality == "suspect_mem" else row.mem_gib
            case = Case.of(nouns.workload, nouns.cluster, nouns.stack)
            seen.append(Observation(case, nouns.layout, row.sec_per_it, weighed, day))
            groups.append(str(row.table if table == "seeds" else row.comparable_group))
    return seen, groups


def held_out_error(seen: list[Observation], groups: list[str], what: str, found: dict[str, Calibration]) -> float:
    """Spread (1 sigma, from the mean absolute error) of log errors on rows whose group was left out of `found`."""
    errors = []
    for group, calibration in found.items():
        rows = [o for o, g in zip(seen, groups, strict=True) if g == group and getattr(o, what)]
        if not rows:
            continue
        predict = predict_times if what == "sec_per_it" else predict_memory
        predicted = predict(batches(rows), len(rows), calibration)
        errors += list(np.log(predicted / np.array([getattr(o, what) for o in rows])))
    return float(1.25 * np.mean(np.abs(errors))) if errors else 0.0


def calibrated(seen: list[Observation], groups: list[str]) -> Calibration:
    """The fit to all rows, with the error it shows on rows whose group was left out."""
    found = calibrate(seen)
    if len(set(groups)) < 2:
        return found
    without = leave_out(seen, groups)
    errors = {
        "time_error": held_out_error(seen, groups, "sec_per_it", without),
        "mem_error": held_out_error(seen, groups, "mem_gib", without),
    }
    return found.model_copy(update={name: float(f"{error:.3g}") for name, error in errors.items() if error})


def calibration_of(source: Source) -> Calibration:
    """The calibration that a source teaches."""
    seen, groups = observations(source)
    found = calibrated(seen, groups)
    origin = f"{', '.join(source.tables)}: {len(seen)} rows in {len(set(groups))} groups"
    rounded = {
        name: float(f"{getattr(found, name):.4g}")
        for name, value in found.model_dump().items()
        if isinstance(value, float)
    }
    return found.model_copy(update={**rounded, "origin": origin, "stack": source.stack})


def main() -> None:
    for source in SOURCES:
        calibration = calibration_of(source)
        for cluster in source.clusters:
            path = FOLDER / f"{cluster}.{source.stack}.toml"
            save_calibration(calibration.model_copy(update={"cluster": cluster}), path)
            print(f"{path.name}: {calibration.rows} rows, held-out error {calibration.time_error:.1%} (1 sigma)")


if __name__ == "__main__":
    main()
