"""A rank that misbehaves on request: `fake_worker.py BEHAVIOUR JOB.json`. Needs no torch, so tests start fast."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

faulthandler.register(signal.SIGUSR1)
behaviour, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
out_dir, steps = Path(job["out_dir"]), job["steps"]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
last = rank == world - 1
if behaviour.startswith("{"):  # one behaviour for each layout
    layout = job["layout"]
    behaviour = json.loads(behaviour)[f"dp{layout['dp']},tp{layout['tp']},pp{layout['pp']},mbs{layout['mbs']}"]


SEEN = ("MASTER_", "LOCAL_", "OMP_", "GLOO_", "TORCHELASTIC_", "A_VARIANT")


def beat() -> None:
    (out_dir / f"heartbeat.{rank}").touch()
    if rank == 0:
        with (out_dir / "log.jsonl").open("a") as log:
            log.write("{}\n")


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def oom() -> None:
    (out_dir / f"error.{rank}.json").write_text('{"kind": "oom"}')
    print("DefaultCPUAllocator: can't allocate memory", file=sys.stderr)
    sys.exit(41)


def bad_alloc() -> None:
    print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr, flush=True)
    os.abort()


def fail() -> None:
    raise ValueError("the data has run out")


def eat() -> None:
    hoard = bytearray(400 << 20)
    hoard[::4096] = b"x" * len(hoard[::4096])
    sleep_for_ever()


def flood() -> None:
    while True:
        sys.stdout.buffer.write(os.urandom(1 << 16))
        time.sleep(0.01)


def meet(step: int) -> None:
    """Wait for all ranks, as a collective does; one that does not come has died."""
    (out_dir / f"met.{rank}.{step}").touch()
    deadline = time.monotonic() + (30 if step == 0 else 3)  # ranks of a busy machine start far apart
    while not all((out_dir / f"met.{other}.{step}").exists() for other in range(world)):
        if time.monotonic() > deadline:
            raise ConnectionResetError("PeerDiedError: a process of the same group has ended")
        time.sleep(0.02)


def fill_disk() -> None:
    with (out_dir / "junk").open("wb", buffering=0) as junk:
        while junk.write(bytes(1 << 20)):
            pass


def slow() -> None:
    for _ in range(1000):
        time.sleep(0.05)
        beat()


# What ranks do after the second step: the last one alone, while the others wait for it as in a
# collective that it never joins; or all of them.
LAST = {
    "oom": oom,
    "bad_alloc": bad_alloc,
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fail": fail,
    "hang": sleep_for_ever,
    "fill-disk": fill_disk,
}
ALL = {"eat": eat, "flood": flood, "slow": slow}

if behaviour == "exit-2":
    print("data_dir: holds no tokens: run trimaran.train.programs.tokenise first", file=sys.stderr)
    sys.exit(2)
if behaviour == "silent":
    sleep_for_ever()
if behaviour == "hang-first":
    (out_dir / f"heartbeat.{rank}").write_text("import_torch")
    time.sleep(0.3)
    (out_dir / f"heartbeat.{rank}").write_text("step" if last or rank else "connect")
    sleep_for_ever()
if behaviour == "leave-children":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(out_dir)])

for step in range(steps):
    time.sleep(0.5 if behaviour in ("ok-slowly", "meet") else float(os.environ.get("FAKE_STEP_S", "0.02")))
    beat()
    if behaviour == "meet":
        meet(step)
    if step == 1 and behaviour in LAST:
        (LAST[behaviour] if last else sleep_for_ever)()
    if step == 1 and behaviour in ALL:
        ALL[behaviour]()

result = {
    "status": "ok",
    "steps": steps,
    "sec_per_it": [9.0, 8.0, *(1.0 + 0.1 * n for n in range(steps - 2))],
    "losses": [5.0 - n for n in range(steps)],
    "mem_gib_per_rank": [1.0 + n for n in range(world)],
    "startup_s": {"import": 0.1},
    "ranks_saw": {
        **{name: value for name, value in os.environ.items() if name.startswith(SEEN)},
        "cores": len(os.sched_getaffinity(0)),
        "niceness": os.nice(0),
        "python": sys.executable,
    },
}
if behaviour == "diverge":
    result["losses"] = [5.0, 4.0, float("nan"), *([1.0] * (steps - 3))]
text = json.dumps(result)
text = {"cut": text[: len(text) // 2], "garbage": "\x00\x1b[2Jnonsense", "deep": "[" * 100_000}.get(behaviour, text)
if behaviour == "few-steps":
    text = json.dumps({**result, "sec_per_it": [1.0]})
if behaviour == "minus":
    text = json.dumps({**result, "sec_per_it": [-1.0] * steps})
if rank == 0 and behaviour != "no-result":
    (out_dir / "result.json").write_text(text)
