"""Expert parallelism: tokens on their way to the ranks of their experts and back."""

from __future__ import annotations

from trimaran.cost.case import Case
from trimaran.cost.effects.effect import Effect, TimePart
from trimaran.layout.layout import Layout


def _cause(layout: Layout, case: Case, micro_batches: int) -> str:
    across = layout.ep * layout.places_apart("ep") > layout.stage_places(case.cluster.devices_per_node)
    etp = layout.size("etp")
    if layout.ep == 1:
        return f"ETP {etp} gathers tokens for the parts of each expert; EP in place of ETP"
    experts = "expert" if case.model.top_k == 1 else f"{case.model.top_k} experts"
    sent = (
        f"EP {layout.ep} sends each token to its {experts} {'across nodes' if across else 'inside the node'} and back"
    )
    if etp > 1:
        return f"{sent}, and ETP {etp} gathers them for the parts of each expert; EP in place of ETP"
    return f"{sent}; a smaller EP, or a dispatcher that sends less"


EXPERT = Effect(
    (TimePart("ep", "tokens sent to their experts and back", _cause),),
    lambda iteration: {"ep": iteration.micro_batches * iteration.work.ep_time},
)
