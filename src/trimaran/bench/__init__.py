"""Trials: layouts run for real as processes, watched, and measured into the store."""

from trimaran.bench.launcher import Launcher, Ranks, launcher_of
from trimaran.bench.limits import Limits
from trimaran.bench.sweep import Progress, run_sweep
from trimaran.bench.trial import Trial, prepare_trial, run_trial

__all__ = [
    "Launcher",
    "Limits",
    "Progress",
    "Ranks",
    "Trial",
    "launcher_of",
    "prepare_trial",
    "run_sweep",
    "run_trial",
]
