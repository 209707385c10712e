"""What the ranks report about a finished trial, and the figures drawn from it."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from pydantic import ValidationError

from trimaran.nouns.noun import first_error
from trimaran.protocol.result import RunResult

# More than a result may hold: about 66 bytes a step, and twice that of one that validates each time.
_LIMIT_BYTES, _LIMIT_BYTES_A_STEP = 1 << 20, 512


def read_result(path: Path, steps: int) -> RunResult | str:
    """The result of a trial of `steps` steps, or a sentence saying why it cannot be believed."""
    limit = _LIMIT_BYTES + _LIMIT_BYTES_A_STEP * steps
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1)
    except OSError as error:
        return f"the ranks left with 0 but {path.name} cannot be read ({error.strerror})"
    if len(text) > limit:
        return f"{path.name} is garbage: of {steps} steps it is larger than {limit / 2**20:.1f} MiB"
    try:
        result = RunResult.model_validate(json.loads(text))
    except ValidationError as error:
        return f"{path.name} is garbage: {first_error(error)}"
    except (ValueError, RecursionError) as error:
        return f"{path.name} is garbage: {error}"
    if len(result.sec_per_it) + result.unknown_steps != steps:
        return f"{path.name} holds {len(result.sec_per_it)} step times, but {steps} steps were asked for"
    if not all(math.isfinite(seconds) and seconds > 0 for seconds in result.sec_per_it):
        return f"{path.name} holds step times that are not positive numbers"
    if not all(math.isfinite(gib) and gib >= 0 for gib in result.mem_gib_per_rank):
        return f"{path.name} holds memory figures that are not positive numbers"
    return result


def median_and_spread(step_times_s: tuple[float, ...], warmup_steps: int, local_steps: int = 0) -> tuple[float, float]:
    """Median and interquartile range, in seconds, of the steps after warm-up.

    A trial shorter than its warm-up is judged by its last step. A round of `local_steps`, whose last step takes longer
    than the others, counts as a step of its mean.
    """
    timed = step_times_s[warmup_steps:] or step_times_s[-1:]
    if local_steps:
        firsts = range(first_timed_round(warmup_steps, local_steps), len(step_times_s) - local_steps + 1, local_steps)
        timed = tuple(statistics.mean(step_times_s[first : first + local_steps]) for first in firsts) or timed
    if len(timed) < 2:
        return timed[0], 0.0
    lower, _, upper = statistics.quantiles(timed, n=4, method="inclusive")
    return statistics.median(timed), upper - lower


def first_timed_round(warmup_steps: int, local_steps: int) -> int:
    """Steps before the first round of local steps that begins after warm-up; 0 where there are no rounds."""
    return -(-warmup_steps // local_steps) * local_steps if local_steps else 0
