"""`trimaran plan` and `trimaran export` as a person meets them."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trimaran.planner.search.settings import fixed_choices

Run = Callable[..., "subprocess.CompletedProcess[str]"]

RECIPES = Path(__file__).parents[2] / "recipes"
BLOOM = ("--model", "bloom-176b", "--cluster", "jean-zay-a100-80gb", "--devices", "384", "--gbs", "2048")
SMALL = ("--model", "gpt3-1b3", "--cluster", "jean-zay-v100-32gb", "--devices", "16", "--gbs", "64")


def test_json_of_a_plan_holds_ranked_layouts_and_reasons(trimaran: Run) -> None:
    done = trimaran("plan", *BLOOM, "--stack", "megatron-deepspeed", "--tokens", "366e9", "--format", "json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    layouts = answer["layouts"]
    assert [entry["rank"] for entry in layouts] == list(range(1, 21))
    assert layouts[0]["sec_per_it"] <= layouts[1]["sec_per_it"]
    for entry in layouts:
        assert entry["dp"] * entry["tp"] * entry["pp"] == entry["devices"] <= 384
        assert 2048 % (entry["dp"] * entry["mbs"]) == 0
        assert sum(entry["time_s"].values()) == pytest.approx(entry["sec_per_it"])
        assert entry["mem_gib"] == pytest.approx(max(stage_total(stage) for stage in entry["memory_gib"]))
        assert entry["mem_gib"] <= 79.35 * 0.95
        assert entry["days"] == pytest.approx(entry["sec_per_it"] * -(-366e9 // (2048 * 2048)) / 86400, rel=1e-6)
    assert {refusal["rule"] for refusal in answer["refusals"]} >= {"global_batch", "heads", "even_stages"}
    assert "GiB" in answer["nearest_unfit"]["reason"]


def stage_total(stage: dict[str, float]) -> float:
    return sum(value for name, value in stage.items() if name not in ("stage", "layers"))


def test_table_has_the_documents_columns(trimaran: Run) -> None:
    done = trimaran("plan", *SMALL, "--format", "markdown", "--top", "3")
    headline, _, head, *_ = done.stdout.splitlines()
    assert headline.endswith("for trimaran (Trimaran's own trainer), which is assumed: --stack states another")
    header = [cell.strip() for cell in head.strip("|").split("|")]
    for column in ("Nodes", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "MFU", "Notes"):
        assert column in header
    assert "best: dp" in done.stdout


def test_long_iterations_are_told_in_digits(trimaran: Run) -> None:
    asked = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "8", "--gbs", "65536", "--top", "2")
    told = trimaran("plan", *asked).stdout
    assert "e+0" not in told
    seconds = [float(line.split()[told.split("\n")[2].split().index("Sec/it")]) for line in told.splitlines()[4:6]]
    assert all(second > 1000 for second in seconds)


def test_a_misspelt_choice_and_section_are_told_with_the_nearest(trimaran: Run, tmp_path: Path) -> None:
    done = trimaran("plan", *SMALL, "--fix", "recompte=full")
    assert "'recompte' is not known: did you mean 'recompute'?" in done.stderr and done.returncode == 2
    recipe = tmp_path / "mine.toml"
    recipe.write_text((RECIPES / "laptop.toml").read_text().replace("[sweep]", "[sweeep]"))
    assert "section 'sweeep' is not known: did you mean 'sweep'?" in trimaran("plan", str(recipe)).stderr


def test_mfu_is_the_tflops_of_its_row_over_the_peak_that_is_said(trimaran: Run) -> None:
    asked = ("plan", "--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "64", "--gbs", "256", "--stack",
             "torchtitan-compiled", "--fix", "precision=fp8", "--fix", "recompute=full", "--top", "3")  # fmt: skip
    layouts = json.loads(trimaran(*asked, "--format", "json").stdout)["layouts"]
    assert {(entry["flops_formula"], round(entry["tflops"] / entry["mfu"], 1)) for entry in layouts} == {
        ("model_flops", 1978.9)
    }
    assert "TFLOPs and MFU count the model's operations" in (printed := trimaran(*asked).stdout)
    assert "of 1979 TFLOPs in fp8" in printed


def test_a_precision_that_the_stack_lacks_is_refused_in_one_line(trimaran: Run) -> None:
    done = trimaran("plan", *SMALL, "--fix", "precision=mxfp8")
    assert done.returncode == 2
    assert "precision mxfp8 is not one of trimaran's" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_csv_is_a_table_and_nothing_else(trimaran: Run) -> None:
    done = trimaran("plan", *SMALL, "--format", "csv", "--top", "5")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert "best: dp" in done.stderr


def test_planning_imports_no_torch() -> None:
    code = f"""
import sys
sys.argv = ["trimaran", "plan", *{SMALL!r}]
from trimaran.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
assert "torch" not in sys.modules and "scipy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


WRONG = [
    *(("--devices", value) for value in ("0", "-1", "1e30", "NaN", "many")),
    *(("--gbs", value) for value in ("0", "-1", "1e30", "NaN", "many", "1000000000000")),
    *(("--seq", value) for value in ("0", "-1", "1e30", "NaN", "many", "1000000")),
    *(("--top", value) for value in ("0", "-1", "1e30", "NaN", "many")),
    *(("--tokens", value) for value in ("0", "-1", "1e30", "NaN", "many")),
    *(("--mem-margin", value) for value in ("1", "-1", "1e30", "NaN", "much")),
    *(("--gbs-tolerance", value) for value in ("1", "-1", "1e30", "NaN", "much")),
    *(("--deadline-days", value) for value in ("0", "-1", "1e30", "NaN", "soon", "1")),
    *(("--budget", value) for value in ("0", "-1", "1e30", "NaN", "little", "1")),
    *(("--price", value) for value in ("0", "-1", "1e30", "NaN", "cheap")),
    *(("--fix", value) for value in ("tp=0", "tp=-1", "tp=1e30", "tp=NaN", "tp=two", "tp=5", "tp", "tpp=2")),
    *(("--fix", value) for value in ("mbs=100000", "recompute=ful", "placement=tp-dp", "precision=fp8")),
    *(("--ramp-up", value) for value in ("32", "0,0,0", "-1,32,5", "32,32,NaN", "1e30,1,1", "7,32,100")),
    *(("--why", value) for value in ("dp0", "dp-1", "dp1e30", "dpNaN", "eight", "dp8,cpp2")),
    ("--model", "gpt3-1b"),
    ("--cluster", "jean-zay"),
    ("--stack", "megatro"),
    ("--optimizer", "adamm"),
    ("--grow-nodes",),
    ("--grow-nodes", "--ramp-up", "4,4,100", "--gbs-tolerance", "0.1"),
    ("--price", "2"),
    ("--objective", "speed"),
    ("--objective", "devices"),
    ("--format", "xml"),
    ("--calibration", "missing.toml"),
    ("--wat", "1"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=" ".join)
def test_wrong_input_is_told_in_one_line_with_status_2(
    wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimaran.cli import main

    monkeypatch.setattr(sys, "argv", ["trimaran", "plan", *SMALL, *wrong])
    with pytest.raises(SystemExit) as end:
        main()
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1
    assert "Traceback" not in shown.err


def test_a_choice_that_is_held_twice_is_held_at_all_its_values() -> None:
    assert fixed_choices(["tp=2", "mbs=1", "tp=4,8"]) == fixed_choices(["tp=2,4,8", "mbs=1"])


def test_export_says_that_it_chooses_what_a_layout_leaves_out(trimaran: Run) -> None:
    said = " ".join(trimaran("export", "--help").stdout.replace("│", " ").split())
    assert "what it leaves out is chosen as a plan would, unless it states dp, tp, pp, mbs and precision" in said
    asked = ("export", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gbs", "64", "--devices", "8")
    assert "layout dp2,tp4," in trimaran(*asked, "--layout", "dp2,mbs4").stderr
    whole = trimaran(*asked, "--layout", "dp2,tp1,pp1,mbs1,zero1,recompute-full,bf16")
    assert "layout dp2,tp1,pp1,mbs1,zero1,recompute-full,bf16" in whole.stderr


def test_why_explains_a_ranked_a_refused_and_an_unfit_layout(trimaran: Run) -> None:
    ranked = trimaran("plan", *BLOOM, "--stack", "megatron-deepspeed", "--why", "dp8,tp4,pp10,mbs2")
    assert "rank" in ranked.stdout and "bubble" in ranked.stdout and "sec/it" in ranked.stdout
    refused = trimaran("plan", *BLOOM, "--stack", "megatron-deepspeed", "--why", "dp6,tp5,pp11,mbs1")
    assert "refused" in refused.stdout
    assert "heads 112 is not a multiple of TP 5" in refused.stdout
    assert "layers 70 do not split evenly" in refused.stdout
    unfit = trimaran("plan", *BLOOM, "--stack", "megatron-deepspeed", "--why", "dp8,tp1,pp1,mbs1", "--format", "json")
    answer = json.loads(unfit.stdout)
    assert answer["verdict"] == "does not fit"
    assert answer["estimate"]["mem_gib"] > 79.35


def test_ramp_up_schedule_is_the_documents_table(trimaran: Run) -> None:
    asked = ("plan", "--model", "bigscience-1b3", "--cluster", "jean-zay-v100-32gb", "--gbs", "512", "--tokens",
             "300e9", "--stack", "megatron-deepspeed", "--ramp-up", "32,32,5000000", "--fix", "pp=2", "--fix", "tp=1",
             "--fix", "mbs=4", "--fix", "dp=128", "--fix", "recompute=full")  # fmt: skip
    grown = trimaran(*asked, "--grow-nodes", "--format", "markdown")
    assert grown.returncode == 0, grown.stderr
    assert "| NNODES |" in grown.stdout and "restarts" in grown.stdout
    held = trimaran(*asked)
    assert held.returncode == 2 and "ramp-up reaches a global batch of 32" in held.stderr


def test_export_plans_what_the_version_can_be_told_and_says_what_it_passes_over(trimaran: Run) -> None:
    """A slower layout was written without a word, and none where a ring, which 0.3 has not, was best everywhere."""
    asked = ("export", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gbs", "128", "--devices", "8")
    told = trimaran(*asked, "--fix", "cp=2", "--to", "torchtitan").stderr
    assert "cp2,cp-all_gather," in told and "of the plan" not in told
    recompute = ("--fix", "recompute=full", "--fix", "recompute_every=1,2")
    held = trimaran(*asked, *recompute, "--to", "torchtitan")
    assert held.returncode == 0
    assert re.search(
        r"note: it is number \d+ of the plan, \d\.\d\d times the first one's time, since layout ", held.stderr
    )
    assert "no setting for recomputing one layer in 2 (0.2 has: --for-version 0.2)" in held.stderr


def test_export_writes_for_each_trainer(trimaran: Run) -> None:
    flags = trimaran("export", *BLOOM, "--to", "megatron-deepspeed", "--layout", "dp8,tp4,pp10,mbs2,zero1,fp16").stdout
    for flag in ("--tensor-model-parallel-size 4", "--pipeline-model-parallel-size 10", "--micro-batch-size 2",
                 "--global-batch-size 2048", "--position-embedding-type alibi", "--embed-layernorm",
                 "--zero-stage 1", "--fp16"):  # fmt: skip
        assert flag in flags
    refused = trimaran("export", *BLOOM, "--to", "megatron-lm", "--layout", "dp8,tp4,pp10,mbs2")
    assert refused.returncode == 2 and "model.positions alibi" in refused.stderr
    assert trimaran("export", *BLOOM, "--to", "nemo").returncode == 2


def test_a_recipe_is_planned_and_options_override_it(trimaran: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "study.toml"
    recipe.write_text(
        'name = "study"\nstack = "megatron"\ncluster = "dgx-h100"\n[model]\nname = "gpt3-1b3"\n'
        "[workload]\nseq_len = 1024\nglobal_batch = 64\ntokens = 1000000000\n"
        '[sweep]\ndevices = [8, 32]\nmem_margin = 0.2\nfixed = {tp = 2, recompute = "full"}\n'
    )
    answer = json.loads(trimaran("plan", str(recipe), "--format", "json").stdout)
    assert {entry["devices"] for entry in answer["layouts"]} <= {8, 32}
    assert {(entry["tp"], entry["recompute"], entry["gbs"]) for entry in answer["layouts"]} == {(2, "full", 64)}
    assert (answer["mem_margin"], answer["stack"]) == (0.2, "megatron")
    other = json.loads(
        trimaran(
            "plan", str(recipe), "--gbs", "96", "--fix", "tp=4", "--devices", "24", "--stack", "trimaran",
            "--format", "json",
        ).stdout
    )  # fmt: skip
    assert {(entry["tp"], entry["gbs"]) for entry in other["layouts"]} == {(4, 96)}
    assert other["stack"] == "trimaran" and max(entry["devices"] for entry in other["layouts"]) <= 24


@pytest.mark.proof
def test_why_takes_a_stated_stage_split(trimaran: Run) -> None:
    told = trimaran("plan", *BLOOM, "--why", "dp8,tp4,pp12,mbs1,recompute-full,split5-6x10-5", "--format", "json")
    answer = json.loads(told.stdout)
    assert answer["estimate"]["stage_split"] == [5, *[6] * 10, 5]
    wrong = trimaran("plan", *BLOOM, "--why", "dp8,tp4,pp12,mbs1,split6x12")
    assert "72 layers, but PP 12 x VPP 1 = 12 stages and 70 layers are needed" in wrong.stdout


def test_a_ramp_up_may_use_more_devices_than_the_cluster_file_has(trimaran: Run) -> None:
    fixed = [word for choice in ("tp=1", "pp=1", "mbs=2") for word in ("--fix", choice)]
    done = trimaran("plan", "--model", "gpt3-1b3", "--cluster", "dlperf-v100", "--devices", "64", "--gbs", "128",
                    "--ramp-up", "64,64,5000", "--grow-nodes", *fixed, "--top", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
