"""Group hosts: which of Slurm's nodes is which node of a cluster of groups, as the settings name them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimaran.bench.launch.contract import Launch
from trimaran.bench.launch.slurm.queue import run
from trimaran.files.catalogue import write_atomically
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.slurm_settings import SlurmSettings


def group_hosts(settings: SlurmSettings, cluster: Cluster) -> tuple[str, ...]:
    """The host of each node of the cluster, in their order; empty where the settings name none.

    Raises TrimaranError where they name other groups than the cluster has, or not as many nodes of one.
    """
    if not settings.groups:
        return ()
    where = cluster.name or "the cluster"
    names = [group.name for group in cluster.groups]
    if sorted(names) != sorted(settings.groups):
        raise TrimaranError(
            f"[sweep.slurm.groups] names {', '.join(settings.groups)}, and the groups of {where} are "
            f"{', '.join(names) or 'none'}: name the nodes of each of these, and no others"
        )
    per_node = {group.devices_per_node for group in cluster.groups}
    if len(per_node) > 1 and cluster.device.kind == "gpu":
        raise TrimaranError(
            f"nodes of {where}'s groups have {min(per_node)} to {max(per_node)} devices, and a job of Slurm asks for "
            f"as many on each: state groups of nodes with as many"
        )
    hosts: list[str] = []
    for group in cluster.groups:
        found = run("scontrol", "show", "hostnames", settings.groups[group.name]).split()
        if len(found) != group.nodes:
            raise TrimaranError(
                f"[sweep.slurm.groups] {group.name} = {settings.groups[group.name]!r} is {len(found)} nodes, and the "
                f"group has {group.nodes} in {where}: name as many, or correct its nodes"
            )
        hosts += found
    twice = next((host for host in hosts if hosts.count(host) > 1), None)
    if twice is not None:
        raise TrimaranError(f"[sweep.slurm.groups] names node {twice} {hosts.count(twice)} times: name each once")
    return tuple(hosts)


def hosts_of(launch: Launch, hosts: Sequence[str]) -> list[str]:
    """The host of each share of a launch's ranks; empty where no hosts are known."""
    return [hosts[launch.places[share[0]].node] for share in launch.shares] if hosts and launch.places else []


def require_hosts_in_job(hosts: Sequence[str], nodes: str, job: str) -> None:
    """Raise TrimaranError where a job's `nodes`, as Slurm lists them, lack one of the hosts."""
    held = set(run("scontrol", "show", "hostnames", nodes).split())
    lacks = [host for host in hosts if host not in held]
    if lacks:
        raise TrimaranError(
            f"the layout's ranks stand on node {lacks[0]}, and Slurm job {job} has {nodes}: ask sbatch for "
            f"--nodelist={','.join(hosts)}"
        )


def host_options(launch: Launch, hosts: Sequence[str]) -> list[str]:
    """Options by which srun puts each share's tasks on its host, in their order: a file has one line for each task."""
    tasks = [host for host, share in zip(hosts, launch.shares, strict=True) for _ in share]
    listed: Path = launch.out_dir / "hosts"
    write_atomically(listed, "".join(f"{host}\n" for host in tasks))
    return [f"--nodelist={listed}", "--distribution=arbitrary"]
