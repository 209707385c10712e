"""Becomes one rank: ties its life to the launcher's, then turns into the rank's command.

Run by file name as `python -I -S rank.py LAUNCHER_PID COMMAND...` with nothing of Trimaran
imported, so that it costs milliseconds and works under any interpreter. Doing this between
fork and exec instead would run Python code where only async-signal-safe calls are allowed.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER_GONE = 75


def main() -> None:
    """Ask the kernel for SIGKILL when the launcher dies, check that it has not yet, and exec."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        sys.exit(LAUNCHER_GONE)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
