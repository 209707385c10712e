"""The matmul ceiling in GFLOP/s: the best of the workload's own shapes, by PyTorch or as the trainer multiplies.

python benchmarks/peers/matmul.py fp32|bf16_pure THREADS
"""

from __future__ import annotations

import sys
import time

import torch

from trimaran.train.model.product import linear

# tokens x in x out of the qkv, projection, up and down products, and a square one
SHAPES = ((2048, 384, 1152), (2048, 384, 384), (2048, 384, 1536), (2048, 1536, 384), (1024, 1024, 1024))
SECONDS = 0.3


def gflops(dtype: torch.dtype, threads: int) -> float:
    """The best rate of the shapes."""
    torch.set_num_threads(threads)
    # one thread is timed by the processor time that it got, which other programs do not lengthen
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = 0.0
    for m, k, n in SHAPES:
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
        for multiply in (lambda a, b: a @ b.t(), linear):
            for _ in range(3):
                multiply(a, b)
            done, begin = 0, clock()
            while clock() < begin + SECONDS:
                multiply(a, b)
                done += 1
            best = max(best, 2 * m * n * k * done / (clock() - begin) / 1e9)
    return best


if __name__ == "__main__":
    print(gflops(torch.float32 if sys.argv[1] == "fp32" else torch.bfloat16, int(sys.argv[2])))
