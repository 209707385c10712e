"""What runs on a Slurm node: one rank (`rank LAUNCH.json`), or nothing while nodes are held (`hold LIFELINE`).

Run by file name as `python -I -S slurm_node.py ...` with nothing of Trimaran imported. Both end when the lifeline,
a file that the sweep touches, has not changed for LOST_AFTER_S: then the sweep is gone, and nobody waits for them.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LOST_AFTER_S = float(os.environ.get("TRIMARAN_LOST_AFTER_S", "120"))
_LOOK_EVERY_S = LOST_AFTER_S / 24
_POLL_S = 0.05
_MEET_WITHIN_S = 300.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_SWEEP_GONE = 76


class Lifeline:
    """Tells, by this node's own clock, for how long the sweep has given no sign."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = 0
        self._seen_at = self._looked_at = time.monotonic()

    def is_cut(self) -> bool:
        """Whether the sweep is gone. Looks at the file every few seconds only."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            try:
                with Path(self._path).open("rb") as file:  # opening makes a network file system look anew
                    stamp = os.fstat(file.fileno()).st_mtime_ns
            except OSError:
                stamp = self._stamp
            if stamp != self._stamp:
                self._stamp, self._seen_at = stamp, now
        return now - self._seen_at > LOST_AFTER_S


@dataclass
class Meeting:
    """Where rank 0 listens, the address of this rank's node, and rank 0's bound socket."""

    address: str
    port: int
    own: str
    held: socket.socket | None = None


def hold(lifeline: str) -> int:
    """Keep the allocation until the sweep lets go of it."""
    line = Lifeline(lifeline)
    while Path(lifeline).exists() and not line.is_cut():
        time.sleep(1.0)
    return 0


def run_rank(launch_file: str) -> int:
    """Be the parent of one rank: let it find the others, see it end, write down how."""
    launch = json.loads(Path(launch_file).read_text())
    rank, folder = int(os.environ["SLURM_PROCID"]), Path(launch["out_dir"])
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Slurm signals all processes of a step: the rank answers SIGUSR1 with its stacks and dies of SIGTERM by itself
    told_to_end: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: _answer(folder, rank))
    signal.signal(signal.SIGTERM, lambda number, frame: told_to_end.append(number))
    line = Lifeline(launch["lifeline"])
    meeting = _meet(rank, folder, line)
    held = meeting.held
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(launch["threads_per_rank"]),
        "MKL_NUM_THREADS": str(launch["threads_per_rank"]),
        "PYTHONFAULTHANDLER": "1",
        "GLOO_SOCKET_IFNAME": _interface(meeting.own),
        **launch["environment"],
        "RANK": str(rank),
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "WORLD_SIZE": str(launch["ranks"]),
        "LOCAL_WORLD_SIZE": str(_local_world_size()),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
    }
    if held is not None:
        environment["TRIMARAN_RENDEZVOUS_FD"] = str(held.fileno())
    program = Path(__file__).parents[3] / "protocol" / "rank_process.py"
    become = [sys.executable, "-I", "-S", str(program), str(os.getpid()), "-", "-"]
    data = "-" if launch["memory_gib"] is None else str(int(launch["memory_gib"] * 2**30))
    kills_before = _kernel_oom_kills()
    with (folder / f"stdout.{rank}").open("wb") as stdout, (folder / f"stderr.{rank}").open("wb") as stderr:
        process = subprocess.Popen(
            [*become, data, *launch["command"]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=() if held is None else (held.fileno(),),
            cwd=folder,
        )
    if told_to_end:
        process.terminate()  # it came before the rank was there to be told
    while process.poll() is None:
        if line.is_cut():
            process.kill()
            process.wait()
            return _SWEEP_GONE
        time.sleep(_POLL_S)
    _end_descendants()
    oom = process.returncode == -signal.SIGKILL and _kernel_oom_kills() > kills_before
    _write(folder / f"exit.{rank}", {"code": process.returncode, "oom": oom, "told": bool(told_to_end)})
    return 0


def _meet(rank: int, folder: Path, line: Lifeline) -> Meeting:
    """Rank 0 takes a port and writes down where; the others wait for that."""
    file = folder / "rendezvous.json"
    if rank == 0:
        own = _node_address()
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((own, 0))
        port = held.getsockname()[1]
        _write(file, {"address": own, "port": port, "step": os.environ.get("SLURM_STEP_ID", "")})
        return Meeting(own, port, own, held)
    deadline = time.monotonic() + _MEET_WITHIN_S
    while time.monotonic() < deadline and not line.is_cut():
        os.listdir(folder)  # noqa: PTH208 - makes a network file system forget that the file was not there
        try:
            place = json.loads(file.read_text())
        except (OSError, ValueError):
            time.sleep(_POLL_S)
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((place["address"], place["port"]))
            return Meeting(place["address"], place["port"], way.getsockname()[0])
    sys.exit(f"rank {rank} found no {file} within {_MEET_WITHIN_S:.0f} s: is the folder shared by all nodes?")


def _node_address() -> str:
    """This node's address as Slurm itself reaches it."""
    name = os.environ.get("SLURMD_NODENAME", "")
    done = subprocess.run(
        ["scontrol", "show", "node", name, "--oneliner"], capture_output=True, text=True, check=False
    )  # fmt: skip
    words = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    return socket.gethostbyname(words.get("NodeAddr") or socket.gethostname())


def _interface(address: str) -> str:
    """Name of the network interface that has `address`; empty where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _index, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _local_world_size() -> int:
    """Ranks on this node, from `2(x3),1`: two on each of three nodes, one on the fourth."""
    sizes: list[int] = []
    for part in os.environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.partition("(x")
        sizes += [int(count)] * int(times.rstrip(")") or 1)
    return sizes[int(os.environ["SLURM_NODEID"])]


def _end_descendants() -> None:
    """End what the rank left behind: as their subreaper this process is the parent of all orphans."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    deadline = time.monotonic() + _LOOK_EVERY_S
    while time.monotonic() < deadline:
        try:
            left = children.read_text().split()
        except OSError:
            return
        if not left:
            return
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_POLL_S)


def _kernel_oom_kills() -> int:
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _answer(folder: Path, rank: int) -> None:
    """Tell the watch, which finds a rank silent, that its node lives."""
    with contextlib.suppress(OSError):
        (folder / f"answer.{rank}").touch()


def _write(path: Path, content: dict[str, object]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit({"hold": hold, "rank": run_rank}[sys.argv[1]](sys.argv[2]))
