"""How a process becomes one rank: it ties its life to its launcher's and takes its cores and limits.

Run by file name as `python -I -S rank_process.py LAUNCHER_PID CORES CGROUP DATA_BYTES COMMAND...` it turns into the
rank's command, with nothing of Trimaran imported, so that it costs milliseconds and works under any interpreter. Doing
this between fork and exec instead would run Python code where only async-signal-safe calls are allowed. `-` stands for
no cores, no cgroup, no limit.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER_GONE = 75


def settled(settles: tuple[str, ...], command: tuple[str, ...]) -> list[str]:
    """The command line by which a child of this process settles (cores, cgroup, data bytes) and becomes `command`."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *settles, *command]


def settle(launcher: int, cores: str, cgroup: str, data_bytes: str) -> None:
    """Ask the kernel for SIGKILL when the launcher dies, check that it has not yet, take cores and limits."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(LAUNCHER_GONE)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if cgroup != "-":
        with open(cgroup, "w") as processes:  # noqa: PTH123 - pathlib would double the time that this file takes
            processes.write("0")
    if data_bytes != "-":
        resource.setrlimit(resource.RLIMIT_DATA, (int(data_bytes), int(data_bytes)))


def main() -> None:
    """Settle, and turn into the command."""
    launcher, cores, cgroup, data_bytes, *command = sys.argv[1:]
    settle(int(launcher), cores, cgroup, data_bytes)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
