"""Space: the values that each choice of a layout may take before any rule is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from trimaran.cost.grid import EVEN_SPLIT, STACK_SPLIT, WEIGHTED_SPLIT
from trimaran.layout.axes import DEGREES, DEGREES_IN_WORDS, PLACEMENTS, USUAL_PLACEMENT, full_placement
from trimaran.layout.choices import CHOICE, CHOICES
from trimaran.layout.layout import Layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError, first_error, unknown
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

# Micro-batches beyond this are considered only where one is fixed.
LARGEST_MBS = 4096
# With a tolerance on the global batch nearly every micro-batch makes some batch: the useful ones only.
LARGEST_TOLERANT_MBS = 64

Fixed = Mapping[str, object]
FIXABLE: tuple[str, ...] = tuple(choice.name for choice in CHOICES if choice.fixable)
_LONG = {choice.short: choice.name for choice in CHOICES if choice.short}


@dataclass(frozen=True)
class Space:
    """Candidate values of every choice by its name, as numbers of a LayoutGrid, and the kinds of stage split.

    A choice without values (VPP) has those that go with the others'. `fixed` names the choices that were stated.
    """

    values: Mapping[str, tuple[int, ...]]
    split: tuple[int, ...]
    fixed: frozenset[str]

    def __getitem__(self, choice: str) -> tuple[int, ...]:
        return self.values[choice]

    def unusual(self, *choices: str) -> tuple[str, ...]:
        """Those of the choices that may be other than their default: candidates need no column for the others."""
        return tuple(name for name in choices if self.values[name] != (CHOICE[name].index(CHOICE[name].default),))


def space_of(
    workload: Workload, cluster: Cluster, stack: Stack, devices: int, fixed: Fixed, *, tolerant: bool = False
) -> Space:
    """All values worth proposing; `fixed` choices have their stated values alone.

    TP is at most the heads, PP the layers and DP the global batch, since each must divide or fill the
    other; the micro-batch is at most LARGEST_MBS, or LARGEST_TOLERANT_MBS where
    `tolerant` lets the global batch differ. Raises TrimaranError naming a fixed field that is
    not known or a value that it cannot take.
    """
    stated = {_LONG.get(name, name): values for name, values in fixed.items()}
    values = {name: _fixed_values(name, given) for name, given in stated.items()}
    for name in ("ep", "etp"):
        degree = min(values.get(name, (1,)))
        if degree > 1 and not workload.model.experts:
            raise TrimaranError(f"fixed {name} {degree} lays out experts, but the model has none: leave it out")
    for choice in CHOICES:
        if choice.proposes and choice.name not in values:
            proposed = [choice.index(value) for value in choice.proposes(workload, cluster, stack, devices)]
            values[choice.name] = tuple(sorted(proposed) if choice.words else proposed)
    if "mbs" not in stated:
        values["mbs"] = values["mbs"][: LARGEST_TOLERANT_MBS if tolerant else LARGEST_MBS]
    # An axis that nobody may give two ranks has no place of its own: its other places would be the same layouts again.
    several = {axis for axis in DEGREES if max(values[axis]) > 1}
    orders: dict[tuple[str, ...], int] = {}
    for placement in values["placement"]:
        orders.setdefault(tuple(axis for axis in PLACEMENTS[placement] if axis in several), placement)
    values["placement"] = tuple(orders.values())
    other = EVEN_SPLIT if stack.head_weighted_stages else WEIGHTED_SPLIT
    split = (STACK_SPLIT, other) if stack.uneven_stages else (STACK_SPLIT,)
    return Space(values, split, frozenset(stated))


def _fixed_values(name: str, values: object) -> tuple[int, ...]:
    """The values of one fixed choice, each checked as Layout checks it; words as indexes."""
    if name not in FIXABLE:
        raise TrimaranError(f"fixed field {unknown(name, FIXABLE)}")
    several = values if isinstance(values, list | tuple) else str(values).split(",")
    return tuple(dict.fromkeys(_fixed_value(name, value) for value in several))


def _fixed_value(name: str, value: object) -> int:
    text = str(value).strip().lower()
    given: object = full_placement(tuple(text.split("-"))) if name == "placement" else text
    if name == "placement" and given not in PLACEMENTS:
        raise TrimaranError(
            f"fixed placement {text!r} does not name {DEGREES_IN_WORDS} once each: write {'-'.join(USUAL_PLACEMENT)}"
        )
    try:
        layout = Layout.model_validate({name: given})
    except ValidationError as error:
        raise TrimaranError(f"fixed {name}: {first_error(error)}") from None
    return CHOICE[name].index(getattr(layout, name))
