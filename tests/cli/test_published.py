"""One small table of each published document: predicted at full size, and measured here for real."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from command import MACHINE, TRIMARAN, run, tiny_recipe
from processes import bound_by_permissions
from trimaran.files.recipe_file import load_recipe
from trimaran.store import Store
from trimaran.study.stated import check_stated_layouts, stated_layouts

ROOT = Path(__file__).parents[2]
# The tables of fewest trials.
SMALL = {
    "fugaku-gpt-1b3": "allocator",
    "fugaku-gpt-30b": "tensor-parallel",
    "bigscience-1b3-v100": "v100-32gb",
    "gpt3-xl-p3": "torch-pipe",
    "bloom-176b": "final-14336",
}
# Those whose trials are done soon enough for continuous integration: GPT on CPUs, on a slow network, and BLOOM.
MEASURED = ("fugaku-gpt-1b3", "gpt3-xl-p3", "bloom-176b")


@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_may_be_run_as_it_stands(name: str) -> None:
    recipe = load_recipe(str(ROOT / "recipes" / f"{name}.toml"))
    assert recipe.cluster is not None and stated_layouts(recipe)
    check_stated_layouts(recipe, recipe.cluster)


@pytest.mark.parametrize("name", SMALL)
def test_predicted_row_by_row_beside_what_was_published(name: str) -> None:
    done = run("predict", f"recipes/{name}.toml", "--format", "json", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    tables = json.loads(done.stdout)
    assert len(tables) > 1
    rows = [row for table in tables for row in table["rows"]]
    both = [row for row in rows if row["sec_per_it"] and row["predicted_sec_per_it"]]
    assert len(both) > len(rows) / 4
    for row in both:
        assert row["error"] == pytest.approx(row["predicted_sec_per_it"] / row["sec_per_it"] - 1)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first table leaves what it has probed of this machine, for the others."""
    return tmp_path_factory.mktemp("machine") / "cluster.toml"


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MEASURED)
def test_a_table_is_measured_here_and_its_question_answered(name: str, machine: Path, tmp_path: Path) -> None:
    table, cluster = SMALL[name], tmp_path / f"{name}-laptop" / "cluster.toml"
    if name != MEASURED[0]:  # which probes this machine by itself, as it stands
        if not machine.exists():
            done = run("probe", "--quick", "--slots", "8", "-o", str(machine), cwd=tmp_path, timeout_s=300)
            assert done.returncode == 0, done.stderr
        cluster.parent.mkdir()
        shutil.copy(machine, cluster)
    arguments = ("bench", f"recipes/{name}.toml", "--scale", "laptop", "--table", table, "--runs", str(tmp_path))
    done = run(*arguments, "--format", "json", cwd=ROOT, timeout_s=550)
    assert done.returncode == 0, done.stderr
    shutil.copy(cluster, machine)
    (told,) = json.loads(done.stdout)
    assert told["table"] == table
    measured = [row for row in told["rows"] if row["small_status"] == "ok"]
    assert len(measured) == len(told["rows"]), [row["small_status"] for row in told["rows"]]
    assert all(row["small_s"] > 0 and row["small_predicted_s"] > 0 for row in measured)
    assert "Here: " in told["answer"] and "Published: " in told["answer"]
    # a second call measures nothing anew
    again = run(*arguments, "--format", "json", cwd=ROOT, timeout_s=100)
    assert json.loads(again.stdout) == [told]


def test_a_wrong_table_is_told() -> None:
    done = run("bench", "recipes/bloom-176b.toml", "--scale", "laptop", "--table", "tq", cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "'tq'" in done.stderr and "heads-14336" in done.stderr


@pytest.mark.parametrize(("verb", "way_out"), [("predict", "plan the recipe"), ("bench", "leave --scale out")])
def test_a_recipe_without_tables_is_refused_in_the_words_of_the_verb(verb: str, way_out: str, tmp_path: Path) -> None:
    done = run(verb, str(tiny_recipe(tmp_path)), *(["--scale", "laptop"] if verb == "bench" else []), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "tiny names no published tables" in done.stderr and done.stderr.strip().endswith(way_out)
    assert ("--scale" in done.stderr) == (verb == "bench")


@pytest.fixture
def small_machine(tmp_path: Path) -> Path:
    """The folder of measured tables, with a machine of two slots as a probe would leave it."""
    folder = tmp_path / "fugaku-gpt-1b3-laptop"
    folder.mkdir()
    (folder / "cluster.toml").write_text(MACHINE)
    return folder


def bench_small(
    runs: Path, *within: str, of: str = "fugaku-gpt-1b3", table: str = "data-parallel"
) -> subprocess.CompletedProcess[str]:
    recipe = ROOT / "recipes" / f"{of}.toml"
    command = [*within, TRIMARAN, "bench", str(recipe), "--scale", "laptop", "--table", table]
    return subprocess.run(
        [*command, "--runs", str(runs)], cwd=runs, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.proof
def test_a_layout_that_the_machine_is_too_small_for_is_left_out_and_said(small_machine: Path, tmp_path: Path) -> None:
    (small_machine / "cluster.toml").write_text(MACHINE.replace("devices_per_node = 2", "devices_per_node = 1"))
    done = bench_small(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "is left out: layout" in done.stderr and "but the cluster has 1" in done.stderr


def test_a_store_that_cannot_be_written_ends_the_command_and_leaves_no_layout_out(
    small_machine: Path, tmp_path: Path
) -> None:
    Store(small_machine / "store.sqlite").close()
    (small_machine / "store.sqlite").chmod(0o444)
    (small_machine / "cluster.toml").write_text(MACHINE.replace("devices_per_node = 2", "devices_per_node = 8"))
    done = bench_small(tmp_path, *bound_by_permissions())
    assert done.returncode == 2 and "left out" not in done.stderr, done.stderr
    assert "store.sqlite: it cannot be written" in done.stderr.splitlines()[-1]
    assert not (small_machine / "trials").exists()


def test_rows_whose_network_this_user_cannot_make_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "gpt3-xl-p3-laptop"
    folder.mkdir()
    (folder / "cluster.toml").write_text(MACHINE.replace("devices_per_node = 2", "devices_per_node = 8"))
    without = ("setpriv", "--bounding-set=-net_admin,-sys_admin", "--inh-caps=-all")
    done = bench_small(tmp_path, *without, of="gpt3-xl-p3", table="gpipe-networks")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is left out: network") == 5 and "nothing was timed" in done.stdout
