"""Timelines of a pipeline, simulated and measured: as a Chrome or Perfetto trace, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.files.catalogue import write_atomically
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.timeline import EventKind, Timeline
from trimaran.report.figures import ENDINGS, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRACE_ENDING = ".json"
# What keeps a rank's processor busy; the rest is waiting or runs beside it.
WORK: tuple[EventKind, ...] = ("forward", "backward", "backward_input", "backward_weight", "recompute", "step")
COLORS: dict[EventKind, str] = {
    "forward": "#7fb3e0",
    "backward": "#f0a35e",
    "backward_input": "#f0a35e",
    "backward_weight": "#c9b037",
    "recompute": "#8fc98b",
    "send": "#9a86d2",
    "receive": "#9a86d2",
    "wait": "#eeeeee",
    "reduce": "#d36d8c",
    "step": "#8c8c8c",
}
INCHES_PER_RANK = 0.42
WIDTH_INCHES = 9.0
# Narrower boxes than this share of the picture have no room for their micro-batch.
LEGIBLE = 0.012


def bubble_share(timeline: Timeline) -> float:
    """Share of all ranks' time until the last work ends in which they compute nothing, 0 to 1."""
    worked = [event for event in timeline.events if event.kind in WORK]
    if not worked:
        return 0.0
    ranks = len({event.rank for event in timeline.events})
    whole = ranks * max(event.end_s for event in worked)
    return 1 - sum(event.end_s - event.start_s for event in worked) / whole


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The timelines as Trace Event Format, which chrome://tracing and ui.perfetto.dev read: a process each.

    Sends have a lane of their own below their rank's.
    """
    events: list[dict[str, Any]] = []
    for number, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        lanes: dict[tuple[int, bool], int] = {}
        for event in timeline.events:
            lane = (event.rank, event.kind in ("send", "receive"))
            thread = lanes.setdefault(lane, 2 * event.rank + lane[1])
            about = {} if event.micro_batch is None else {"micro_batch": event.micro_batch, "stage": event.stage}
            events.append(
                {
                    "ph": "X",
                    "name": event.kind if event.micro_batch is None else f"{event.kind} {event.micro_batch}",
                    "cat": event.kind,
                    "pid": number,
                    "tid": thread,
                    "ts": event.start_s * 1e6,
                    "dur": (event.end_s - event.start_s) * 1e6,
                    "args": about,
                }
            )
        for (rank, sends), thread in sorted(lanes.items()):
            title = f"rank {rank} sends" if sends else f"rank {rank}"
            events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": title}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def check_ending(path: Path) -> None:
    """Raise TrimaranError where a path ends in what no timeline can be written as."""
    endings = (TRACE_ENDING, *ENDINGS)
    if path.suffix.lower() not in endings:
        raise TrimaranError(f"{path} ends in {path.suffix or 'nothing'!r}: a timeline ends in {', '.join(endings)}")


def write_timelines(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write a trace (.json) or a picture (.png, .svg, .pdf); raises TrimaranError for another ending."""
    if path.suffix.lower() == TRACE_ENDING:
        write_atomically(path, json.dumps(chrome_trace(timelines)))
        return
    ranks = max(len(_ranks(timeline)) for timeline in timelines.values())
    figure, panels = new_figure((WIDTH_INCHES, len(timelines) * (1.1 + INCHES_PER_RANK * ranks)), len(timelines))
    longest = max(timeline.duration_s for timeline in timelines.values())
    if not longest:
        raise TrimaranError("the timeline holds no event: there is nothing to draw")
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _draw(axes, timeline, longest)
        axes.set_title(
            f"{name}: {timeline.duration_s:.3g} s, {bubble_share(timeline):.0%} bubble", loc="left", fontsize=9
        )
    panels[-1].set_xlabel("seconds")
    _legend(panels[0], timelines.values())
    save_figure(figure, path)


def _ranks(timeline: Timeline) -> list[int]:
    return sorted({event.rank for event in timeline.events})


def _draw(axes: Axes, timeline: Timeline, longest: float) -> None:
    """One row a rank: work as boxes with their micro-batch, sends as a thin line under them."""
    rows = {rank: row for row, rank in enumerate(_ranks(timeline))}
    for event in timeline.events:
        row, seconds = rows[event.rank], event.end_s - event.start_s
        thin = event.kind in ("send", "receive")
        bottom, height = (row + 0.38, 0.1) if thin else (row - 0.36, 0.72)
        axes.broken_barh(
            [(event.start_s, seconds)],
            (bottom, height),
            facecolors=COLORS[event.kind],
            edgecolors="white",
            linewidth=0.3,
        )
        if event.kind in WORK and event.micro_batch is not None and seconds > LEGIBLE * longest:
            text = str(event.micro_batch + 1)
            axes.text(event.start_s + seconds / 2, row, text, ha="center", va="center", fontsize=6)
    axes.set(xlim=(0, longest * 1.01), ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(list(rows.values()), [f"rank {rank}" for rank in rows], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(axes: Axes, timelines: Sequence[Timeline] | Any) -> None:
    from matplotlib.patches import Patch

    kinds: set[EventKind] = {event.kind for timeline in timelines for event in timeline.events}
    handles = [Patch(color=color, label=kind.replace("_", " ")) for kind, color in COLORS.items() if kind in kinds]
    axes.legend(
        handles=handles, frameon=False, fontsize=7, ncols=len(handles), loc="lower right", bbox_to_anchor=(1, 1)
    )
