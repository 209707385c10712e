"""The expected time of a training whose machines fail, in closed form.

Faults come as a Poisson process, while the training makes steps and while it restarts. Between two checkpoints lie
tau seconds of work and save_s of saving, L in all; a fault throws the training back to the newest checkpoint, after
detect_s and an undisturbed restart of R seconds. With a rate of r faults a second the expected time of one stretch is
(exp(r L) - 1) exp(r R) (1/r + detect_s): J. T. Daly, A higher order estimate of the optimum checkpoint interval for
restart dumps, Future Generation Computer Systems 22 (2006), eq. 13, with a time to detect that no fault falls into.
What is left behind the last whole stretch is a shorter one: a training saves at its end.

A checkpoint that cannot be written, with a chance of q, leaves the next stretch to be lost together with those before
it. Of p = exp(-r L), the chance that no fault strikes in a stretch, follows the chance that one becomes a checkpoint
before a fault does, P = p (1 - q) / (1 - p q), after 1 / (1 - p q) stretches in the mean; each checkpoint then has
(1 - P) / P = (exp(r L) - 1) / (1 - q) faults, and with its stretches exp(r L) - 1 of above becomes
(exp(r L) - 1) (1 - q exp(-r L)) / (1 - q).

Nodes that are away are an Erlang loss system: with S spares, the share of the time in which S + 1 nodes are away is
B(S + 1, a) once as many come back as go, a being how many would be away in the mean. Meanwhile the training waits, and
nothing fails. No node is away as a training begins; what that saves is counted (`_waiting_s`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np


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


def stretches(training: Faulty) -> tuple[int, float]:
    """How many whole stretches of work a training has, and the seconds of work in the shorter one behind them."""
    whole = math.floor(training.work_s / training.every_s + _ROUND_OFF)
    rest_s = training.work_s - whole * training.every_s
    return whole, rest_s if rest_s > _ROUND_OFF * training.every_s else 0.0


def expected(training: Faulty) -> Expected:
    """The expected time of a training; what never ends, since faults come faster than stretches, is infinite."""
    rate, restart_s = training.rate, training.restart_s
    whole, rest_s = stretches(training)
    # how many, and seconds of each with its checkpoint
    pieces = [(whole, training.every_s + training.save_s), (int(rest_s > 0.0), rest_s + training.save_s)]
    saved_s = sum(count for count, _ in pieces) * training.save_s
    if rate == 0.0:
        return Expected(training.work_s, saved_s, 0.0, 0.0, 0.0, 0.0)
    if rate * (max(seconds for count, seconds in pieces if count) + restart_s) > _MOST_EXPONENT:
        return Expected(training.work_s, saved_s, math.inf, math.inf, 0.0, math.inf)
    # failed tries of stretches that were made once, and of a restart
    failed = sum(count * _failed(seconds, training) for count, seconds in pieces)
    failed_restarts = math.expm1(rate * restart_s)
    lost_s = sum(count * (_failed(seconds, training) / rate - seconds) for count, seconds in pieces)
    down_s = training.detect_s + failed_restarts * (1.0 / rate + training.detect_s)
    faults = failed * (1.0 + failed_restarts)
    running_s = training.work_s + saved_s + lost_s + failed * down_s
    return Expected(
        work_s=training.work_s,
        checkpoints_s=saved_s,
        lost_s=lost_s,
        restarts_s=failed * down_s,
        waiting_s=_waiting_s(training, running_s, faults),
        faults=faults,
    )


def _failed(stretch_s: float, training: Faulty) -> float:
    """How many faults strike a stretch of so many seconds, in the mean, until it is made and kept."""
    refused, exponent = training.refused, training.rate * stretch_s
    return math.expm1(exponent) * (1.0 - refused * math.exp(-exponent)) / (1.0 - refused)


_MOST_EXPONENT, _ROUND_OFF = 50.0, 1e-9


def _waiting_s(training: Faulty, running_s: float, faults: float) -> float:
    """Seconds of waiting for nodes in a training that runs for `running_s` besides, in which so many faults come.

    While it runs, from none to S nodes are away: one more at the rate at which faults take nodes, one less at
    1 / repair_s of each. A fault that finds S of them away is waited for until the first of S + 1 is back,
    repair_s / (S + 1), and leaves S. So the wait follows from for how long S are away, which the chain's transition
    matrix says.
    """
    from scipy.linalg import expm  # 70 ms, which a plan of machines whose nodes are never away does not need

    spares, repair_s, away_s = training.spares, training.repair_s, faults * training.away_share / running_s
    if not away_s or not repair_s:
        return 0.0
    steady = waiting_share(replace(training, rate=away_s, away_share=1.0))
    steady_s = running_s * steady / (1.0 - steady)
    if spares > _MOST_FOLLOWED or not steady:
        return steady_s
    # the chain forgets where it began within a few repair_s, since its slowest mode fades at 1 / repair_s or faster
    begin_s = min(running_s, _FORGETS * repair_s)
    chain = np.zeros((spares + 2, spares + 2))  # the last row and column add up the time in which S are away
    here = np.arange(spares)
    chain[here, here + 1] = away_s
    chain[here + 1, here] = (here + 1) / repair_s
    chain -= np.diag(chain.sum(axis=1))
    chain[spares, spares + 1] = 1.0 / begin_s
    short_s = begin_s * float(expm(chain * begin_s)[0, spares + 1])
    return short_s * away_s * repair_s / (spares + 1) + steady_s * (1.0 - begin_s / running_s)


# Spares whose beginning is followed, and repair times after which it is forgotten to a part in e^30.
_MOST_FOLLOWED, _FORGETS = 200, 30.0


def waiting_share(training: Faulty) -> float:
    """The share of the time in which more nodes are away than there are spares, in the long run: Erlang's formula."""
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
    if rate * save_s > _MOST_EXPONENT:
        return 1.0 / rate  # what it goes to; a training that saves for so long never ends
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2.0
        if math.exp(middle + rate * save_s) * (1.0 - middle) > 1.0:
            low = middle
        else:
            high = middle
    return high / rate
