"""Numbers of configurations: what is no whole number is refused, and what the software would refuse is told of."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran.nouns.noun import TrimaranError
from trimaran.planner.configs.cost import cost_of
from trimaran.planner.configs.read import read_config
from trimaran.planner.configs.resolve import Given

PLAIN = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
PLAIN += "--vocab-size 51200 --micro-batch-size 2 --global-batch-size 64 --bf16 "


def test_what_the_software_would_refuse_is_told_beside_the_figures(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py {PLAIN}")
    cost = cost_of(tmp_path / "run.sh", "auto", Given(cluster="dgx-h100", devices=8, global_batch=7))
    told = [sentence for kind, sentence in cost.remarks if kind == "not as known"]
    assert len(told) == 1 and told[0].startswith("global batch 7 is not a multiple of DP 8 x micro-batch 2")


@pytest.mark.parametrize(
    ("written", "layers"), [("24", 24), ("2.4e1", 24), ("2.5", None), ("1e400", None), ("nan", None)]
)
def test_a_count_is_a_whole_number(tmp_path: Path, written: str, layers: int | None) -> None:
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py {PLAIN.replace('24', written, 1)}")
    if layers is None:
        with pytest.raises(TrimaranError, match=f"--num-layers is '{written}', expected a whole number"):
            read_config(tmp_path / "run.sh", "auto")
    else:
        assert read_config(tmp_path / "run.sh", "auto").model["layers"] == layers


@pytest.mark.parametrize(
    "flags",
    ["--window-size {},0", "--num-experts 8 --moe-layer-freq {}", "--rampup-batch-size 1 1 {}", "--seq-length {}"],
)
def test_a_number_of_more_digits_than_python_reads_ends_in_a_line(tmp_path: Path, flags: str) -> None:
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py {PLAIN} {flags.format('9' * 5000)}")
    with pytest.raises(TrimaranError, match=r"^--"):
        read_config(tmp_path / "run.sh")


def test_a_recompute_of_torchtitan_of_too_many_layers_ends_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f"[activation_checkpoint]\nselective_ac_option = '{'9' * 5000}'\n")
    with pytest.raises(TrimaranError, match="selective_ac_option is"):
        read_config(tmp_path / "job.toml")
