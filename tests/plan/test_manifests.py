"""A manifest is what its manager's own schema takes, and starts the training on the nodes that the layout needs."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from command import run, tiny_recipe
from trimaran.api import workload_of
from trimaran.files.catalogue import load_cluster, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.export.exporters import EXPORTERS, export
from trimaran.planner.export.start import Start
from trimaran.recipe.manifest_settings import ManifestSettings
from trimaran.recipe.train_settings import TrainSettings

SCHEMAS = Path(__file__).with_name("manifest_schemas")
GPT, TRIMARAN = workload_of("gpt3-1b3", 512), load_stack("trimaran")
MANAGERS = [name for name, exporter in EXPORTERS.items() if exporter.starts]
RECIPE = 'name = "my gpt"\ncluster = "dgx-h100"\n[model]\nname = "gpt3-1b3"\n'


ASKED = ("--model", "gpt3-1b3", "--cluster", "dgx-h100", "--gbs", "512", "--layout", "dp8,mbs2,bf16")
SET = ("--set", "image=trimaran:1", "--set", "volume=runs")


def start(cluster: Cluster | None = None, **settings: Any) -> Start:
    """A recipe's training, on eight H100 a node where no cluster is named."""
    stated = {"image": "registry.example/trimaran:1", "volume": "runs"} | settings
    known = cluster or load_cluster("dgx-h100")
    return Start(known, ManifestSettings.model_validate(stated), "my gpt", "recipes/my-gpt.toml", RECIPE, 5)


def written(to: str, layout: str = "dp8,tp2,mbs2,bf16", begin: Start | None = None) -> list[dict[str, Any]]:
    """The documents of a manifest."""
    return list(yaml.safe_load_all(export(parse_layout(layout), GPT, TRIMARAN, to, start=begin or start())))


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(document for document in documents if document.get("kind") == kind)


def schema_of(document: dict[str, Any]) -> dict[str, Any]:
    """What the manager's project says that a document may hold (a task of SkyPilot has no kind)."""
    schema: dict[str, Any] = json.loads((SCHEMAS / f"{document.get('kind', 'skypilot').lower()}.json").read_text())
    return schema


def pod_of(job_set: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Job of a JobSet's specification, and its pod."""
    (job,) = job_set["replicatedJobs"]
    return job["template"]["spec"], job["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("to", MANAGERS)
@pytest.mark.parametrize(
    ("layout", "cluster", "settings"),
    [
        ("dp8,tp2,mbs2,bf16", "dgx-h100", {"restarts": 0, "grace_s": 600}),
        ("dp2,mbs2,bf16", "dgx-a100-80gb", {"name": "short", "recipe": "/data/r.toml"}),
        ("dp4,mbs2,fp32", "fugaku-a64fx", {}),
    ],
)
def test_every_document_is_what_its_project_s_schema_takes(
    to: str, layout: str, cluster: str, settings: dict[str, Any]
) -> None:
    documents = written(to, layout, start(load_cluster(cluster), **settings))
    checked = [document for document in documents if document.get("kind") != "ConfigMap"]
    assert checked
    for document in checked:
        jsonschema.validate(document, schema_of(document))


def set_at(document: dict[str, Any], path: str, value: Any) -> None:
    """Put a value where a path of names and numbers leads."""
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    place: Any = document
    for step in way:
        place = place[step]
    place[last] = value


POD = "spec.replicatedJobs.0.template.spec.template.spec"


@pytest.mark.parametrize(
    ("to", "path", "value"),
    [
        ("jobset", "apiVersion", "jobset.x-k8s.io/v1"),
        ("jobset", "spec.failurePolicy.maxRestart", 3),
        ("jobset", "spec.failurePolicy.maxRestarts", "3"),
        ("jobset", "spec.replicatedJobs.0.template.spec.nodes", 2),
        ("jobset", f"{POD}.containers.0.command", "torchrun -m trimaran"),
        ("jobset", f"{POD}.containers.0.resources.limits", {"nvidia.com/gpu": "eight"}),
        ("jobset", f"{POD}.containers.0.volumeMounts.0", {"name": "runs"}),
        ("jobset", f"{POD}.volumes.0.persistentVolumeClaim", {"claim": "runs"}),
        ("trainjob", "spec.trainer.numNodes", "2"),
        ("trainjob", "spec.trainer.nodes", 2),
        ("trainjob", "spec.trainer.resourcesPerNode.limits", {"nvidia.com/gpu": "8 of them"}),
        ("trainjob", "spec.runtimeRef", {"kind": "TrainingRuntime"}),
        ("skypilot", "nodes", 2),
        ("skypilot", "num_nodes", "2"),
        ("skypilot", "resources.accelerator", {"H100": 8}),
        ("skypilot", "resources.job_recovery", {"max_restarts": 3}),
        ("skypilot", "run", ["torchrun"]),
    ],
)
def test_a_wrong_manifest_fails(to: str, path: str, value: Any) -> None:
    document = written(to)[-1]
    set_at(document, path, value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema_of(document))


def test_schemas_say_where_they_are_from() -> None:
    for file in SCHEMAS.glob("*.json"):
        source = json.loads(file.read_text())["source"]
        assert source["repository"].startswith("https://github.com/") and len(source["commit"]) == 40
        assert source["licence"] == "Apache-2.0" and source["path"]


def test_a_jobset_has_a_pod_for_each_node_and_torchrun_its_ranks() -> None:
    documents = written("jobset", begin=start(namespace="team", shared_memory_gib=64, node_selector={"gpu": "h100"}))
    config, job_set = documents
    job, pod = pod_of(job_set["spec"])
    (container,) = pod["containers"]
    assert (job["parallelism"], job["completions"], job["completionMode"], job["backoffLimit"]) == (2, 2, "Indexed", 0)
    assert job_set["spec"]["failurePolicy"] == {"maxRestarts": 5}
    assert container["command"] == [
        "torchrun", "--nnodes=2", "--nproc-per-node=8", "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=my-gpt-node-0-0.my-gpt", "--master-port=29500", "-m", "trimaran", "train",
        "/etc/trimaran/my-gpt.toml", "--layout", "dp8,tp2,pp1,mbs2,bf16", "--resume", "--runs", "/runs",
    ]  # fmt: skip
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["image"] == "registry.example/trimaran:1"
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes[mounted["/runs"]] == {"persistentVolumeClaim": {"claimName": "runs"}}
    assert volumes[mounted["/dev/shm"]] == {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    assert volumes[mounted["/etc/trimaran"]] == {"configMap": {"name": config["metadata"]["name"]}}
    assert config["data"] == {"my-gpt.toml": RECIPE}
    assert config["metadata"]["namespace"] == job_set["metadata"]["namespace"] == "team"
    assert (pod["nodeSelector"], pod["terminationGracePeriodSeconds"]) == ({"gpu": "h100"}, 120)


def test_a_trainjob_brings_the_runtime_that_has_its_volumes_and_restarts() -> None:
    documents = written("trainjob", begin=start(restarts=7))
    job, runtime = of_kind(documents, "TrainJob"), of_kind(documents, "TrainingRuntime")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    assert trainer["command"][:4] == ["torchrun", "-m", "trimaran", "train"] and "--resume" in trainer["command"]
    job_set = runtime["spec"]["template"]["spec"]
    assert (runtime["spec"]["mlPolicy"], job_set["failurePolicy"]) == ({"numNodes": 2, "torch": {}}, {"maxRestarts": 7})
    template = job_set["replicatedJobs"][0]["template"]
    assert template["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job_of_nodes, pod = pod_of(job_set)
    assert job_of_nodes["backoffLimit"] == 0
    assert [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]][:2] == ["/runs", "/dev/shm"]


def test_skypilot_is_told_of_nodes_accelerators_restarts_and_the_volume() -> None:
    (task,) = written("skypilot", begin=start(infra="k8s"))
    assert task["num_nodes"] == 2
    assert task["resources"] == {
        "infra": "k8s", "accelerators": {"H100": 8}, "image_id": "docker:registry.example/trimaran:1",
        "job_recovery": {"max_restarts_on_errors": 5},
    }  # fmt: skip
    assert task["volumes"] == {"/runs": "runs"}
    assert task["file_mounts"] == {"/tmp/trimaran/my-gpt.toml": "recipes/my-gpt.toml"}
    words = shlex.split(task["run"].replace("\\\n", " "))
    assert words[:4] == ["torchrun", "--nnodes=2", "--nproc-per-node=8", "--node-rank=$SKYPILOT_NODE_RANK"]
    assert words[words.index("train") + 1] == "/tmp/trimaran/my-gpt.toml"


def test_nodes_are_hosts_and_cpu_ranks_ask_for_cores() -> None:
    rack = of_kind(written("jobset", "dp8,tp4,mbs2,bf16", start(load_cluster("gb200-nvl72"))), "JobSet")
    job, pod = pod_of(rack["spec"])
    assert (job["completions"], pod["containers"][0]["resources"]["limits"]) == (8, {"nvidia.com/gpu": 4})
    fugaku = load_cluster("fugaku-a64fx")
    job, pod = pod_of(of_kind(written("jobset", "dp4,mbs2,fp32", start(fugaku)), "JobSet")["spec"])
    assert (job["completions"], pod["containers"][0]["resources"]["limits"]) == (4, {"cpu": 48})
    (task,) = written("skypilot", "dp4,mbs2,fp32", start(fugaku))
    assert task["resources"]["cpus"] == "48+" and "accelerators" not in task["resources"]


@pytest.mark.parametrize("to", MANAGERS)
@pytest.mark.parametrize(
    ("layout", "begin", "what"),
    [
        ("dp4", start(image=None), r"manifest\.image is not stated"),
        ("dp4", start(volume=None), r"manifest\.volume is not stated"),
        ("dp4,tp3", start(), "12 ranks, which do not fill nodes of 8 devices"),
        ("dp4", start(load_cluster("tpu-v4-pod")), "has no (kubernetes_resource|skypilot_name)"),
    ],
)
def test_what_is_needed_and_not_stated_is_told_in_one_line(to: str, layout: str, begin: Start, what: str) -> None:
    with pytest.raises(TrimaranError, match=what):
        written(to, layout, begin)


def test_what_skypilot_sees_to_itself_is_refused_and_names_are_labels() -> None:
    with pytest.raises(TrimaranError, match=r"manifest\.shared_memory_gib is 8, and SkyPilot sees to it"):
        written("skypilot", begin=start(shared_memory_gib=8))
    named = {name: replace(start(), recipe_name=name).name for name in ("BLOOM 176B+", "405b", "x" * 90)}
    assert named == {"BLOOM 176B+": "bloom-176b", "405b": "train-405b", "x" * 90: "x" * 40}
    with pytest.raises(TrimaranError, match="starts `trimaran train`, and the stack is megatron-core"):
        export(parse_layout("dp4"), GPT, load_stack("megatron-core"), "jobset", start=start())
    with pytest.raises(TrimaranError, match="none is given"):
        export(parse_layout("dp4"), GPT, TRIMARAN, "jobset")


@pytest.mark.parametrize("to", MANAGERS)
def test_a_sweep_is_started_on_one_node_and_starts_its_own_ranks(to: str, tmp_path: Path) -> None:
    sweep = '[workload]\nseq_len = 2048\nglobal_batch = 512\n[sweep]\nlayouts = ["dp4,mbs2,bf16", "dp2,mbs2,bf16"]\n'
    (tmp_path / "gpt.toml").write_text(RECIPE + sweep)
    done = run("export", "gpt.toml", "--to", to, *SET, "--set", "verb=bench", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "" and "trimaran bench on 1 node of 4" in done.stdout, done.stderr
    documents = [document for document in yaml.safe_load_all(done.stdout) if document.get("kind") != "ConfigMap"]
    for document in documents:
        jsonschema.validate(document, schema_of(document))
    whole = documents[-1]
    folder = "/tmp/trimaran" if to == "skypilot" else "/etc/trimaran"
    command = f"python -m trimaran bench {folder}/mygpt.toml --runs /runs".replace("mygpt", "my-gpt")
    if to == "skypilot":
        assert whole["run"].strip() == command and whole["num_nodes"] == 1
        assert whole["resources"]["accelerators"] == {"H100": 4}
    else:
        place = whole["spec"]["trainer"] if to == "trainjob" else pod_of(whole["spec"])[1]["containers"][0]
        assert " ".join(place["command"]) == command
        resources = place["resourcesPerNode"] if to == "trainjob" else place["resources"]
        assert resources["limits"] == {"nvidia.com/gpu": 4}


@pytest.mark.parametrize(
    ("sweep", "arguments", "what"),
    [
        ('layouts = ["dp16,mbs2,bf16"]', ["--set", "verb=bench"], "the sweep uses 16 devices of nodes of 8: hold it"),
        ("devices = [8, 32]", ["--set", "verb=tune"], "the sweep uses 32 devices of nodes of 8"),
        ("devices = [8]", ["--set", "verb=bench"], "sweep.layouts of the recipe is empty"),
        ("devices = [8]", ["--set", "verb=tune", "--layout", "dp8"], "--layout dp8 is of a training"),
        ("devices = [8]", ["--set", "verb=serve"], "Input should be 'train', 'bench' or 'tune'"),
    ],
)
def test_a_sweep_of_several_nodes_is_refused(sweep: str, arguments: list[str], what: str, tmp_path: Path) -> None:
    workload = "[workload]\nseq_len = 2048\nglobal_batch = 512\n"
    (tmp_path / "gpt.toml").write_text(f"{RECIPE}{workload}[sweep]\n{sweep}\n")
    done = run("export", "gpt.toml", "--to", "jobset", *SET, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and what in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    of_image = run("export", "--to", "jobset", *ASKED[:-2], *SET, "--set", "recipe=/r.toml", "--set", "verb=tune")
    assert of_image.returncode == 2 and "stands in the recipe: give RECIPE.toml" in of_image.stderr


@pytest.mark.parametrize("to", MANAGERS)
def test_a_volume_lies_beside_what_else_is_mounted(to: str) -> None:
    taken = ["/tmp/trimaran/", "/tmp"] if to == "skypilot" else ["/dev/shm", "/dev/shm/runs", "/etc/trimaran", "/etc"]
    for runs in taken:
        with pytest.raises(TrimaranError, match=f"manifest.runs is {runs}, and the manifest mounts /[a-z/]* besides"):
            written(to, begin=start(runs=runs))
    for runs in ("/", "//", "/runs/../etc", "/./runs", "runs"):
        with pytest.raises(ValidationError, match="runs"):
            start(runs=runs)
    assert "/data/.cache/x/" in export(parse_layout("dp4"), GPT, TRIMARAN, to, start=start(runs="/data/.cache/x/"))


def test_what_kubernetes_would_refuse_is_refused_before() -> None:
    assert start(node_selector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "pool": ""})
    for selector in ({"a b": "x"}, {"pool": "a b"}, {"-x": "y"}, {"pool": "x" * 64}, {"A.com/x": "y"}):
        with pytest.raises(ValidationError, match="node_selector"):
            start(node_selector=selector)
    with pytest.raises(ValidationError, match="restarts"):
        TrainSettings(restarts=10**12)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([*ASKED, *SET], "a manifest starts the training of a recipe, and none is named"),
        ([*ASKED, *SET, "--set", "recipe=/r.toml", "--set", "imag=x"], "'imag' is not known: did you mean 'image'?"),
        ([*ASKED, "--set", "image"], "--set 'image' is not FIELD=VALUE"),
        (["gpt.toml", *SET, "--gbs", "256"], "--gbs 256 plans another training than that of gpt.toml"),
        (["laptop", *SET, "--layout", "dp2,mbs4"], "recipe laptop: cluster is missing"),
        (["beside.toml", *SET, "--layout", "dp2,mbs4"], "names 'text/a.txt', a file beside it"),
    ],
)
def test_the_command_line_refuses_what_would_start_another_training(
    tmp_path: Path, arguments: list[str], what: str
) -> None:
    (tmp_path / "gpt.toml").write_text(RECIPE + "[workload]\nseq_len = 2048\nglobal_batch = 512\n")
    beside = "[workload]\nseq_len = 2048\nglobal_batch = 512\n[data]\npaths = ['text/a.txt']\n"
    (tmp_path / "beside.toml").write_text(RECIPE + beside)
    done = run("export", "--to", "jobset", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and what in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_recipe_of_the_image_is_named_and_not_carried(tmp_path: Path) -> None:
    done = run("export", "--to", "jobset", *ASKED, *SET, "--set", "recipe=/data/long.toml", cwd=tmp_path)
    (job_set,) = yaml.safe_load_all(done.stdout)
    _, pod = pod_of(job_set["spec"])
    command = pod["containers"][0]["command"]
    assert job_set["metadata"]["name"] == "long" and command[command.index("train") + 1] == "/data/long.toml"
    other = run("export", "--to", "megatron-lm", *ASKED, *SET, cwd=tmp_path)
    assert other.returncode == 2 and "--set image=trimaran:1 is of a manifest" in other.stderr


# Two nodes of a slot each, as the recipe's own section.
NODES = {
    "nodes": 2, "devices_per_node": 1, "cores_per_node": 1, "intra": {"bandwidth_gbps": 20, "latency_us": 20},
    "inter": {"bandwidth_gbps": 20, "latency_us": 20},
    "device": {"kind": "cpu", "mem_gib": 4, "mem_bandwidth_gb_s": 10, "cores": 1, "peak_tflops": {"fp32": 0.1}},
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("to", MANAGERS)
def test_what_is_written_trains_on_two_nodes(tmp_path: Path, to: str) -> None:
    """Each node's command is run here with the variables that its manager sets, on the loopback."""
    import tomli_w

    recipe = tiny_recipe(tmp_path)
    stated = tomllib.loads(recipe.read_text()) | {"cluster": NODES, "manifest": {"image": "trimaran:1"}}
    recipe.write_text(tomli_w.dumps(stated))
    settings = ("--set", "volume=runs", "--set", f"runs={tmp_path}/shared", "--set", f"recipe={recipe}")
    done = run("export", str(recipe), "--to", to, "--layout", "dp2,mbs2", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = list(yaml.safe_load_all(done.stdout))[-1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run"]
    nodes = [command_of(to, document, node, port) for node in range(2)]
    processes = [
        subprocess.Popen(
            [*torchrun, *words], cwd=tmp_path, env=os.environ | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for words, variables in nodes
    ]  # fmt: skip
    told = [process.communicate(timeout=250) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    assert told[0][0].startswith("12 steps with dp2") and told[1][0] == ""
    assert list((tmp_path / "shared/tiny/checkpoints").glob("step-*"))


def command_of(to: str, document: dict[str, Any], node: int, port: str) -> tuple[list[str], dict[str, str]]:
    """torchrun's words on a node as its manager starts it, and the variables that it sets there."""
    if to == "skypilot":
        words = shlex.split(document["run"].replace("\\\n", " "))
        values = {"$SKYPILOT_NODE_RANK": str(node), '$(echo "$SKYPILOT_NODE_IPS" | head -n1)': "127.0.0.1"}
        values |= {"$(echo $SKYPILOT_NODE_IPS | head -n1)": "127.0.0.1"}
    elif to == "jobset":
        _, pod = pod_of(document["spec"])
        words = pod["containers"][0]["command"]
        values = {"$(JOB_COMPLETION_INDEX)": str(node), f"{document['metadata']['name']}-node-0-0.": "127.0.0.1#"}
    else:
        trainer = document["spec"]["trainer"]
        policy = {
            "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port,
        }  # fmt: skip
        return trainer["command"][1:], policy
    for name, value in values.items():
        words = [word.replace(name, value).partition("#")[0] for word in words]
    return [word.replace("29500", port) for word in words[1:]], {}
