"""What manifests of Kubernetes share: the pods of a training, as a JobSet's specification, and the recipe beside them.

Every pod is a node. One that fails has all started anew by JobSet's failure policy, and they go on from the newest
checkpoint; a Job of its own would start the one pod again, which the others no longer wait for.
"""

from __future__ import annotations

from typing import Any

from trimaran.layout.layout import Layout
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.export.start import GRACE_VARIABLE, Start

# Kubeflow Trainer looks for a job and a container of this name (pkg/constants/constants.go of kubeflow/trainer).
NODE = "node"
RECIPE_FOLDER, SHARED_MEMORY = "/etc/trimaran", "/dev/shm"


def metadata(start: Start, **more: Any) -> dict[str, Any]:
    """Name and namespace of an object."""
    return {"name": start.name, **({"namespace": start.settings.namespace} if start.settings.namespace else {}), **more}


def recipe_documents(start: Start) -> list[dict[str, Any]]:
    """The recipe as a ConfigMap, where the manifest carries it."""
    if start.recipe_text is None:
        return []
    data = {start.carried_file: start.recipe_text}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(start), "data": data}]


def limits(start: Start, ranks: int) -> dict[str, Any]:
    """What a node's ranks take of it: its devices, or the cores of its slots. Raises TrimaranError."""
    device = start.cluster.device
    if device.kind == "cpu":
        return {"cpu": start.cores(ranks)}
    resource = start.settings.resource or device.kubernetes_resource
    if not resource:
        raise TrimaranError(
            f"device {device.name or 'without a name'} has no kubernetes_resource: give what its device plugin counts, "
            f"as --set resource=nvidia.com/gpu"
        )
    return {resource: ranks}


def environment(start: Start) -> list[dict[str, str]]:
    """Variables of torchrun: ranks that are told to leave have the time that Kubernetes gives the pod."""
    return [{"name": GRACE_VARIABLE, "value": str(start.settings.grace_s)}]


def job_set(start: Start, container: dict[str, Any], job: dict[str, Any], **labels: str) -> dict[str, Any]:
    """The specification of a JobSet whose one job has a pod for each node; `job` says how many.

    `labels` are those of the job. Raises TrimaranError where the volume is not stated.
    """
    settings = start.settings
    claim = start.needed("volume", "and checkpoints on a pod's own disk end with it")
    shared_memory: dict[str, Any] = {"medium": "Memory"}
    if settings.shared_memory_gib is not None:
        shared_memory["sizeLimit"] = f"{settings.shared_memory_gib}Gi"
    # name, where, what
    volumes: list[tuple[str, str, dict[str, Any]]] = [
        ("runs", start.runs_beside(SHARED_MEMORY, RECIPE_FOLDER), {"persistentVolumeClaim": {"claimName": claim}}),
        ("shared-memory", SHARED_MEMORY, {"emptyDir": shared_memory}),
    ]
    if start.recipe_text is not None:
        volumes.append(("recipe", RECIPE_FOLDER, {"configMap": {"name": start.name}}))
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_s,
        **({"nodeSelector": settings.node_selector} if settings.node_selector else {}),
        "containers": [
            {
                "name": NODE,
                "image": start.needed("image", "and it has to have Trimaran and PyTorch"),
                **container,
                "volumeMounts": [{"name": name, "mountPath": path} for name, path, _ in volumes],
            }
        ],
        "volumes": [{"name": name, **what} for name, _, what in volumes],
    }
    template = {"spec": {**job, "backoffLimit": 0, "template": {"spec": pod}}}
    if labels:
        template = {"metadata": {"labels": labels}, **template}
    return {
        "failurePolicy": {"maxRestarts": start.most_restarts},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
    }


def comment(to: str, start: Start, layout: Layout) -> str:
    """A line on what a manifest does."""
    return f"{to}: {start.where(layout)}; kubectl apply -f"
