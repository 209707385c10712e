"""Megatron-LM's arguments that no step feels: of data, checkpoints, logs, learning rates, evaluation and launching.

From megatron/training/arguments.py at core_v0.15.0 and core_v0.19.0, and torchrun's own.
"""

from __future__ import annotations

# What such names begin with, and those that stand alone.
_BEGIN = (
    "data-path", "data-cache", "data-args", "data-impl", "data-per-class", "dataloader-", "train-", "valid-", "test-",
    "tokenizer-", "tiktoken-", "null-tokenizer-", "per-split-", "num-dataset-", "log-", "logging-", "tensorboard-",
    "wandb-", "one-logger", "timing-log-", "profile", "pytorch-profiler-", "memory-snapshot-", "flight-recorder-",
    "straggler-", "rerun-", "save", "load", "ckpt-", "dist-ckpt-", "non-persistent-", "no-load-", "no-save-", "lr",
    "min-lr", "decoupled-", "weight-decay", "start-weight-", "end-weight-", "adam-", "eval-", "exit-", "init-method-",
    "embedding-init-", "initial-loss-", "min-loss-", "loss-scale", "override-opt", "master-", "rdzv-", "node-rank",
    "distributed-timeout-", "fp8-amax-", "inference-", "moe-aux-loss-", "moe-z-loss-", "moe-per-layer-logging",
    "mtp-loss-", "local-ranks-", "fully-parallel-", "tee", "max-restarts",
)  # fmt: skip
_ALONE = frozenset(
    (
        "seed", "random-seed", "params-dtype",
        "split", "clip-grad", "sgd-momentum", "hysteresis", "finetune", "mock-data", "num-workers",
        "use-mcore-models", "distributed-backend", "async-save", "auto-detect-ckpt-format", "no-mmap-bin-files",
        "data-parallel-random-init", "accumulate-allreduce-grads-in-fp32", "moe-router-load-balancing-type",
        "moe-router-bias-update-rate", "fp8-margin", "fp8-interval", "use-dist-ckpt", "use-pytorch-profiler",
        "vocab-extra-ids", "app-tag-run-name", "app-tag-run-version", "trust-remote-code", "rotary-interleaved",
        "make-vocab-size-divisible-by",
    )
)  # fmt: skip


def is_beside(flag: str) -> bool:
    """Whether a flag, `--lr` or torchrun's `--master_addr`, changes neither a step's time nor its memory."""
    name = flag.lstrip("-").replace("_", "-")
    return name in _ALONE or name.startswith(_BEGIN)
