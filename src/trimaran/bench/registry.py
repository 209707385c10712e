"""The launchers by what asks for them: the first that a sweep or its cluster wants starts the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trimaran.bench.launch.contract import Launcher
from trimaran.bench.launch.local import LocalLauncher
from trimaran.bench.launch.network import ShapedLauncher
from trimaran.bench.launch.slurm.launcher import SlurmLauncher
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError
from trimaran.recipe.sweep import SweepSettings

Say = Callable[[str], None]


def _shaped(sweep: SweepSettings, cluster: Cluster, say: Say) -> Launcher | None:
    return ShapedLauncher(cluster.shaped) if cluster.shaped else None


def _slurm(sweep: SweepSettings, cluster: Cluster, say: Say) -> Launcher | None:
    return SlurmLauncher(sweep.slurm, say) if sweep.slurm else None


def _local(sweep: SweepSettings, cluster: Cluster, say: Say) -> Launcher | None:
    return LocalLauncher()


# The first that a sweep or its cluster asks for starts the ranks.
LAUNCHERS: tuple[Callable[[SweepSettings, Cluster, Say], Launcher | None], ...] = (_shaped, _slurm, _local)


@contextmanager
def launcher_of(sweep: SweepSettings, cluster: Cluster, say: Say = lambda text: None) -> Iterator[Launcher]:
    """The launcher that a sweep's settings and its cluster ask for, closed at the end of the block."""
    if cluster.shaped and sweep.slurm:
        raise TrimaranError("networks are shaped inside one machine, and sweep.slurm asks for others: drop one of them")
    launcher = next(found for make in LAUNCHERS if (found := make(sweep, cluster, say)) is not None)
    try:
        yield launcher
    finally:
        launcher.close()
