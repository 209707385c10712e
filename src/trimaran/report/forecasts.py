"""What a plan says of machines that fail, in a few lines."""

from __future__ import annotations

from trimaran.planner.goodput.forecast import Forecast
from trimaran.planner.goodput.layouts import LayoutUnderFaults


def forecast_lines(found: Forecast | None, days: float | None) -> str:
    """Expected days and cost, where the time goes, checkpoints, spares, and what is assumed.

    Empty where no days were asked for; without known faults it says that days and cost assume none.
    """
    if days is None:
        return ""
    if found is None:
        return "days and cost assume that nothing fails: [faults] of the cluster, or --faults, states how often it does"
    lines = [
        f"days and cost above assume that nothing fails. With the faults of {found.faults_of} ({found.source}), one "
        f"every {found.hours_between_faults:.3g} hours on {found.devices} devices:",
        f"  {_days(found)}",
        f"  of that time {found.work:.1%} is work that is kept, checkpoints {found.checkpoints:.2%}, lost steps "
        f"{found.lost:.2%}, restarts {found.restarts:.2%}, waiting for nodes {found.waiting:.2%}; {found.faults:.0f} "
        f"faults",
        f"  a checkpoint every {_time(found.interval_s)} is best (Young {_time(found.young_s)}, Daly "
        f"{_time(found.daly_s)}, simulated {_time(found.simulated_interval_s)})",
    ]
    if found.spares:
        rows = "; ".join(
            f"{row.nodes}: {row.days:.1f} days" + ("" if row.cost is None else f" and {row.cost:,.0f}")
            for row in found.spares[:_SHOWN]
        )
        lines.append(f"  spare nodes: {found.spares_that_pay} are best ({rows})")
    if (fewer := found.fewer_nodes) is not None:
        better = "is better than waiting" if fewer.better else "is no better than waiting"
        lines.append(
            f"  going on with {fewer.nodes} fewer nodes ({fewer.layout}, {fewer.slower - 1:.1%} slower) {better}: "
            f"{fewer.days:.1f} days with {found.spare_nodes} spare nodes"
        )
    lines += _layouts(found)
    if found.spot is not None:
        lines.append(f"  on spot devices, one fault every {found.spot.hours_between_faults:.3g} h: {_days(found.spot)}")
    return "\n".join([*lines, *(f"  assumed: {sentence}" for sentence in found.assumptions)])


_SHOWN, _LAYOUTS = 8, 3
# Expected days that differ by less than this share of them are as good as the same.
_ALIKE = 1e-3


def _layouts(found: Forecast) -> list[str]:
    """The best few layouts under faults, and the one of the fewest days where that is not the fastest."""
    if len(found.layouts) < 2:
        return []
    rows = "; ".join(f"{_named(row, found)} {row.days:.1f} days" for row in found.layouts[:_LAYOUTS])
    lines = [f"  layouts under faults: {rows}"]
    fewest = found.layouts[0]
    fastest = next((row for row in found.layouts if row.layout == found.layout), fewest)
    if fewest.days < fastest.days * (1.0 - _ALIKE):
        slower = fewest.days_without / fastest.days_without - 1.0
        lines.append(
            f"  fewest expected days: {_named(fewest, found)}, {slower:.1%} slower without faults: {fewest.days:.1f} "
            f"days, and the fastest {fastest.days:.1f}"
        )
    return lines


def _named(row: LayoutUnderFaults, found: Forecast) -> str:
    nodes = f" with {row.spare_nodes} spare nodes" if row.spare_nodes != found.spare_nodes else ""
    return f"{row.layout}{nodes}{' (fewer nodes in place of waiting)' if row.fewer_nodes else ''}"


def _days(found: Forecast) -> str:
    money = ""
    if found.cost is not None:
        money = f", cost {found.cost:,.0f} (P50 {found.cost_p50:,.0f}, P90 {found.cost_p90:,.0f})"
    return f"expected {found.days:.1f} days (P50 {found.days_p50:.1f}, P90 {found.days_p90:.1f}){money}"


def _time(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5940 else f"{seconds / 3600:.1f} h"
