"""On a real Slurm, ranks have all of their nodes: cores and memory, whatever the shell or the job around them says."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from virtual_cluster import CORES_PER_NODE

from trimaran.bench.launch.contract import Launch
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher
from trimaran.nouns.slurm_settings import SlurmSettings

SAYS_ITS_CORES = """
import os, time
with open("cores." + os.environ["RANK"], "w") as file:
    file.write(os.environ["SLURM_CPUS_ON_NODE"])
time.sleep(60)
"""


def test_ranks_have_all_cores_and_all_memory_of_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step had as many cores as ranks, a job the memory of DefMemPerNode, and srun refused what sbatch had set."""
    for name in ("SLURM_NTASKS_PER_GPU", "SLURM_GPUS_PER_TASK", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE"):
        monkeypatch.setenv(name, "1")
    folder = tmp_path / "trial"
    folder.mkdir()
    launch = Launch((sys.executable, "-c", SAYS_ITS_CORES), ranks=4, out_dir=folder, ranks_per_node=2)
    with closing(SlurmLauncher(SlurmSettings())) as launcher:
        ranks = launcher.start(launch)
        try:
            files, deadline = [folder / f"cores.{rank}" for rank in range(4)], time.monotonic() + 30
            while not all(file.exists() and file.read_text() for file in files):
                assert time.monotonic() < deadline, (folder / "launcher.log").read_text()
                time.sleep(0.1)
            asked = ["squeue", "--noheader", "--Format=tres-alloc:100"]
            allocated = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        finally:
            ranks.kill()
    assert [file.read_text() for file in files] == [str(CORES_PER_NODE)] * 4
    assert "mem=8000M,node=2" in allocated
