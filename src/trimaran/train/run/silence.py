"""What a rank that has fallen silent tells whoever asks by SIGUSR1: its stacks, and the collectives it waits in."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from torch._C import _distributed_c10d as torch_c10d

Handler = Callable[[int, FrameType | None], object]


def stacks_before(handler: Handler) -> None:
    """From now on SIGUSR1 writes the stacks of all threads to stderr, then calls `handler`."""
    # faulthandler takes the signal over once: registered already, it would leave it to the handler alone
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, handler)
    faulthandler.register(signal.SIGUSR1, chain=True)


def tell_collectives(path: Path, *, on_gpu: bool) -> None:
    """From now on SIGUSR1 also has PyTorch's flight recorder write what has not ended yet to `path`, as JSON.

    A rank that waits in a collective runs no Python handler. The C half of Python's signal handling runs at once
    all the same and wakes a thread, which needs no more than that the wait holds no lock of the interpreter's.
    Must be called on the main thread.
    """
    # NCCL's collectives are in a recorder of their own; that of all other backends is in every build
    record = getattr(torch_c10d, "_dump_nccl_trace_json" if on_gpu else "_dump_fr_trace_json", None)
    if record is None:
        return
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    before = signal.getsignal(signal.SIGUSR1)
    stacks_before(before if callable(before) else lambda number, frame: None)

    def answer() -> None:
        while number := os.read(woken, 1):
            if number[0] == signal.SIGUSR1:
                partial = path.with_name(f"{path.name}.partial")
                with contextlib.suppress(OSError, RuntimeError):  # a rank about to be ended has nobody to tell
                    partial.write_bytes(record(includeCollectives=True, onlyActive=True))
                    partial.replace(path)

    threading.Thread(target=answer, name="flight recorder", daemon=True).start()
