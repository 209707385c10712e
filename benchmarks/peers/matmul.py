"""The matmul ceiling in GFLOP/s: the best of the workload's own shapes.

python benchmarks/peers/matmul.py fp32|bf16_pure THREADS
"""

from __future__ import annotations

import sys
import time

import torch

# tokens x in x out of the qkv, projection, up and down products, and a square one
SHAPES = ((2048, 384, 1152), (2048, 384, 384), (2048, 384, 1536), (2048, 1536, 384), (1024, 1024, 1024))
SECONDS = 0.4


def main() -> None:
    dtype = torch.float32 if sys.argv[1] == "fp32" else torch.bfloat16
    torch.set_num_threads(int(sys.argv[2]))
    best = 0.0
    for m, k, n in SHAPES:
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
        for _ in range(3):
            a @ b.t()
        done, begin = 0, time.perf_counter()
        while time.perf_counter() < begin + SECONDS:
            a @ b.t()
            done += 1
        best = max(best, 2 * m * n * k * done / (time.perf_counter() - begin) / 1e9)
    print(best)


if __name__ == "__main__":
    main()
