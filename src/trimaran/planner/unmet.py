"""What is said where layouts fit, but none of them meets the deadline or the budget."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.layout.layout import Layout
from trimaran.planner.search.objective import Objective


@dataclass(frozen=True)
class WholeTraining:
    """A training on a layout to its end: how many days it takes, and what it costs where devices have a price."""

    layout: Layout
    days: float
    cost: float | None


def unmet_sentence(objective: Objective, what: str, fastest: WholeTraining, cheapest: WholeTraining) -> str:
    """Which limits `what`, as no layout on 64 devices, does not meet, what comes nearest to each, and the way out."""
    limits, nearest, more = [], [], []
    if objective.deadline_days is not None:
        limits.append(f"the deadline of {_days(objective.deadline_days)}")
        cost = "" if fastest.cost is None else f" and costs {_figure(fastest.cost)}"
        nearest.append(f"the fastest, {fastest.layout}, takes {_days(fastest.days)}{cost}")
        more.append("more devices or time")
    if objective.budget is not None and cheapest.cost is not None:
        limits.append(f"the budget of {_figure(objective.budget)}")
        nearest.append(
            f"the cheapest, {cheapest.layout}, costs {_figure(cheapest.cost)} and takes {_days(cheapest.days)}"
        )
        more.append("more money")
    return f"{what} meets {' and '.join(limits)}: {', '.join(nearest)}; allow {', or '.join(more)}"


def _days(days: float) -> str:
    told = _figure(days)
    return f"{told} day{'s' * (told != '1')}"


def _figure(value: float) -> str:
    """Days or money to four digits, and no thousands as powers of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
