"""Trimaran's programs that need PyTorch, run as processes: probe, data, sample, convert."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from trimaran.files.catalogue import require_room, write_atomically
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import printable
from trimaran.protocol import progress
from trimaran.protocol.exits import signal_name
from trimaran.recipe.recipe import Recipe
from trimaran.study.stated import slots_wanted, stated_layouts

# More than any probe of one machine, or of hundreds of nodes with their links, writes.
CLUSTER_BYTES = 1 << 19


def require_torch(what: str) -> None:
    """Raise TrimaranError unless PyTorch is installed (planning alone does not need it)."""
    if importlib.util.find_spec("torch") is None:
        raise TrimaranError(f"{what} needs PyTorch, which is not installed: pip install 'trimaran[train]'")


def require_devices(recipe: Recipe, cluster: Cluster) -> None:
    """Raise TrimaranError where ranks that are started on this machine would find no device of the cluster's kind."""
    sweep = recipe.sweep
    if cluster.device.kind != "gpu" or sweep.slurm is not None or sweep.ray is not None:
        return
    if any(variant.python is not None for variant in sweep.variants):
        return  # another interpreter may find what this one does not
    require_torch("a cluster of GPUs")
    look = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-P", "-c", look], capture_output=True, check=False).returncode:
        raise TrimaranError(
            f"cluster {cluster.name} is of GPUs, and PyTorch finds none on this machine: run it there, leave cluster "
            f"out to run on this machine's processors, or look ahead with train --dry-run"
        )


def run_program(
    module: str,
    arguments: Sequence[str],
    what: str,
    *,
    capture: bool = False,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run one of Trimaran's torch programs to its end; its standard output when captured.

    `environment` is added to this process's. Its lines of progress are passed on as they come. Raises TrimaranError
    with the program's own last line when it fails, and with the signal that killed it.
    """
    require_torch(what)
    command = [sys.executable, "-P", "-m", module, *arguments]
    last = ""
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdout=output if capture else None,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if line.startswith(progress.MARK):
                    print(printable(line.removeprefix(progress.MARK)), end="", file=sys.stderr, flush=True)
                elif line.strip():
                    last = line.strip()
            status = process.wait()
        except BaseException:
            process.terminate()  # a signal to this process alone would leave it at work, and this one waiting for it
            raise
        output.seek(0)
        told = output.read()
    if status < 0:
        raise TrimaranError(f"{what}: the process that does it was killed by {signal_name(-status)}: try it again")
    if status:
        raise TrimaranError(last.removeprefix("trimaran: ") or f"{what} ended with status {status}")
    return told


def run_program_on(job: BaseModel, module: str, what: str) -> None:
    """Run one of Trimaran's torch programs on a job file, which is gone afterwards. Raises as `run_program` does."""
    with tempfile.TemporaryDirectory(prefix="trimaran-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(job_text(job, what), encoding="utf-8")
        run_program(module, [str(path)], what)


def job_text(job: BaseModel, what: str) -> str:
    """A job as JSON. Raises TrimaranError where a path or a text in it is not Unicode."""
    try:
        return job.model_dump_json(indent=1)
    except PydanticSerializationError:
        raise TrimaranError(f"{what}: a path or text that it is given is not Unicode: rename or retype it") from None


def probe_machine(recipe: Recipe, layouts: Sequence[Layout], cluster_file: Path) -> None:
    """Measure this machine for the recipe's model, stack and micro-batches, into a cluster file.

    It has slots for the layouts that are given besides. `model.json` and `stack.json` are left beside it. Raises
    TrimaranError when the probe fails.
    """
    require_room(cluster_file, CLUSTER_BYTES)
    model, stack = cluster_file.with_name("model.json"), cluster_file.with_name("stack.json")
    write_atomically(model, recipe.workload.model.model_dump_json())
    write_atomically(stack, recipe.stack.model_dump_json())
    arguments = ["--quick", "--slots", str(slots_wanted(recipe, layouts)), "--model", str(model), "--stack", str(stack)]
    arguments += ["--seq-len", str(recipe.workload.seq_len), "-o", str(cluster_file)]
    for mbs in sorted({layout.mbs for layout in stated_layouts(recipe)}):
        arguments += ["--mbs", str(mbs)]
    run_program("trimaran.probe", arguments, "probe")
