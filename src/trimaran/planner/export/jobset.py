"""A training as a JobSet of Kubernetes (jobset.x-k8s.io/v1alpha2)."""

from __future__ import annotations

from trimaran.planner.export.asked import Asked
from trimaran.planner.export.kubernetes import (
    NODE,
    RECIPE_FOLDER,
    comment,
    environment,
    job_set,
    limits,
    metadata,
    recipe_documents,
)
from trimaran.planner.export.start import PORT, manifest


def jobset(asked: Asked) -> str:
    """A JobSet of one job with a pod for each node, and the recipe beside it where that is carried.

    Ranks meet at the first pod by the name that JobSet gives it (Network of api/jobset/v1alpha2/jobset_types.go in
    kubernetes-sigs/jobset, commit 08dfbdfd6827); a pod's number is in JOB_COMPLETION_INDEX. Raises TrimaranError for
    what is needed and not stated.
    """
    start = asked.started("jobset")
    nodes, ranks = start.nodes(asked.layout)
    torchrun = [
        "torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={start.name}-{NODE}-0-0.{start.name}", f"--master-port={PORT}",
    ]  # fmt: skip
    container = {
        "command": start.command(asked.layout, RECIPE_FOLDER, torchrun),
        "env": environment(start),
        "resources": {"limits": limits(start, ranks)},
    }
    job = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed"}
    spec = {"network": {"enableDNSHostnames": True}, **job_set(start, container, job)}
    whole = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata(start), "spec": spec}
    return manifest(comment("JobSet", start, asked.layout), [*recipe_documents(start), whole])
