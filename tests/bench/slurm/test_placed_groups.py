"""Placed layouts on a real Slurm whose nodes are of groups: each rank stands on the node that it is placed on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from on_slurm import LIMITS, SUBMITS
from pydantic import ValidationError

from trial_helpers import fake_worker
from trimaran.bench.launch.local import LocalLauncher
from trimaran.bench.launch.slurm.node import node_file
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher
from trimaran.bench.trial.trial import prepare_trial, run_trial
from trimaran.bench.watch.limits import Limits
from trimaran.layout.notation import parse_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.node_group import GroupLink, NodeGroup
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings
from trimaran.recipe.recipe import Recipe

# the other way round than Slurm numbers its nodes
NODES = {"east": "n2", "west": "n1"}


@pytest.fixture
def unlike(cluster: Cluster) -> Cluster:
    groups = [
        NodeGroup(
            name=name, device=cluster.device, nodes=1, devices_per_node=2, intra=cluster.intra, inter=cluster.inter
        )
        for name in NODES
    ]
    link = GroupLink(between=("east", "west"), bandwidth_gbps=1, latency_us=1000)
    return Cluster.of_groups(groups, [link], name="two sites", cores_per_node=2)


@SUBMITS
def test_each_rank_stands_on_the_node_of_the_group_that_it_is_placed_on(
    recipe: Recipe, unlike: Cluster, tmp_path: Path, submit: str
) -> None:
    stood = {}
    with closing(SlurmLauncher(SlurmSettings(submit=submit, groups=NODES), cluster=unlike)) as launcher:
        # two ranks on the second node and one on the first, then four in the devices' own order
        for text in ("pp3,mbs1,on2.0.3", "dp4,mbs1"):
            layout = parse_layout(text)
            trial = prepare_trial(recipe, unlike, layout, data_dir=tmp_path, work_dir=tmp_path / "runs")
            row = run_trial(trial, launcher, Limits(**vars(LIMITS)), worker=fake_worker("ok"))
            assert row.status == "ok", row.evidence
            folder = Path(trial.job.out_dir)
            stood[text] = [node_file(folder, rank).read_text().strip() for rank in range(layout.devices)]
    assert stood == {"pp3,mbs1,on2.0.3": ["n1", "n2", "n1"], "dp4,mbs1": ["n2", "n2", "n1", "n1"]}


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"east": "n2"}, r"names east, and the groups of two sites are east, west"),
        ({"east": "n2", "wets": "n1"}, r"names east, wets, and the groups of two sites are east, west"),
        ({"east": "n[1-2]", "west": "n3"}, r"east = 'n\[1-2\]' is 2 nodes, and the group has 1 in two sites"),
        ({"east": "n2", "west": "n2"}, r"names node n2 2 times"),
    ],
)
def test_nodes_that_are_not_those_of_the_groups_are_refused_at_once(
    unlike: Cluster, groups: dict[str, str], says: str
) -> None:
    with pytest.raises(TrimaranError, match=says) as refused:
        SlurmLauncher(SlurmSettings(groups=groups), cluster=unlike)
    assert "\n" not in str(refused.value)


def test_nodes_that_no_group_names_are_a_row_that_says_how(recipe: Recipe, unlike: Cluster, tmp_path: Path) -> None:
    trial = prepare_trial(
        recipe, unlike, parse_layout("dp2,mbs1,on0.2"), data_dir=tmp_path, work_dir=tmp_path / "runs"
    )  # fmt: skip
    row = run_trial(trial, LocalLauncher(), Limits(**vars(LIMITS)), worker=fake_worker("ok"))
    assert row.status == "not_run" and "name them in [sweep.slurm.groups]" in (row.evidence or "")
    with pytest.raises(ValidationError, match="drop at_once"):
        SlurmSettings(groups=NODES, at_once=2)
