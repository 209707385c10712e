"""Settings of a CPU rank that its runtime libraries read only when a process begins.

* glibc keeps what was freed, and asks for huge pages. Training frees and takes the same large buffers
  every step; by default each goes back to the system and is faulted in again, page by page: measured at
  5% of a step in fp32, and 8% more in bf16 for pages of 4 KiB instead of 2 MiB.
* glibc keeps no small pieces apart. A tensor begins on a cache line, for which glibc takes some 100 bytes more and
  gives back what it did not need; a piece that is kept apart (tcache, fastbins) does not join the tensor's memory
  again, and a hole that is so much smaller takes no tensor of the same size (glibc's bug 30723). Without such pieces
  a rank takes 5 to 17% less memory, and steps of many small operators as long as before (docs/training-speed.md).
* OpenMP's threads wait for each other awake only for a moment. By default they burn the time slices that
  a thread they wait for needs: beside another busy program, a step on two threads took 5.3 s
  instead of 1.0.
"""

from __future__ import annotations

import ctypes
import os
import sys

TUNABLES = (
    "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.hugetlb=1"
    ":glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
)

# Rounds of waiting before a thread sleeps: some ten microseconds.
SPIN_COUNT = "10000"


def restart_with_kept_memory() -> None:
    """Begin this process anew under the settings, unless it has some or the system is not Linux.

    To be called before anything else is imported, when it costs hundredths of a second.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ:
        return
    settings = {"GOMP_SPINCOUNT": SPIN_COUNT, **os.environ, "GLIBC_TUNABLES": TUNABLES}
    os.execve(sys.executable, sys.orig_argv, settings)


class _Mallinfo2(ctypes.Structure):
    """What glibc 2.33 and later says of its heap, in bytes (malloc.h, struct mallinfo2)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def bytes_in_use() -> int | None:
    """Bytes that malloc has handed out and not had back in this thread's arena; None where the system cannot say."""
    try:
        tell = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    tell.restype = _Mallinfo2
    return int(tell().uordblks)
