"""A real Slurm of one controller and three nodes on this machine, in a folder of its own, on the loopback alone.

The default partition has two of the nodes, `wide` all three.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
CORES_PER_NODE = 8
NODES = ("n1", "n2", "n3")
_OWN_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=512m tmpfs /dev/shm && exec "$@"', "sh")
# In the environment of a node's daemon and of what watches its steps; ranks have Slurm's own variable.
_MARK = "VIRTUAL_NODE"
_READY_WITHIN_S = 60.0

_CONF = """
ClusterName=trimaran-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=500
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ReturnToService=2
SlurmdTimeout=15
JobRequeue=0
KillWait=2
MinJobAge=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} RealMemory=4000 Features=fast
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} RealMemory=4000 Features=slow
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs={cores} RealMemory=4000 Features=slow
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP
PartitionName=wide Nodes=n1,n2,n3 MaxTime=60 State=UP
PartitionName=other Nodes=n2 MaxTime=60 State=UP
"""


def missing() -> list[str]:
    """What this machine lacks to run a Slurm of its own."""
    return [program for program in PROGRAMS if shutil.which(program, path=_search_path()) is None]


def _search_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@contextmanager
def virtual_cluster(folder: Path) -> Iterator[Path]:
    """Start munge, the controller and both nodes; give the path of slurm.conf; end them all afterwards."""
    for name in ("munge", "state"):
        (folder / name).mkdir(parents=True)
    conf = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    ports = [free_port() for _ in range(1 + len(NODES))]
    conf.write_text(_CONF.format(host=host, folder=folder, ports=ports, cores=CORES_PER_NODE))
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munge = {name: f"{folder}/munge/{name}" for name in ("socket", "pid", "log", "seed")}
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge['socket']}",
         f"--pid-file={munge['pid']}", f"--log-file={munge['log']}", f"--seed-file={munge['seed']}"],
        ["slurmctld", "-D", "-c", "-f", str(conf)],
    ]  # fmt: skip
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": _search_path()}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"daemon-{number}.log").open("wb") as log:
                daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            if number == 0:
                _wait_for(Path(munge["socket"]).exists, "munged's socket", folder)
        daemons += [start_node(conf, name) for name in NODES]
        wait_for_idle_nodes(conf)
        yield conf
    finally:
        daemons += _RESTARTED
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def wait_for_idle_nodes(conf: Path) -> None:
    """Wait until a job may have any of the nodes: one that still ends a job, or is just back, would be passed over.

    Slurm drains a node where a step's processes do not end within a minute; it takes jobs again.
    """
    environment = {**os.environ, "SLURM_CONF": str(conf)}

    def idle() -> bool:
        if drained := _nodes(environment, "drain"):
            resume = ["scontrol", "update", f"NodeName={','.join(sorted(drained))}", "State=RESUME"]
            subprocess.run(resume, env=environment, check=True)
        return _nodes(environment, "idle") == set(NODES)

    _wait_for(idle, "idle nodes", conf.parent)


def start_node(conf: Path, name: str, *, own_memory: bool = False) -> subprocess.Popen[bytes]:
    """Start a node's daemon; with a /dev/shm of its own, that is gone once nothing of the node runs."""
    command = [*(_OWN_MEMORY if own_memory else ()), "slurmd", "-D", "-N", name, "-f", str(conf)]
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": _search_path(), _MARK: name}
    with (conf.parent / f"daemon-{name}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


@contextmanager
def killed_node(conf: Path, name: str) -> Iterator[None]:
    """Kill everything that is the node, as when its power goes; start it again at the end of the block."""
    _power_off(conf, name)
    try:
        yield
    finally:
        _start_again(conf, name)


@contextmanager
def controller_away(conf: Path) -> Iterator[None]:
    """Stop the controller, as for an upgrade; start it again, with what it has saved, at the end of the block."""
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": _search_path()}
    pid_file = conf.parent / "slurmctld.pid"
    os.kill(int(pid_file.read_text()), signal.SIGTERM)
    _wait_for(lambda: not pid_file.exists(), "end of the controller", conf.parent)
    try:
        yield
    finally:
        with (conf.parent / "daemon-1.log").open("ab") as log:
            command = ["slurmctld", "-D", "-f", str(conf)]
            _RESTARTED.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        # it knows its nodes again once they have answered
        known = "idle,mixed,allocated,completing"
        _wait_for(lambda: _nodes(environment, known) == set(NODES), "known nodes", conf.parent)


@contextmanager
def nodes_with_own_memory(conf: Path, *names: str) -> Iterator[None]:
    """Have the nodes see a /dev/shm of their own, as other machines do; not what is mounted elsewhere meanwhile."""
    for name in names:
        _power_off(conf, name)
        _start_again(conf, name, own_memory=True)
    try:
        yield
    finally:
        for name in names:
            _power_off(conf, name)
            _start_again(conf, name)


def _power_off(conf: Path, name: str) -> None:
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            variables = file.read_bytes().split(b"\0")
            marked = {f"{mark}={name}".encode() for mark in (_MARK, "SLURMD_NODENAME")}
            if not marked.isdisjoint(variables) and f"SLURM_CONF={conf}".encode() in variables:
                os.kill(int(file.parent.name), signal.SIGKILL)


def _start_again(conf: Path, name: str, *, own_memory: bool = False) -> None:
    daemon = start_node(conf, name, own_memory=own_memory)
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    # what waits in the queue may have it at once
    _wait_for(lambda: name in _nodes(environment, "idle,mixed,allocated"), f"node {name}", conf.parent)
    _RESTARTED.append(daemon)


# Daemons that tests have started again.
_RESTARTED: list[subprocess.Popen[bytes]] = []


def _nodes(environment: dict[str, str], states: str) -> set[str]:
    """Names of the nodes that are in one of the states, which commas part."""
    command = ["sinfo", "--noheader", "--Node", "--partition=wide", f"--states={states}", "--format=%N"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return set(done.stdout.split())


def _wait_for(ready: Callable[[], bool], what: str, folder: Path) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in sorted(folder.glob("*.log")))
            raise RuntimeError(f"no {what} within {_READY_WITHIN_S:.0f} s\n{logs}")
        time.sleep(0.1)
