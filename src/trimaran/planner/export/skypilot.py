"""A training as a task of SkyPilot."""

from __future__ import annotations

import shlex
from typing import Any

from trimaran.nouns.noun import TrimaranError
from trimaran.planner.export.asked import Asked
from trimaran.planner.export.start import GRACE_VARIABLE, PORT, Start, manifest

RECIPE_FOLDER = "/tmp/trimaran"


def skypilot(asked: Asked) -> str:
    """A task for `sky jobs launch`, which starts it anew after faults and where machines were taken away.

    SkyPilot gives containers a /dev/shm of their memory by itself (sky/templates/kubernetes-ray.yml.j2 and
    sky/provision/docker_utils.py, commit 7e595970a806). Raises TrimaranError for what is needed and not stated, or
    has no place in a task.
    """
    start = asked.started("skypilot")
    settings = start.settings
    for field, unset in (("shared_memory_gib", None), ("namespace", None), ("node_selector", {})):
        if getattr(settings, field) != unset:
            raise TrimaranError(
                f"manifest.{field} is {getattr(settings, field)}, and SkyPilot sees to it: leave it out"
            )
    nodes, ranks = start.nodes(asked.layout)
    image = start.needed("image", "and it has to have Trimaran and PyTorch")
    volume = start.needed("volume", "and checkpoints on a machine's own disk end with it")
    torchrun = (
        f"torchrun --nnodes={nodes} --nproc-per-node={ranks} --node-rank=$SKYPILOT_NODE_RANK \\\n"
        f'  --master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n1)" --master-port={PORT} \\\n  '
    )
    task: dict[str, Any] = {
        "name": start.name,
        "num_nodes": nodes,
        "resources": {
            **({"infra": settings.infra} if settings.infra else {}),
            **_devices(start, ranks),
            "image_id": f"docker:{image}",
            "job_recovery": {"max_restarts_on_errors": start.most_restarts},
        },
        "envs": {GRACE_VARIABLE: str(settings.grace_s)},
        "volumes": {start.runs_beside(RECIPE_FOLDER): volume},
        "run": ("" if start.sweeps else torchrun) + shlex.join(start.command(asked.layout, RECIPE_FOLDER)) + "\n",
    }
    if start.recipe_text is not None:
        task["file_mounts"] = {f"{RECIPE_FOLDER}/{start.carried_file}": start.recipe_file}
    return manifest(f"SkyPilot: {start.where(asked.layout)}; sky jobs launch", [task])


def _devices(start: Start, ranks: int) -> dict[str, Any]:
    """What a node is asked for: devices by SkyPilot's name, or as many cores at least. Raises TrimaranError."""
    device = start.cluster.device
    if device.kind == "cpu":
        return {"cpus": f"{start.cores(ranks)}+"}
    accelerator = start.settings.accelerator or device.skypilot_name
    if not accelerator:
        raise TrimaranError(
            f"device {device.name or 'without a name'} has no skypilot_name: give SkyPilot's, as --set accelerator=H100"
        )
    return {"accelerators": {accelerator: ranks}}
