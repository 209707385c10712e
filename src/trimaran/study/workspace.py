"""Workspace: the folder of one study - its cluster file, token files, trials, store and training."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from trimaran.files.catalogue import load_cluster, write_atomically
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import check_layout
from trimaran.nouns.cluster import Cluster, Device, Link
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol import progress
from trimaran.protocol.job import DataJob
from trimaran.recipe.recipe import Recipe


@dataclass(frozen=True)
class Workspace:
    """Paths of a study, and the two things that have to be made before the first trial."""

    folder: Path

    @property
    def store(self) -> Path:
        """The database of measurements."""
        return self.folder / "store.sqlite"

    @property
    def trials(self) -> Path:
        """A folder for every trial's log and evidence."""
        return self.folder / "trials"

    @property
    def calibration(self) -> Path:
        """The cost model fitted to this study's measurements."""
        return self.folder / "calibration.toml"

    @property
    def table(self) -> Path:
        """What was measured, as a Markdown table."""
        return self.folder / "table.md"

    @property
    def training(self) -> Path:
        """The training's log and result."""
        return self.folder / "train"

    @property
    def cluster_file(self) -> Path:
        """This machine, as the probe measured it."""
        return self.folder / "cluster.toml"

    def cluster(self, recipe: Recipe, layouts: Sequence[Layout] | None = None) -> Cluster:
        """The recipe's cluster, or this machine as a probe measures it on the first call.

        Layouts to run on it, the recipe's own if none are given, are refused before the probe where no machine of
        as many slots could run them. Raises TrimaranError for those, and when the probe fails or its file is not valid.
        """
        if recipe.cluster is not None:
            return recipe.cluster
        if recipe.sweep.slurm is not None:
            raise TrimaranError(
                f"recipe {recipe.name}: cluster is missing, and a probe of this machine says nothing of Slurm's nodes: "
                f'name one, as cluster = "dgx-h100", or a file that `trimaran probe` wrote there'
            )
        if not self.cluster_file.exists():
            for layout in stated_layouts(recipe) if layouts is None else layouts:
                check_layout(layout, recipe.workload, unprobed_machine(recipe), recipe.stack)
            self.folder.mkdir(parents=True, exist_ok=True)
            run_program("trimaran.probe", [*self._probe_arguments(recipe), "-o", str(self.cluster_file)], "probe")
        return load_cluster(str(self.cluster_file))

    def _probe_arguments(self, recipe: Recipe) -> list[str]:
        slots = _slots(recipe)
        model = self.folder / "model.json"
        write_atomically(model, recipe.workload.model.model_dump_json())
        arguments = ["--quick", "--slots", str(slots), "--model", str(model), "--seq", str(recipe.workload.seq_len)]
        for mbs in sorted({layout.mbs for layout in stated_layouts(recipe)}):
            arguments += ["--mbs", str(mbs)]
        return arguments

    def data(self, recipe: Recipe, megatron: Path | None = None) -> Path:
        """Folder of the recipe's token files, made on the first call; `megatron` is a prefix to write them to as well.

        Raises TrimaranError when a text cannot be read or the disk is full.
        """
        job = DataJob(data=recipe.data, vocab=recipe.workload.model.vocab, cache_dir=str(self.folder / "data"))
        if megatron is not None:
            job = job.model_copy(update={"megatron": str(megatron)})
        path = self.folder / "data.json"
        write_atomically(path, job.model_dump_json(indent=1))
        return Path(
            run_program("trimaran.train.programs.tokenise", [str(path)], "data", capture=True).strip().splitlines()[-1]
        )


def stated_layouts(recipe: Recipe) -> list[Layout]:
    """The layouts that the recipe names, each with the recipe's fixed fields. Raises TrimaranError."""
    return [parse_layout(text, dict(recipe.sweep.fixed)) for text in recipe.sweep.layouts]


def check_stated_layouts(recipe: Recipe, cluster: Cluster) -> None:
    """Raise TrimaranError for a stated layout that breaks a rule on this cluster, before anything is made."""
    for layout in stated_layouts(recipe):
        check_layout(layout, recipe.workload, cluster, recipe.stack)


def unprobed_machine(recipe: Recipe) -> Cluster:
    """This machine before its probe: the slots it will be probed for, with all precisions and memory without end."""
    device = Device(
        name="this machine", kind="cpu", peak_tflops={"fp32": 1.0, "fp16": 1.0, "bf16": 1.0}, mem_gib=1e6,
        mem_bandwidth_gb_s=100.0,
    )  # fmt: skip
    link = Link(bandwidth_gbps=100.0, latency_us=1.0)
    slots = min(_slots(recipe), 1024)
    return Cluster(name="this machine", device=device, nodes=1, devices_per_node=slots, intra=link, inter=link)


def _slots(recipe: Recipe) -> int:
    """Slots that the machine is probed for: its cores, or as many as the recipe asks for."""
    return max([os.cpu_count() or 1, *recipe.sweep.devices, *(layout.devices for layout in stated_layouts(recipe))])


def require_own_trainer(recipe: Recipe) -> None:
    """Raise TrimaranError where the recipe is for other software, whose rows Trimaran's trainer must not fill."""
    if recipe.stack.framework != "trimaran":
        raise TrimaranError(
            f"stack {recipe.stack.name or recipe.stack.framework!r} is planned for, not run: set stack = "
            f'"trimaran" to measure and train here, or export a layout to its own trainer'
        )


def require_torch(what: str) -> None:
    """Raise TrimaranError unless PyTorch is installed (planning alone does not need it)."""
    if importlib.util.find_spec("torch") is None:
        raise TrimaranError(f"{what} needs PyTorch, which is not installed: pip install 'trimaran[train]'")


def run_program(module: str, arguments: Sequence[str], what: str, *, capture: bool = False) -> str:
    """Run one of Trimaran's torch programs to its end; its standard output when captured.

    Its lines of progress are passed on as they come. Raises TrimaranError with the program's own last line when it
    fails.
    """
    require_torch(what)
    command = [sys.executable, "-P", "-m", module, *arguments]
    last = ""
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, stdout=output if capture else None, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(progress.MARK):
                print(line.removeprefix(progress.MARK), end="", file=sys.stderr, flush=True)
            elif line.strip():
                last = line.strip()
        status = process.wait()
        output.seek(0)
        told = output.read()
    if status:
        raise TrimaranError(last.removeprefix("trimaran: ") or f"it ended with status {status}")
    return told


def run_program_on(job: BaseModel, module: str, what: str) -> None:
    """Run one of Trimaran's torch programs on a job file, which is gone afterwards. Raises as `run_program` does."""
    with tempfile.TemporaryDirectory(prefix="trimaran-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(job.model_dump_json())
        run_program(module, [str(path)], what)
