"""Every block of code in README and docs works: shell lines run, TOML is read as what it is, Python runs."""

import functools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.main import get_command

from command import run
from trimaran.cli.app import app
from trimaran.files.catalogue import load_cluster, load_faults, load_stack
from trimaran.files.recipe_file import load_recipe
from trimaran.store.importers.profile import load_profile

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
BIN = Path(sys.executable).parent
RECIPE_KEYS = {"name", "stack", "model", "cluster", "workload", "data", "sweep", "train", "tables", "manifest"}
# Where a page's commands need what an earlier page's have left.
BEFORE = dict.fromkeys(("reports.md", "data-and-weights.md", "training.md", "importing.md"), "tutorial.md")
SERVES = "trimaran explore"
LINE_LIMIT_S = 600
# A command with what it prints right below it.
SHOWN = re.compile(r"^```sh\n([^\n]+)\n```\n```text\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# A calibration on one more row moves times a little; layouts, ranks and words may not move at all.
ROUNDING = 0.03

# The recipe of the tutorial, small enough to be run to its end here.
LAPTOP: dict[str, Any] = {
    "name": "laptop",
    "stack": "trimaran",
    "cluster": "machine.toml",
    "model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 257, "max_positions": 64},
    "workload": {"seq_len": 32, "global_batch": 4},
    "data": {"paths": ["../text"]},
    "sweep": {"layouts": ["dp1,mbs4", "dp2,mbs2", "pp2,mbs1"], "max_trials": 3, "steps": 3, "warmup_steps": 1},
    "train": {"steps": 4},
}
MACHINE: dict[str, Any] = {
    "nodes": 1,
    "devices_per_node": 4,
    "cores_per_node": 2,
    "device": {"kind": "cpu", "mem_gib": 4, "mem_bandwidth_gb_s": 10, "cores": 1, "peak_tflops": {"fp32": 0.1}},
    "intra": {"bandwidth_gbps": 20, "latency_us": 20},
    "inter": {"bandwidth_gbps": 20, "latency_us": 20},
}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SITES: dict[str, Any] = {
    **{key: MACHINE[key] for key in ("devices_per_node", "device", "intra", "inter")},
    "groups": [{"name": "ohio", "nodes": 1}, {"name": "virginia", "nodes": 1}],
    "links": [{"between": ["ohio", "virginia"], "bandwidth_gbps": 1, "latency_us": 9}],
}
_SUM = {"seconds": 10.0, "bits_per_second": 9e8}
IPERF3 = {
    "start": {
        "connected": [{"local_host": "10.0.0.1", "remote_host": "10.1.0.1"}], "version": "iperf 3.12",
        "test_start": {"protocol": "TCP", "num_streams": 1, "reverse": 0},
    },
    "intervals": [],
    "end": {"streams": [{"sender": {"min_rtt": 22000}}], "sum_sent": _SUM, "sum_received": _SUM},
}  # fmt: skip
LOG_LINE = (
    " iteration {n}/ 1000 | consumed samples: {s} | elapsed time per iteration (ms): 1200.0 | learning rate: 1.0E-04 |"
    " global batch size: 512 | lm loss: 7.1E+00 | loss scale: 4096.0 | grad norm: 1.1 | number of skipped iterations:"
    " 0 | number of nan iterations: 0 |\n"
)


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def some(language: str) -> list[Any]:
    found = [(page, i, code) for page in PAGES for i, code in enumerate(blocks(page, language))]
    return [pytest.param(code, id=f"{page.relative_to(ROOT)}-{i}") for page, i, code in found]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which what the pages speak of exists, small."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("recipes", "text", "corpus", "web", "llama"):
        (folder / name).mkdir()
    shutil.copytree(ROOT / "recipes", folder / "recipes", dirs_exist_ok=True)
    prose = "all work and no play makes jack a dull boy\n" * 200
    for name in ("text/a.txt", "corpus/a.txt", "web/a.txt"):
        (folder / name).write_text(prose)
    (folder / "recipes" / "laptop.toml").write_text(tomli_w.dumps(LAPTOP))
    for name in ("machine.toml", "my-cluster.toml", "recipes/machine.toml"):
        (folder / name).write_text(tomli_w.dumps(MACHINE))
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))
    shutil.copy(ROOT / "src/trimaran/catalog/measurements/seeds.csv", folder / "table.csv")
    (folder / "train.log").write_text("".join(LOG_LINE.format(n=n, s=512 * n) for n in range(1, 30)))
    hosts = [f"#  Rank {rank} Group  0 Pid 7 on node{rank // 8} device {rank % 8} [0x18] H100\n" for rank in range(16)]
    columns = "# all_reduce_perf\n# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
    sizes = [f"{8**n} {2 * 8 ** (n - 1)} float sum -1 {2 * f'{9 + 8**n / 1e5:.2f} 0 0 0 '}\n" for n in range(1, 11)]
    (folder / "allreduce.txt").write_text("".join([*hosts, columns, *sizes]))
    (folder / "sites.toml").write_text(tomli_w.dumps(SITES))
    (folder / "iperf3.json").write_text(json.dumps(IPERF3))
    head = "| Nodes | DP | TP | PP | MBS | GBS | Mem | Sec/it | TFLOPs |\n|" + " --- |" * 9
    (folder / "prequel.md").write_text(f"# Prequel\n\n{head}\n| 48 | 8 | 4 | 12 | 2 | 2048 | 44GB | 110.5 | 145.9 |\n")
    return folder


def lengthen(recipe: Path) -> None:
    """Two more steps, so that there is something left to resume."""
    stated = tomllib.loads(recipe.read_text())
    stated["train"]["steps"] += 2
    recipe.write_text(tomli_w.dumps(stated))


@functools.cache
def run_line(line: str, place: Path) -> None:
    """Run a line in the place; what an earlier page has there already is not made twice."""
    words = re.sub(r"\s+#.*", "", line).replace("runs/NAME", "runs/laptop").strip()
    words = words.replace("RECIPE.toml", "recipes/laptop.toml")
    if not words or words.startswith("srun "):
        return
    if words.startswith("make "):
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        assert words.split()[1] in targets, words
        return
    if "pip install" in words or "venv" in words:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = re.findall(r"\[([\w,]+)\]", words)
        assert set(",".join(asked).split(",")) - {""} <= set(extras), words
        return
    if words.startswith("trimaran probe ") and "--quick" not in words:
        words += " --quick"  # a probe at full length takes minutes, and is what the benchmarks begin with
    if "--resume" in words:
        lengthen(place / "recipes" / "laptop.toml")
    shell = ["bash", "-c", f"export PATH={BIN}:$PATH; {words}"]
    if words.startswith(SERVES):
        with subprocess.Popen(
            [*shell[:2], f"export PATH={BIN}:$PATH; exec {words}"], cwd=place, stderr=subprocess.PIPE, text=True
        ) as serving:
            assert serving.stderr is not None
            told = serving.stderr.readline()
            serving.kill()
        assert "open http://127.0.0.1" in told
        return
    done = subprocess.run(shell, cwd=place, capture_output=True, text=True, check=False, timeout=LINE_LIMIT_S)
    assert done.returncode == 0, f"{words}\n{done.stderr}"


@pytest.mark.proof
@pytest.mark.timeout(1500)  # a page may train several times, beside whatever else is tested
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "sh")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_shell_lines_run(page: Path, place: Path) -> None:
    if page.name in BEFORE and not (place / "runs").exists():
        run_page(ROOT / "docs" / BEFORE[page.name], place)
    run_page(page, place)


def run_page(page: Path, place: Path) -> None:
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            run_line(line, place)


def same_line(shown: str, printed: str) -> bool:
    """Whether two lines have the same words, the same whole numbers up to 64, and others within ROUNDING.

    Degrees, ranks and percentages of a bottleneck are small whole numbers: rounding would make another layout of one.
    """
    if NUMBER.sub("0", " ".join(shown.split())) != NUMBER.sub("0", " ".join(printed.split())):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(
        a == b or (not (a.isdigit() and int(a) <= 64) and abs(float(a) - float(b)) <= ROUNDING * float(a))
        for a, b in pairs
    )


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(*found, id=f"{page.name}-{i}")
        for page in PAGES
        for i, found in enumerate(SHOWN.findall(page.read_text(encoding="utf-8")))
    ],
)
def test_output_that_is_shown_is_what_the_command_prints(command: str, shown: str) -> None:
    """Every shown line is printed, in this order, next to each other but where a line `...` leaves some out."""
    done = run(*command.split()[1:])
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    place, skips = 0, False
    for line in shown.splitlines():
        if line == "...":
            skips = True
            continue
        found = [i for i, other in enumerate(printed[place:], place) if same_line(line, other)]
        assert found and (skips or found[0] == place), f"{command}\nis said to print\n{line}\nand prints\n{done.stdout}"
        place, skips = found[0] + 1, False


def test_the_readme_opens_with_the_layout_that_bloom_was_trained_with() -> None:
    """Before a word of installation: the layout of the BLOOM paper's section 3.4."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = SHOWN.search(text)
    assert found is not None and found.start() < min(text.find(word) for word in ("install", "venv", "make demo"))
    head, first = (next(line.split() for line in found[2].splitlines() if line.startswith(mark)) for mark in "#1")
    trained_with = {"Devices": "384", "DP": "8", "TP": "4", "PP": "12", "MBS": "2", "GBS": "2048", "ZeRO": "1"}
    assert {title: first[head.index(title)] for title in trained_with} == trained_with


@pytest.mark.parametrize("code", some("bash") + some("sh"))
def test_shell_reads_it_and_its_options_exist(code: str) -> None:
    subprocess.run(["bash", "-n", "-c", code], check=True)
    for words in re.findall(r"\btrimaran ((?:[a-z]+ )*[^\n#|>]*)", code.replace("\\\n", " ")):
        told = options_of(words.split()[0])
        assert [option for option in re.findall(r"--[a-z-]+", words) if option not in told] == []


@functools.cache
def options_of(verb: str) -> set[str]:
    """All options of a verb and of the verbs below it."""
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    below = getattr(command, "commands", {}).values()
    return {name for one in (command, *below) for parameter in one.params for name in parameter.opts} | {"--help"}


@pytest.mark.parametrize("code", some("toml"))
def test_toml_is_read_as_what_it_is(code: str, place: Path) -> None:
    stated = tomllib.loads(code)
    if "extends" in stated:
        (place / "mine.toml").write_text(code)
        load_stack(str(place / "mine.toml"))
        return
    if set(stated) == {"faults"}:
        (place / "faults.toml").write_text(tomli_w.dumps(stated["faults"]))
        load_faults(str(place / "faults.toml"))
        return
    if "device" in stated:
        (place / "cluster.toml").write_text(code)
        assert bool(load_cluster(str(place / "cluster.toml")).groups) == ("groups" in stated)
        return
    if not set(stated) <= RECIPE_KEYS:
        profile = place / "profile.toml"
        profile.write_text(code)
        load_profile(str(profile))
        return
    whole = {**LAPTOP, **{k: v for k, v in stated.items() if k not in LAPTOP or not isinstance(v, dict)}}
    for name, section in stated.items():
        if isinstance(section, dict):
            whole[name] = section if name == "model" else {**LAPTOP.get(name, {}), **section}
    if "blend" in whole["data"]:
        whole["data"].pop("paths")
    path = place / "stated.toml"
    path.write_text(tomli_w.dumps(whole))
    load_recipe(str(path))


@pytest.mark.parametrize("code", some("python"))
def test_python_runs(code: str, place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
