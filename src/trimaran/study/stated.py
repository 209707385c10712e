"""What a recipe states, checked before anything is made: that it may be run here, its layouts, the slots they need."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from trimaran.bench.launch.ray.ray_cluster import require_ray
from trimaran.files.recipe_file import load_recipe
from trimaran.layout.layout import Layout
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import check_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.variant import require_trust
from trimaran.protocol.host import processor_name
from trimaran.recipe.recipe import Recipe

# How a cluster file begins to say where it comes from that a probe wrote (probe/probed_cluster.py).
_PROBED = re.compile(r"trimaran \S+ probe\b")


def runnable_recipe(path: Path, *, trust: bool) -> Recipe:
    """The recipe of a file, to be run on this machine, its Slurm or its Ray.

    Raises TrimaranError where it is for other software, where it names interpreters, libraries or images without
    `trust`, and where it asks for a Ray that is not installed.
    """
    recipe = load_recipe(str(path))
    require_trimaran_stack(recipe)
    require_trust(recipe.sweep.variants, trust)
    if not trust and recipe.sweep.slurm and (setting := recipe.sweep.slurm.foreign_code()):
        raise TrimaranError(
            f"sweep.slurm: {setting} makes the ranks run code that the recipe names: read the recipe, then add --trust"
        )
    if recipe.sweep.ray is not None:
        require_ray()
    return recipe


def stated_layouts(recipe: Recipe) -> list[Layout]:
    """The layouts that the recipe names, each with the recipe's fixed fields. Raises TrimaranError."""
    return [parse_layout(text, dict(recipe.sweep.fixed)) for text in recipe.sweep.layouts]


def check_stated_layouts(recipe: Recipe, cluster: Cluster) -> None:
    """Raise TrimaranError for a stated layout that breaks a rule on this cluster, before anything is made."""
    for layout in stated_layouts(recipe):
        check_layout(layout, recipe.workload, cluster, recipe.stack)


def require_trimaran_stack(recipe: Recipe) -> None:
    """Raise TrimaranError where the recipe is for other software, whose rows Trimaran's trainer must not fill."""
    if recipe.stack.framework != "trimaran":
        raise TrimaranError(
            f"stack {recipe.stack.name or recipe.stack.framework!r} is planned for, not run: set stack = "
            f'"trimaran" to measure and train here, or export a layout to its own trainer'
        )


def require_probed_here(file: Path, cluster: Cluster, layouts: Sequence[Layout]) -> None:
    """Raise TrimaranError where a study's cluster file is of other processors or of more than this machine has.

    Or of too few slots for a layout. What no probe wrote counts as it stands.
    """
    probed, here = cluster.device.kind == "cpu" and _PROBED.match(cluster.source), processor_name()
    way_out = "remove it to have this machine probed, or keep this machine's study elsewhere by --runs"
    if probed and not cluster.device.name.startswith(here):
        raise TrimaranError(f"{file} is of {cluster.device.name}, and this machine is {here}: {way_out}")
    # all that it has: a rank of srun's may use a part alone
    if probed and cluster.cores_per_node > (cores := os.cpu_count() or 1):
        raise TrimaranError(f"{file} is of {cluster.cores_per_node} cores, and this machine has {cores}: {way_out}")
    slots = cluster.nodes * cluster.devices_per_node
    for layout in layouts:
        if layout.devices > slots:
            raise TrimaranError(
                f"{layout} takes {layout.devices} slots, but {file} is of {slots}, for which this machine was probed: "
                f"remove the file to have it probed for {layout.devices}, or lower a degree"
            )


def unprobed_machine(recipe: Recipe, layouts: Sequence[Layout] = ()) -> Cluster:
    """This machine before its probe for a recipe and layouts besides: its slots, all precisions, memory without end."""
    device = Device(
        name="this machine", kind="cpu", peak_tflops={"fp32": 1.0, "fp16": 1.0, "bf16": 1.0}, mem_gib=1e6,
        mem_bandwidth_gb_s=100.0,
    )  # fmt: skip
    link = Link(bandwidth_gbps=100.0, latency_us=1.0)
    slots = min(slots_wanted(recipe, layouts), 1024)
    return Cluster(name="this machine", device=device, nodes=1, devices_per_node=slots, intra=link, inter=link)


def slots_wanted(recipe: Recipe, layouts: Sequence[Layout] = ()) -> int:
    """Slots that the machine is probed for: its cores, or as many as the recipe or layouts besides ask for."""
    asked = (layout.devices for layout in (*stated_layouts(recipe), *layouts))
    return max([os.cpu_count() or 1, *recipe.sweep.devices, *asked])
