"""Reads DeepSpeed's JSON files with its own DeepSpeedConfig, as on so many ranks.

Standard input: a JSON list of [ranks, JSON file]; standard output: a JSON list of what is then set, or of the refusal.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from deepspeed.runtime import config as module
from deepspeed.runtime.config import DeepSpeedConfig

# Without a process group DeepSpeed takes itself for alone.
module.dist.get_rank = lambda: 0


def read(ranks: int, text: str) -> dict[str, Any]:
    """What the engine would be told."""
    config = DeepSpeedConfig(json.loads(text), mpu=SimpleNamespace(get_data_parallel_world_size=lambda: ranks))
    return {
        "train_batch_size": config.train_batch_size,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps,
        "stage": config.zero_optimization_stage,
        "overlap_comm": config.zero_config.overlap_comm,
        "reduce_bucket_size": config.zero_config.reduce_bucket_size,
        "bfloat16": config.bfloat16_config.enabled,
        "fp16": config.float16_config.enabled,
        "grad_accum_dtype": config.grad_accum_dtype,
    }


# DeepSpeed prints warnings to standard output while it is imported.
print("\n" + json.dumps([read(ranks, text) for ranks, text in json.load(sys.stdin)]))
