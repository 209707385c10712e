"""What options say beside a configuration of another trainer counts, and what says nothing of it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import run

SCRIPT = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 2 --global-batch-size 64 --bf16 --tokenizer-model a.model"
)


def price(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "run.sh").write_text(SCRIPT)
    done = run("import", "--config", "run.sh", "--cluster", "dgx-h100", "--devices", "16", *options, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_sizes_that_a_configuration_leaves_out_are_set(tmp_path: Path) -> None:
    status, said = price(tmp_path)
    assert status == 2 and "does not state the model's vocab (--vocab-size): add --set vocab=N, or give --model" in said
    status, said = price(tmp_path, "--set", "vocab=51200", "--set", "mbs=4")
    assert status == 0 and said.startswith("dp16,tp1,pp1,mbs4,bf16 on 16 devices")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--set", "tp=4"), "of a configuration mbs, gbs, seq_len, devices, layers, "),
        (("--set", "mbs"), "mbs is a whole number from 1 on"),
        (("--set", "vocab=0"), "vocab is a whole number from 1 on"),
        (("--set", "gbs=32", "--gbs", "64"), "--set 'gbs=32' and gbs 64 contradict each other"),
        (("--set", "vocab=9", "--model", "gpt3-1b3"), "--set states vocab 9, and gpt3-1b3 has "),
        (("--profile", "x"), "--profile is of logs and tables, and --config is a configuration"),
        (("--repairs", "accept"), "--repairs is of logs and tables"),
        (("--layout", "dp8"), "--layout is of logs and tables"),
    ],
)
def test_what_says_nothing_of_a_configuration_is_refused(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    status, said = price(tmp_path, *options)
    assert status == 2 and says in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("import", "run.sh", "--into", "a.sqlite", "--gbs", "64"), "--gbs 64 is of a configuration, and no --config"),
        (("import", "run.sh", "--into", "a.sqlite", "--seq-len", "9"), "by --set, as --set seq_len=9"),
        (("import", "run.sh", "--into", "a.toml", "--devices", "8"), "--devices 8 is of a configuration"),
        (
            ("import", "run.sh", "--into", "a.toml", "--repairs", "ask"),
            "--repairs is of runs, and links go into a.toml",
        ),
        (("train", "laptop", "--dry-run", "--resume"), "--resume is of a training, and --dry-run starts none"),
        (("train", "laptop", "--dry-run", "--trace", "3"), "--trace 3 is of a training, and --dry-run starts none"),
        (
            ("report", "a.sqlite", "--format", "json", "-o", "a.csv"),
            "--format json is of what is printed, and a.csv is",
        ),
        (("bench", "laptop", "--table", "tp"), "--table tp is of the recipe's published tables: add --scale laptop"),
        (("bench", "laptop", "--scale", "laptop", "--retry", "oom"), "--retry oom is of the recipe's own trials"),
        (("bench", "laptop", "--scale", "laptop", "--soak", "9"), "--soak 9 is of the recipe's own trials"),
        (("predict", "bloom-176b", "--stack", "torchtitan"), "--stack torchtitan is of rows that name none"),
        (("plan", "laptop", "--cluster", "dgx-h100", "--why", "dp8", "--check"), "--check traces the best layouts"),
    ],
)
def test_an_option_that_counts_only_beside_another_is_refused_without_it(
    tmp_path: Path, command: tuple[str, ...], says: str
) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_the_ramp_up_that_a_refusal_names_is_one(tmp_path: Path) -> None:
    asked = ("plan", "--model", "gpt3-125m", "--cluster", "dgx-h100", "--gbs", "64", "--tokens", "1e10", "--grow-nodes")
    refused = run(*asked, cwd=tmp_path)
    assert refused.returncode == 2
    way_out = refused.stderr.split("state one, as ")[1].split()
    assert run(*asked, *way_out, cwd=tmp_path).returncode == 0


def test_a_schedule_is_told_beside_a_csv_as_all_else_is(tmp_path: Path) -> None:
    asked = (
        "plan",
        "--model",
        "gpt3-125m",
        "--cluster",
        "dgx-h100",
        "--gbs",
        "64",
        "--tokens",
        "1e10",
        "--devices",
        "8",
    )
    done = run(*asked, "--top", "2", "--ramp-up", "32,32,100000", "--format", "csv", cwd=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3, "the rows alone"
    assert "nodes,batch,dp,mbs,samples,iterations,hours" in done.stderr.splitlines()
