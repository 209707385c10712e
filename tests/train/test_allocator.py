"""What the heap of a rank holds of tensors that come and go, in a process under the rank's settings."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from trimaran.train.process.allocator import TUNABLES

# As of layers that keep one tensor each, and let go of another that they had beside it; sizes in tensors.
LAYERS = 16
PATTERN = f"""
import ctypes
import os

libc = ctypes.CDLL(None)
libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
SIZE = 4 << 20

def tensor():
    place = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(place), 64, SIZE) == 0
    libc.memset(place, 1, SIZE)
    return place

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
for layer in range({LAYERS}):
    passing = tensor()
    tensor()
    libc.free(passing)
print((resident() - before) / SIZE)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_tensor_goes_where_one_of_its_size_has_been() -> None:
    settings = {**os.environ, "GLIBC_TUNABLES": TUNABLES}
    ran = subprocess.run([sys.executable, "-c", PATTERN], env=settings, capture_output=True, text=True, check=True)
    # all that are kept and one that passes; 32 where glibc keeps small pieces apart
    assert LAYERS < float(ran.stdout) < LAYERS + 2
