"""What runs on a Slurm node: one rank (`rank LAUNCH.json`), or nothing while nodes are held (`hold LIFELINE`).

Run by file name as `python -I -S node.py ...` with nothing of Trimaran imported; the launcher imports from here what
both must know, and states the rest in LAUNCH.json. Both programs end when the lifeline,
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
from typing import Any

LOST_AFTER_S = float(os.environ.get("TRIMARAN_LOST_AFTER_S", "120"))
_LOOK_EVERY_S = LOST_AFTER_S / 24
_POLL_S = 0.05
_MEET_WITHIN_S = 300.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_ANY_PORT = 9  # nothing is sent
# More than what is written of how a rank ended.
_ENDING_BYTES = 128
SWEEP_GONE = 76
# Asks whether a rank's parent lives. Processes that do not know of it are not disturbed.
ASKING = signal.SIGURG


def exit_file(folder: Path, rank: int) -> Path:
    """How a rank ended, as JSON: `code`, `oom` (by the kernel, for memory), `asked_to_end` (by Slurm)."""
    return folder / f"exit.{rank}"


def node_file(folder: Path, rank: int) -> Path:
    """The name of the node that the rank runs on."""
    return folder / f"node.{rank}"


def answer_file(folder: Path, rank: int) -> Path:
    """There once the rank's parent was asked whether it lives: the state of the rank's process.

    That is the kernel's letter (`T`: stopped), or nothing where there is no such process yet.
    """
    return folder / f"answer.{rank}"


def meeting_file(folder: Path) -> Path:
    """Where the ranks meet: `address` and `port` of rank 0, and the `step` of Slurm's job that they are, as JSON."""
    return folder / "rendezvous.json"


class Lifeline:
    """Tells, by this node's clock, for how long the sweep has given no sign."""

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
    node_address: str
    held: socket.socket | None = None


class Ending:
    """The file that says how a rank ended. Its room is taken before the rank begins, which may fill the disk."""

    def __init__(self, file: Path) -> None:
        """Take the room. Raises OSError where there is none."""
        self._file, self._held = file, file.with_name(f".{file.name}.{os.getpid()}")
        # held open, so that nothing is ever written into the folder of a later run of the same name
        self._descriptor = os.open(self._held, os.O_WRONLY | os.O_CREAT, 0o644)
        self._write(b"")

    def tell(self, code: int, *, oom: bool = False, asked_to_end: bool = False) -> None:
        """Write down how the rank ended: see `exit_file`."""
        self._write(json.dumps({"code": code, "oom": oom, "asked_to_end": asked_to_end}).encode())
        self._held.replace(self._file)

    def _write(self, content: bytes) -> None:
        os.pwrite(self._descriptor, content.ljust(_ENDING_BYTES), 0)
        os.fsync(self._descriptor)  # where a network file system finds out whether there is room


def hold(lifeline: str) -> int:
    """Keep the allocation until the sweep lets go of it."""
    line = Lifeline(lifeline)
    while not _is_gone(lifeline) and not line.is_cut():
        time.sleep(1.0)
    return 0


def _is_gone(path: str) -> bool:
    """Whether a file was removed: a file system that cannot say for a moment has not removed it."""
    try:
        Path(path).stat()  # `exists` of a later Python takes every error for a file that is not there
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def run_rank(launch_file: str) -> int:
    """Be the parent of one rank: let it find the others, see it end, write down how."""
    launch = json.loads(Path(launch_file).read_text())
    rank, folder = launch["ranks_of_tasks"][int(os.environ["SLURM_PROCID"])], Path(launch["out_dir"])
    ending = Ending(exit_file(folder, rank))
    try:
        return _see_to_its_end(launch, rank, folder, ending)
    except OSError as error:
        # what the rank itself has said stands before it; a full disk takes no word more
        with contextlib.suppress(OSError), (folder / launch["stderr"].format(rank)).open("a") as stderr:
            stderr.write(f"node {os.environ.get('SLURMD_NODENAME', '')}: {error}\n")
        ending.tell(1)
        return 1


def _see_to_its_end(launch: dict[str, Any], rank: int, folder: Path, ending: Ending) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Slurm signals all processes of a step: the rank answers SIGUSR1 with its stacks, dies of SIGTERM by itself, and
    # takes no notice of SIGURG
    asked_to_end: list[int] = []
    started: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.signal(ASKING, lambda number, frame: _answer(folder, rank, started))
    signal.signal(signal.SIGTERM, lambda number, frame: asked_to_end.append(number))
    node_file(folder, rank).write_text(os.environ.get("SLURMD_NODENAME", ""))
    line = Lifeline(launch["lifeline"])
    meeting = _meet(rank, folder, line)
    held = meeting.held
    environment = {
        # a torchrun around the sweep has a store of its own, at which these ranks would wait
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        "GLOO_SOCKET_IFNAME": interface_of(meeting.node_address),
        **launch["environment"],
        "RANK": str(rank),
        "LOCAL_RANK": str(launch["slots"][rank]) if launch["slots"] else os.environ["SLURM_LOCALID"],
        "WORLD_SIZE": str(launch["ranks"]),
        "LOCAL_WORLD_SIZE": str(_local_world_size()),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
    }
    if held is not None:
        environment[launch["rendezvous_fd"]] = str(held.fileno())
    become = [sys.executable, "-I", "-S", launch["rank_process"], str(os.getpid()), "-", "-"]
    data = "-" if launch["memory_gib"] is None else str(int(launch["memory_gib"] * 2**30))
    kills_before = _kernel_oom_kills()
    stdout_file, stderr_file = (folder / launch[stream].format(rank) for stream in ("stdout", "stderr"))
    with stdout_file.open("wb") as stdout, stderr_file.open("wb") as stderr:
        process = subprocess.Popen(
            [*become, data, *launch["command"]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=() if held is None else (held.fileno(),),
            cwd=folder,
        )
    started.append(process.pid)
    if asked_to_end:
        process.terminate()  # it came before the rank was there to be asked
    while process.poll() is None:
        if line.is_cut():
            process.kill()
            process.wait()
            return SWEEP_GONE
        time.sleep(_POLL_S)
    _end_descendants()
    oom = process.returncode == -signal.SIGKILL and _kernel_oom_kills() > kills_before
    ending.tell(process.returncode, oom=oom, asked_to_end=bool(asked_to_end))
    return 0


def _meet(rank: int, folder: Path, line: Lifeline) -> Meeting:
    """Rank 0 takes a port and writes down where; the others wait for that."""
    file = meeting_file(folder)
    if rank == 0:
        address = own_address()
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, 0))
        port = held.getsockname()[1]
        _write(file, {"address": address, "port": port, "step": os.environ.get("SLURM_STEP_ID", "")})
        return Meeting(address, port, address, held)
    deadline = time.monotonic() + _MEET_WITHIN_S
    while time.monotonic() < deadline and not line.is_cut():
        os.listdir(folder)  # noqa: PTH208 - makes a network file system forget that the file was not there
        try:
            place = json.loads(file.read_text())
        except (OSError, ValueError):
            time.sleep(_POLL_S)
            continue
        return Meeting(place["address"], place["port"], address_towards(place["address"], place["port"]))
    if line.is_cut():
        sys.exit(SWEEP_GONE)
    raise TimeoutError(f"rank {rank} found no {file} within {_MEET_WITHIN_S:.0f} s: is the folder shared by all nodes?")


def node_address(name: str) -> str:
    """A node's address as Slurm itself reaches it, which needs no name service; empty where Slurm has none."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "node", name, "--oneliner"], capture_output=True, text=True, check=False
        )  # fmt: skip
        words = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
        return socket.gethostbyname(words["NodeAddr"])
    except (OSError, KeyError):
        return ""


def own_address() -> str:
    """The address at which this node's ranks are reached: Slurm's own, or else the one by which it reaches srun's node.

    Containers may have no scontrol, and hosts often call themselves 127.0.1.1. Raises OSError where there is none.
    """
    if address := node_address(os.environ.get("SLURMD_NODENAME", "")):
        return address
    with contextlib.suppress(OSError, KeyError):
        return address_towards(os.environ["SLURM_LAUNCH_NODE_IPADDR"], _ANY_PORT)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise OSError(
            f"ranks meet at an IPv4 address, and neither Slurm nor the name service has one of this node ({error}): "
            f"give it one as NodeAddr of slurm.conf or in /etc/hosts"
        ) from None


def address_towards(address: str, port: int) -> str:
    """The address of this node by which it reaches `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((address, port))
        name: str = way.getsockname()[0]
        return name


def interface_of(address: str) -> str:
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
            with contextlib.suppress(OSError):
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


def _answer(folder: Path, rank: int, started: list[int]) -> None:
    """Tell the watch, which finds a rank silent, that its node lives, and how the rank's process stands."""
    state = ""
    for process in started:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{process}/stat").read_text()
            state = stat[stat.rindex(")") + 2]
    with contextlib.suppress(OSError):
        answer_file(folder, rank).write_text(state)


def _write(path: Path, content: dict[str, object]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit({"hold": hold, "rank": run_rank}[sys.argv[1]](sys.argv[2]))
