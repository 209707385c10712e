"""A training as a TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1), with the runtime that it runs in."""

from __future__ import annotations

from trimaran.planner.export.asked import Asked
from trimaran.planner.export.kubernetes import (
    RECIPE_FOLDER,
    comment,
    environment,
    job_set,
    limits,
    metadata,
    recipe_documents,
)
from trimaran.planner.export.start import manifest

API = "trainer.kubeflow.org/v1alpha1"


def trainjob(asked: Asked) -> str:
    """A TrainJob, its TrainingRuntime, and the recipe beside them where that is carried.

    Restarts and volumes are a runtime's to say, so the manifest brings its own. torchrun is told of nodes, ranks and
    where they meet by the variables that the runtime's torch policy sets (pkg/runtime/framework/plugins/torch/torch.go
    of kubeflow/trainer, commit 8c0f5059bd51). Raises TrimaranError for what is needed and not stated.
    """
    start = asked.started("trainjob")
    nodes, ranks = start.nodes(asked.layout)
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    runtime = {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata(start, labels={"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": nodes, "torch": {}},
            "template": {"spec": job_set(start, {}, {}, **labels)},
        },
    }
    train_job = {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": metadata(start),
        "spec": {
            "runtimeRef": {"apiGroup": API.partition("/")[0], "kind": "TrainingRuntime", "name": start.name},
            "trainer": {
                "image": start.needed("image", "and it has to have Trimaran and PyTorch"),
                "command": start.command(asked.layout, RECIPE_FOLDER, ["torchrun"]),
                "env": environment(start),
                "numNodes": nodes,
                "numProcPerNode": ranks,
                "resourcesPerNode": {"limits": limits(start, ranks)},
            },
        },
    }
    documents = [*recipe_documents(start), runtime, train_job]
    return manifest(comment("TrainJob", start, asked.layout), documents)
