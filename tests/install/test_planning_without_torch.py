"""`pip install trimaran`, without an extra, gives planning, and nothing there needs PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAN = ["plan", "--model", "bloom-176b", "--cluster", "jean-zay-a100-80gb", "--devices", "384", "--gbs", "2048"]


def test_planning_predicting_and_exporting_import_no_torch() -> None:
    """Every verb that does not train runs where importing torch fails."""
    block = "import sys; sys.modules['torch'] = None; from trimaran.cli import main; sys.argv[0] = 'trimaran'; main()"
    for arguments in ([*PLAN, "--format", "json"], ["predict", "seeds", "--format", "json"], ["--help"]):
        done = subprocess.run([sys.executable, "-c", block, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_bare_install_plans_bloom_and_says_what_training_needs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    bin_dir = tmp_path / "venv" / "bin"
    pip = [str(bin_dir / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, str(ROOT)], check=True)
    absent = subprocess.run([str(bin_dir / "python"), "-c", "import torch"], capture_output=True, check=False)
    assert absent.returncode != 0
    trimaran = str(bin_dir / "trimaran")
    done = subprocess.run([trimaran, *PLAN, "--format", "json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)
    refused = subprocess.run([trimaran, "probe"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "trimaran[train]" in refused.stderr
