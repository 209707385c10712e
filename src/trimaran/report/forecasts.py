"""What a plan says of machines that fail, in a few lines."""

from __future__ import annotations

from trimaran.nouns.text import counted
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
        f"{found.lost:.2%}, restarts {found.restarts:.2%}, waiting for nodes {found.waiting:.2%}; "
        f"{_faults(found.faults)}",
        f"  a checkpoint every {_time(found.interval_s)} is best (Young {_time(found.young_s)}, Daly "
        f"{_time(found.daly_s)}, simulated {_time(found.simulated_interval_s)})",
    ]
    if found.spares:
        rows = "; ".join(
            f"{row.nodes}: {_span(row.days)}" + ("" if row.cost is None else f" and {row.cost:,.0f}")
            for row in found.spares[:_SHOWN]
        )
        verb = "is" if found.spares_that_pay == 1 else "are"
        lines.append(f"  spare nodes: {found.spares_that_pay} {verb} best ({rows})")
    if (fewer := found.fewer_nodes) is not None:
        better = "is better than waiting" if fewer.better else "is no better than waiting"
        lines.append(
            f"  going on with {counted(fewer.nodes, 'fewer node')} ({fewer.layout}, {fewer.slower - 1:.1%} slower) "
            f"{better}: {_span(fewer.days)} with {counted(found.spare_nodes, 'spare node')}"
        )
    lines += _layouts(found)
    if found.spot is not None:
        lines.append(f"  on spot devices, one fault every {found.spot.hours_between_faults:.3g} h: {_days(found.spot)}")
    if found.spot_never is not None:
        lines.append(f"  on spot devices: {found.spot_never}")
    lines += [f"  measured: {sentence}" for sentence in found.measured]
    return "\n".join([*lines, *(f"  assumed: {sentence}" for sentence in found.assumptions)])


_SHOWN, _LAYOUTS = 8, 3
# Expected days that differ by less than this share of them are as good as the same.
_ALIKE = 1e-3


def _layouts(found: Forecast) -> list[str]:
    """The best few layouts under faults, and the one of the fewest days where that is not the fastest."""
    if len(found.layouts) < 2:
        return []
    rows = "; ".join(f"{_named(row, found)} {_span(row.days)}" for row in found.layouts[:_LAYOUTS])
    lines = [f"  layouts under faults: {rows}"]
    fewest = found.layouts[0]
    fastest = next((row for row in found.layouts if row.layout == found.layout), fewest)
    if fewest.days < fastest.days * (1.0 - _ALIKE):
        slower = fewest.days_without / fastest.days_without - 1.0
        lines.append(
            f"  fewest expected days: {_named(fewest, found)}, {slower:.1%} slower without faults: "
            f"{_span(fewest.days)}, and the fastest {_span(fastest.days)}"
        )
    return lines


def _named(row: LayoutUnderFaults, found: Forecast) -> str:
    nodes = f" with {counted(row.spare_nodes, 'spare node')}" if row.spare_nodes != found.spare_nodes else ""
    return f"{row.layout}{nodes}{' (fewer nodes in place of waiting)' if row.fewer_nodes else ''}"


def _faults(count: float) -> str:
    """Faults in the mean, which may be fewer than one."""
    return f"{count:.0f} faults" if count >= 9.5 else f"{count:.2g} fault{'s' * (f'{count:.2g}' != '1')} in the mean"


def _days(found: Forecast) -> str:
    money = ""
    if found.cost is not None:
        money = f", cost {found.cost:,.0f} (P50 {found.cost_p50:,.0f}, P90 {found.cost_p90:,.0f})"
    return f"expected {_span(found.days)} (P50 {_span(found.days_p50)}, P90 {_span(found.days_p90)}){money}"


def _span(days: float) -> str:
    """Days, or hours and less of what takes no day."""
    return f"{days:.1f} days" if days >= 1.0 else _time(days * 86400.0)


def _time(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5940 else f"{seconds / 3600:.1f} h"
