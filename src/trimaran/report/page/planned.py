"""The page of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from trimaran.files.catalogue import load_cluster
from trimaran.layout.notation import parse_layout
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.report.layouts import MEASURED
from trimaran.report.page.answers import answer_of_plan
from trimaran.report.page.content import Content, ShownLayout, batch_fact, limit_gib
from trimaran.report.placement_map import placement_map
from trimaran.report.planned import counted


def plan_content(plan: Mapping[str, Any]) -> Content:
    """The page of a plan, from the JSON that `trimaran plan --format json` prints (docs/json.md).

    Raises TrimaranError naming the key that is not there, or that holds something else.
    """
    try:
        if not plan["layouts"]:
            raise TrimaranError("plan has no layout to show: make it anew with `trimaran plan ... --format json`")
        return _plan_content(plan)
    except KeyError as error:
        wrong = f"has no {error} where docs/json.md says"
    except ValidationError as error:
        wrong = f"is not as docs/json.md says: {first_error(error)}"
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        wrong = f"is not as docs/json.md says ({error})"
    raise TrimaranError(f"plan {wrong}: make it anew with `trimaran plan ... --format json`")


def _plan_content(plan: Mapping[str, Any]) -> Content:
    entries: Sequence[Mapping[str, Any]] = plan["layouts"]
    cases = tuple(
        ShownLayout(
            source="plan",
            work=f"{plan['model']} on {plan['cluster']}",
            status="predicted",
            **{key: entry[key] for key in ("layout", "nodes", "devices", "gbs")},
            choices={choice.name: entry[choice.name] for choice, _ in MEASURED},
            sec_per_it=entry["sec_per_it"],
            sec_per_it_low=entry["sec_per_it_low"],
            sec_per_it_high=entry["sec_per_it_high"],
            mem_gib=entry["mem_gib"],
            tflops=entry["tflops"],
            mfu=entry["mfu"],
            time_s=entry["time_s"],
            memory_gib=tuple({k: v for k, v in stage.items() if k != "stage"} for stage in entry["memory_gib"]),
            notes=entry["bottleneck"],
        )
        for entry in entries
    )
    return Content(
        title=f"{plan['model']} on {plan['cluster']}",
        facts=(
            ("Model", plan["model"]),
            ("Cluster", plan["cluster"]),
            ("Software", f"{plan['stack']} ({plan['software']})" if plan["software"] else plan["stack"]),
            ("Devices", f"{plan['devices']:,}"),
            batch_fact((entry["gbs"] for entry in entries), (plan["seq_len"],)),
            ("Layouts evaluated", f"{plan['evaluated']:,}"),
            ("that fit", f"{plan['fitting']:,}"),
            *_whole_training(entries[0], plan.get("goodput")),
        ),
        answers=(answer_of_plan(plan),),
        sentences=(
            f"Bottleneck of the best: {entries[0]['bottleneck']}.",
            f"{counted((entry['precision'], entry['tflops'], entry['mfu']) for entry in entries)}.",
            *(f"Note: {note}." for note in plan["notes"]),
        ),
        cases=cases,
        mem_limit_gib=limit_gib(plan["cluster"]),
        map=_map(plan["cluster"], entries[0]["layout"]),
    )


def _whole_training(best: Mapping[str, Any], faulty: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Days and cost of the whole training where they are known: if nothing fails, and with expected faults."""
    for key, form in (("days", ".1f"), ("cost", ",.0f")):
        if best[key] is not None:
            yield f"{key.title()} without faults" if faulty else key.title(), f"{best[key]:{form}}"
        if faulty and faulty[key] is not None:
            yield f"{key.title()} expected", f"{faulty[key]:{form}} (P90 {faulty[f'{key}_p90']:{form}})"


def _map(cluster: str, layout: str) -> str:
    """Where the best layout's ranks stand; empty where the cluster cannot be looked up."""
    try:
        return placement_map(load_cluster(cluster), parse_layout(layout))
    except TrimaranError:
        return ""
