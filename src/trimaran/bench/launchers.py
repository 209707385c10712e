"""The launchers: the first that a sweep's settings or its cluster ask for starts the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trimaran.bench.launch.contract import Launcher, LauncherKind, Say
from trimaran.bench.launch.local import LocalLauncher
from trimaran.bench.launch.network.shaped_launcher import ShapedLauncher
from trimaran.bench.launch.ray.ray_launcher import RayLauncher
from trimaran.bench.launch.slurm.slurm_launcher import SlurmLauncher
from trimaran.nouns.cluster import Cluster
from trimaran.recipe.sweep_settings import SweepSettings

LAUNCHERS: tuple[LauncherKind, ...] = (
    ShapedLauncher,
    SlurmLauncher,
    RayLauncher,
    LocalLauncher,
)


@contextmanager
def launcher_of(sweep: SweepSettings, cluster: Cluster, say: Say = lambda text: None) -> Iterator[Launcher]:
    """The launcher that a sweep's settings and its cluster ask for, closed at the end of the block.

    Raises TrimaranError where they ask for two at a time, or for one that this machine does not have.
    """
    made = (kind.asked_for(sweep, cluster, say) for kind in LAUNCHERS)
    launcher = next(launcher for launcher in made if launcher is not None)
    try:
        yield launcher
    finally:
        launcher.close()
