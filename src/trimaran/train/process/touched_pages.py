"""Pages of mapped files, the libraries, that a forked rank would have touched by importing them itself.

A fork takes along what a process has written, but of mapped files only their addresses: pages count as the child's
once it touches them. A rank's measured memory has to be that of one which was started by itself, whose import touched
some 80 MiB of them.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np

MADV_POPULATE_READ = 22  # linux/mman.h, since Linux 5.14
_PRESENT = np.uint64(1 << 63)  # Documentation/admin-guide/mm/pagemap.rst

Pages = list[tuple[int, int]]


def resident_pages_of_files() -> Pages:
    """(address, bytes) of each run of pages of mapped files that this process has touched and not written."""
    pages: Pages = []
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, access, _, _, inode, *_ = line.split()
            if inode == "0" or access[1] == "w":
                continue
            begin, end = (int(address, 16) for address in addresses.split("-"))
            pagemap.seek(begin // mmap.PAGESIZE * 8)
            entries = np.frombuffer(pagemap.read((end - begin) // mmap.PAGESIZE * 8), np.uint64)
            touched = np.concatenate(([0], (entries & _PRESENT) != 0, [0])).astype(np.int8)
            changes = np.flatnonzero(np.diff(touched)).reshape(-1, 2).tolist()
            pages += [(begin + first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE) for first, last in changes]
    return pages


def touch(pages: Pages) -> None:
    """Have the pages count as this process's; an older kernel leaves that to their use."""
    libc = ctypes.CDLL(None)
    for address, length in pages:
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), MADV_POPULATE_READ)
