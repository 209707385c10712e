"""Becomes one rank: ties its life to the launcher's, takes its cores and limits, turns into the rank's command.

Run by file name as `python -I -S rank.py LAUNCHER_PID CORES CGROUP DATA_BYTES COMMAND...` with nothing of Trimaran
imported, so that it costs milliseconds and works under any interpreter. Doing this between fork and exec instead
would run Python code where only async-signal-safe calls are allowed. `-` stands for no cores, no cgroup, no limit.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER_GONE = 75


def main() -> None:
    """Ask the kernel for SIGKILL when the launcher dies, check that it has not yet, settle, and exec."""
    launcher, cores, cgroup, data_bytes, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        sys.exit(LAUNCHER_GONE)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if cgroup != "-":
        with open(cgroup, "w") as processes:  # noqa: PTH123 - pathlib would double the time that this file takes
            processes.write("0")
    if data_bytes != "-":
        resource.setrlimit(resource.RLIMIT_DATA, (int(data_bytes), int(data_bytes)))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
