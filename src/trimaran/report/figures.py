"""Figures for papers, by name: what the page draws, as PNG, SVG or PDF."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.nouns.noun import TrimaranError
from trimaran.report.appearance import PALETTE
from trimaran.report.page.content import Content, ShownLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
SIZE_INCHES = (6.4, 4.0)
BARS = 12
LABEL_LENGTH = 34
DASHES = ("-", "--", ":")


def write_figure(name: str, content: Content, path: Path) -> None:
    """Draw figure `name` into `path`, whole or not at all.

    Raises TrimaranError for a name that is none, or where the content has nothing for it.
    """
    if name not in FIGURES:
        raise TrimaranError(f"figure {name!r} does not exist: it is one of {', '.join(FIGURES)}")
    works = {case.work for case in content.cases}
    if name in ("front", "scaling") and len(works) > 1:
        raise TrimaranError(
            f"figure {name} compares times of one model on one cluster, at one length of sequences, and the "
            f"rows are of {len(works)}: give a table of one"
        )
    figure, (axes,) = new_figure(SIZE_INCHES)
    if not FIGURES[name](axes, content):
        raise TrimaranError(f"figure {name} has nothing to show here: {NEEDS[name]}")
    save_figure(figure, path)


def new_figure(size_inches: tuple[float, float], panels: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure that needs no screen, and its panels, one below the other.

    Raises TrimaranError where Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TrimaranError("figures need Matplotlib, which is not installed: pip install 'trimaran[report]'") from None
    figure = Figure(figsize=size_inches, layout="constrained")
    return figure, list(figure.subplots(panels, squeeze=False)[:, 0])


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure as what `path` ends in, whole or not at all.

    Raises TrimaranError where that is none of ENDINGS, or the path cannot be written.
    """
    if path.suffix.lower() not in ENDINGS:
        raise TrimaranError(f"{path} ends in {path.suffix or 'nothing'!r}: a figure ends in {', '.join(ENDINGS)}")
    partial = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(partial, dpi=200)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TrimaranError(f"{path} cannot be written: {error.strerror or error}; choose another path") from None


def pareto_front(cases: Sequence[ShownLayout]) -> list[ShownLayout]:
    """The cases than which no other is both faster and smaller, the smallest first."""
    front: list[ShownLayout] = []
    for case in sorted(cases, key=lambda case: (case.mem_gib, case.sec_per_sample)):
        if not front or case.sec_per_sample < front[-1].sec_per_sample:
            front.append(case)
    return front


def _front(axes: Axes, content: Content) -> bool:
    cases = [case for case in _timed(content) if case.mem_gib is not None]
    for tp in sorted({case.choices["tp"] for case in cases}, key=lambda tp: (tp is None, tp)):
        same_tp = [case for case in cases if case.choices["tp"] == tp]
        axes.scatter(
            [case.mem_gib or 0.0 for case in same_tp],
            [_seconds(case, content) for case in same_tp],
            s=14,
            label="TP not stated" if tp is None else f"TP {tp}",
        )
    front = pareto_front(cases)
    axes.step(
        [case.mem_gib or 0.0 for case in front],
        [_seconds(case, content) for case in front],
        "k-",
        lw=1,
        where="post",
        label="Pareto front",
    )
    axes.set(xlabel="memory of the fullest rank, GiB", ylabel=_seconds_label(content))
    axes.legend(frameon=False, fontsize=8)
    return bool(cases)


def _parts(axes: Axes, content: Content) -> bool:
    cases = sorted((case for case in content.cases if case.time_s), key=lambda case: sum(case.time_s.values()))[:BARS]
    names = [part for part in (cases[0].time_s if cases else ()) if any(case.time_s[part] > 0 for case in cases)]
    left = [0.0] * len(cases)
    for part in names:
        seconds = [case.time_s[part] for case in cases]
        axes.barh(range(len(cases)), seconds, left=left, label=part, color=_color(content, "time_s", part))
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.set_yticks(range(len(cases)), _names(cases), fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="predicted seconds an iteration")
    if names:
        _legend_above(axes)
    return bool(cases)


def _memory(axes: Axes, content: Content) -> bool:
    case = next((case for case in content.cases if case.memory_gib), None)
    if case is None:
        return False
    stages = range(len(case.memory_gib))
    bottom = [0.0] * len(stages)
    for part in (name for name in case.memory_gib[0] if name != "layers"):
        gib = [stage[part] for stage in case.memory_gib]
        if any(gib):
            axes.bar(stages, gib, bottom=bottom, label=part, color=_color(content, "memory_gib", part))
        bottom = [a + b for a, b in zip(bottom, gib, strict=True)]
    if content.mem_limit_gib is not None:
        axes.axhline(content.mem_limit_gib, color="firebrick", ls=":", lw=1)
    axes.set(xlabel=f"pipeline stage of {_short(case.layout)}", ylabel="GiB")
    _legend_above(axes)
    return True


def _predicted(axes: Axes, content: Content) -> bool:
    both = [case for case in _timed(content) if case.predicted_sec_per_it is not None]
    if not both:
        return False
    measured = [case.sec_per_it or 0.0 for case in both]
    predicted = [case.predicted_sec_per_it or 0.0 for case in both]
    ends = (min(measured + predicted) * 0.9, max(measured + predicted) * 1.1)
    axes.plot(ends, ends, ":", color="gray", lw=1)
    axes.scatter(measured, predicted, s=14)
    error = sum(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)) / len(both)
    axes.set(
        xlabel="measured, s/it",
        ylabel="predicted, s/it",
        xscale="log",
        yscale="log",
        title=f"{error:.1%} off on average",
    )
    return True


def _scaling(axes: Axes, content: Content) -> bool:
    drawn = False
    for source in dict.fromkeys(case.source for case in content.cases):
        best: dict[int, ShownLayout] = {}
        for case in sorted(_timed(content), key=lambda case: case.sec_per_sample):
            if case.source == source and case.devices:
                best.setdefault(case.devices, case)
        devices = sorted(best)
        if len(devices) < 2:
            continue
        speed = [1 / best[count].sec_per_sample for count in devices]
        axes.plot(devices, speed, "o-", ms=4, label=source)
        axes.plot(devices, [speed[0] * count / devices[0] for count in devices], ":", color="gray", lw=1)
        drawn = True
    axes.set(xlabel="devices", ylabel="samples a second, best layout", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8) if drawn else None
    return drawn


def _losses(axes: Axes, content: Content) -> bool:
    curves = [case for case in content.cases if len(case.losses) > 1][:BARS]
    for place, (case, name) in enumerate(zip(curves, _names(curves), strict=True)):
        steps = [1 + case.loss_every * step for step in range(len(case.losses))]
        color, dash = PALETTE[place % len(PALETTE)], DASHES[place % len(DASHES)]
        axes.plot(steps, case.losses, dash, color=color, lw=1, label=name)
    axes.set(xlabel="step", ylabel="nats a token")
    if curves:
        axes.legend(frameon=False, fontsize=7)
    return bool(curves)


FIGURES: dict[str, Callable[[Axes, Content], bool]] = {
    "front": _front,
    "parts": _parts,
    "memory": _memory,
    "predicted": _predicted,
    "scaling": _scaling,
    "losses": _losses,
}
NEEDS = {
    "front": "it needs runs with both time and memory",
    "parts": "it needs rows whose cluster and stack can be looked up",
    "memory": "it needs rows whose cluster and stack can be looked up",
    "predicted": "it needs measured runs with a prediction",
    "scaling": "it needs runs on two numbers of devices",
    "losses": "it needs runs of this trainer, which record their loss",
}


def _timed(content: Content) -> list[ShownLayout]:
    return [case for case in content.cases if case.sec_per_it is not None and case.status in ("ok", "predicted")]


def _same_work(content: Content) -> bool:
    return len({case.gbs for case in content.cases}) == 1


def _seconds(case: ShownLayout, content: Content) -> float:
    return case.sec_per_sample * (case.gbs if _same_work(content) else 1)


def _seconds_label(content: Content) -> str:
    return "seconds an iteration" if _same_work(content) else "seconds a sample"


def _color(content: Content, kind: str, part: str) -> str:
    """The colour that the page has for a part of time or of memory."""
    return PALETTE[list(content.legend[kind]).index(part) % len(PALETTE)]


def _legend_above(axes: Axes) -> None:
    """Bars fill their axes, so that what names their parts stands outside."""
    axes.figure.legend(loc="outside upper center", frameon=False, fontsize=7, ncols=6)


def _names(cases: Sequence[ShownLayout]) -> list[str]:
    """The layouts by name, or by what differs between them where a whole name would be cut."""
    words = [case.layout.split(",") for case in cases]
    shared = set(words[0]).intersection(*words) if words else set()
    apart = [",".join(word for word in own if word not in shared) for own in words]
    cut = any(len(case.layout) > LABEL_LENGTH for case in cases)
    return [_in_lines(name) for name in (apart if cut and all(apart) else [case.layout for case in cases])]


def _in_lines(layout: str) -> str:
    """A name that is too long for one line on two: cut at the first, several may read alike."""
    lines = textwrap.wrap(
        layout.replace(",", ", "), LABEL_LENGTH, break_on_hyphens=False, max_lines=2, placeholder="\u2026"
    )
    return "\n".join(line.replace(", ", ",") for line in lines)


def _short(layout: str) -> str:
    return layout if len(layout) <= LABEL_LENGTH else layout[: LABEL_LENGTH - 1] + "\u2026"
