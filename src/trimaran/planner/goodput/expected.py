"""The expected time of a training whose machines fail, in closed form.

Faults come as a Poisson process, while the training makes steps and while it restarts. Between two checkpoints lie
tau seconds of work and save_s of saving, L in all; a fault throws the training back to the newest checkpoint, after
detect_s and an undisturbed restart of R seconds. With a rate of r faults a second the expected time of one stretch is
(exp(r L) - 1) exp(r R) (1/r + detect_s): J. T. Daly, A higher order estimate of the optimum checkpoint interval for
restart dumps, Future Generation Computer Systems 22 (2006), eq. 13, with a time to detect that no fault falls into.

A checkpoint that cannot be written, with a chance of q, leaves the next stretch to be lost together with those before
it. Of p = exp(-r L), the chance that no fault strikes in a stretch, follows the chance that one becomes a checkpoint
before a fault does, P = p (1 - q) / (1 - p q), after 1 / (1 - p q) stretches in the mean; each checkpoint then has
(1 - P) / P = (exp(r L) - 1) / (1 - q) faults, and with its stretches exp(r L) - 1 of above becomes
(exp(r L) - 1) (1 - q exp(-r L)) / (1 - q).

Nodes that are away are an Erlang loss system: with S spares, the share of the time in which S + 1 nodes are away is
B(S + 1, a), a being how many would be away in the mean. Meanwhile the training waits, and nothing fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Faulty:
    """A training on machines that fail. Times in seconds.

    `work_s` is what it takes without faults and checkpoints, `every_s` the work between two checkpoints, `rate` the
    faults a second on all of its devices, `refused` the share of checkpoints that cannot be written. Of `away_share`
    of the faults the node is away for `repair_s`, in the mean; one of `spares` takes its place, where one is left.
    """

    work_s: float
    rate: float
    every_s: float
    save_s: float
    detect_s: float
    restart_s: float
    refused: float = 0.0
    away_share: float = 0.0
    repair_s: float = 0.0
    spares: int = 0


@dataclass(frozen=True)
class Expected:
    """Expected seconds of a training, in parts; `faults` is how many there are in the mean."""

    work_s: float
    checkpoints_s: float
    lost_s: float
    restarts_s: float
    waiting_s: float
    faults: float

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return self.work_s + self.checkpoints_s + self.lost_s + self.restarts_s + self.waiting_s

    @property
    def goodput(self) -> float:
        """The share of the time that is work and is kept."""
        return self.work_s / self.total_s


def expected(training: Faulty) -> Expected:
    """The expected time of a training; what never ends, since faults come faster than stretches, is infinite."""
    stretch_s, rate, restart_s = training.every_s + training.save_s, training.rate, training.restart_s
    stretches = training.work_s / training.every_s
    saved_s = stretches * training.save_s
    if rate == 0.0:
        return Expected(training.work_s, saved_s, 0.0, 0.0, 0.0, 0.0)
    if rate * (stretch_s + restart_s) > _MOST_EXPONENT:
        return Expected(training.work_s, saved_s, math.inf, math.inf, 0.0, math.inf)
    # failed tries of a stretch that was made once, and of a restart
    refused = training.refused
    failed = math.expm1(rate * stretch_s) * (1.0 - refused * math.exp(-rate * stretch_s)) / (1.0 - refused)
    failed_restarts = math.expm1(rate * restart_s)
    lost_s = stretches * (failed / rate - stretch_s)
    down_s = training.detect_s + failed_restarts * (1.0 / rate + training.detect_s)
    restarts_s = stretches * failed * down_s
    running_s = training.work_s + saved_s + lost_s + restarts_s
    waiting = waiting_share(training)
    return Expected(
        work_s=training.work_s,
        checkpoints_s=saved_s,
        lost_s=lost_s,
        restarts_s=restarts_s,
        waiting_s=running_s * waiting / (1.0 - waiting),
        faults=stretches * failed * (1.0 + failed_restarts),
    )


_MOST_EXPONENT = 50.0


def waiting_share(training: Faulty) -> float:
    """The share of the time in which more nodes are away than there are spares: Erlang's loss formula."""
    away = training.rate * training.away_share * training.repair_s
    blocked = 1.0
    for servers in range(1, training.spares + 2):
        blocked = away * blocked / (servers + away * blocked)
    return blocked


def young_s(save_s: float, rate: float) -> float:
    """The checkpoint interval of J. W. Young (Communications of the ACM 17, 1974), seconds of work."""
    return math.sqrt(2.0 * save_s / rate)


def daly_s(save_s: float, rate: float) -> float:
    """The checkpoint interval of Daly (2006), eq. 37, seconds of work; the mean time between faults where it is less.

    It holds while a checkpoint takes less than twice the mean time between faults.
    """
    between_s = 1.0 / rate
    if save_s >= 2.0 * between_s:
        return between_s
    share = save_s / (2.0 * between_s)
    return math.sqrt(2.0 * save_s * between_s) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - save_s


def best_interval_s(save_s: float, rate: float) -> float:
    """The interval of which the expected time is least: rate x interval = 1 + W(-exp(-rate x save_s - 1)).

    It is where exp(r L) (1 - r tau) = 1, by setting the derivative of (exp(r L) - 1) / tau to zero; solved by halving.
    """
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2.0
        if math.exp(middle + rate * save_s) * (1.0 - middle) > 1.0:
            low = middle
        else:
            high = middle
    return high / rate
