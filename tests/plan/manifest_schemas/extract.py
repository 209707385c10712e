"""Writes what TrainJob, TrainingRuntime, JobSet and a SkyPilot task may hold, as their projects' own schemas say it.

    python tests/plan/manifest_schemas/extract.py kubeflow/trainer TRAINER_CHECKOUT
    python tests/plan/manifest_schemas/extract.py kubernetes-sigs/jobset JOBSET_CHECKOUT
    python tests/plan/manifest_schemas/extract.py skypilot-org/skypilot FOLDER_OF_AN_UNPACKED_WHEEL

One JSON schema a file, beside this one, with repository, path, commit and licence of its source: names of fields,
types, which are required, words, bounds and patterns, and no description. Along WHOLE every level is kept, elsewhere
a field has its name and type alone. A field that a schema does not know is refused, as the projects do: JobSet and
Trainer where `kubectl apply` asks for strict fields, SkyPilot always.
"""

from __future__ import annotations

import ast
import contextlib
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
POD = (
    "containers.command", "containers.env", "containers.resources.limits", "containers.volumeMounts",
    "nodeSelector", "volumes.emptyDir", "volumes.persistentVolumeClaim", "volumes.configMap.items",
)  # fmt: skip
REPLICATED = tuple(f"replicatedJobs.template.spec.template.spec.{path}" for path in POD)
JOB_SET = (*REPLICATED, "replicatedJobs.template.metadata", "failurePolicy", "network", "successPolicy")
# Where every level of a schema is kept, by kind; `spec` stands before each.
WHOLE = {
    "JobSet": JOB_SET,
    "TrainingRuntime": ("mlPolicy.torch", *(f"template.spec.{path}" for path in JOB_SET)),
    "TrainJob": ("trainer.env", "trainer.resourcesPerNode.limits", "trainer.command", "runtimeRef"),
}
# Repository, its file, and the kind whose schema it holds.
CRDS = (
    ("kubeflow/trainer", "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml", "TrainJob"),
    ("kubeflow/trainer", "manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml", "TrainingRuntime"),
    ("kubernetes-sigs/jobset", "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml", "JobSet"),
)
SKYPILOT = "skypilot-org/skypilot"
LINE = 110
KEPT = (
    "type", "enum", "required", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
    "anyOf", "maxProperties", "patternProperties", "const",
)  # fmt: skip


def reduced(schema: dict[str, Any], paths: list[list[str]]) -> dict[str, Any]:
    """A schema with every level along `paths`, and names and types beside them."""
    kept = {key: schema[key] for key in KEPT if key in schema}
    if not paths:
        return {key: value for key, value in kept.items() if key == "type"}
    if "items" in schema:
        kept["items"] = reduced(schema["items"], paths)
    if isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = reduced(schema["additionalProperties"], paths)
    if "properties" in schema or schema.get("additionalProperties") is False:
        kept["additionalProperties"] = False
    if "properties" in schema:
        kept["properties"] = {
            name: reduced(field, [path[1:] or [""] for path in paths if path[0] == name] or _leaf(field))
            for name, field in schema["properties"].items()
        }
    return kept


def _leaf(field: dict[str, Any]) -> list[list[str]]:
    """A field of a plain type is kept with its bounds; of an object, a list or a choice of types the type is all."""
    return [[""]] if field.get("type", "object") not in ("object", "array") else []


def crd(repository: str, checkout: Path, path: str, kind: str) -> dict[str, Any]:
    """The schema of a kind, from the definition in a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(checkout), *words], check=True, capture_output=True, text=True).stdout

    definition = yaml.safe_load(git("show", f"HEAD:{path}"))["spec"]
    (version,) = definition["versions"]
    whole = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec = reduced(whole, [path.split(".") for path in WHOLE[kind]])
    return {
        "source": source(repository, path, git("rev-parse", "HEAD").strip()),
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": f"{definition['group']}/{version['name']}"},
            "kind": {"const": definition["names"]["kind"]},
            "metadata": {"type": "object"},
            "spec": spec,
        },
    }


def skypilot(folder: Path) -> dict[str, Any]:
    """The schema of a task with that of its resources, which SkyPilot looks at by itself."""
    commit = (folder / "sky" / "__init__.py").read_text().split("_SKYPILOT_COMMIT_SHA = '")[1][:40]
    path = "sky/utils/schemas.py"
    schemas = run(folder, path)
    task, resources = schemas["get_task_schema"](), schemas["get_resources_schema"]()
    kept = reduced(task, [["envs"], ["resources"]])
    kept["properties"]["resources"] = reduced(resources, [["accelerators"], ["job_recovery"], ["infra"], ["image_id"]])
    return {"source": source(SKYPILOT, path, commit), **kept}


def run(folder: Path, path: str) -> dict[str, Any]:
    """The names of SkyPilot's module of schemas, with its constants alone: nothing else of SkyPilot is installed."""

    class Anything(types.ModuleType):
        """Stands for modules whose words are in parts of the schema that are left out."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything(name)

        def __call__(self, *arguments: object) -> list[str]:
            return []

        def __iter__(self) -> Any:
            return iter(())

    for name in ("sky", "sky.skylet", "sky.utils", "sky.server", "sky.serve", "sky.data"):
        sys.modules[name] = Anything(name)
    constants = Anything("constants")
    for statement in ast.parse((folder / "sky/skylet/constants.py").read_text()).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            with contextlib.suppress(ValueError):
                constants.__dict__[ast.unparse(target)] = ast.literal_eval(statement.value)
    sys.modules["sky.skylet"].__dict__["constants"] = constants
    names: dict[str, Any] = {}
    exec(compile((folder / path).read_text(), path, "exec"), names)
    names["_allow_additional_properties"] = lambda: False  # as on a server that has loaded its plugins
    return names


def source(repository: str, path: str, commit: str) -> dict[str, str]:
    """Where a schema is from."""
    return {"repository": f"https://github.com/{repository}", "path": path, "commit": commit, "licence": "Apache-2.0"}


def main(repository: str, folder: Path) -> None:
    """Write the files of one repository."""
    if repository == SKYPILOT:
        found = {"skypilot": skypilot(folder)}
    else:
        found = {kind: crd(repository, folder, path, kind) for origin, path, kind in CRDS if origin == repository}
    for name, schema in found.items():
        (HERE / f"{name.lower()}.json").write_text(written(schema) + "\n")


def written(value: Any, indent: str = "") -> str:
    """JSON with what is short on one line."""
    text = json.dumps(value)
    if len(indent + text) <= LINE or not isinstance(value, dict):
        return text
    lines = (f"{indent} {json.dumps(key)}: {written(inner, indent + ' ')}" for key, inner in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}" + "}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
