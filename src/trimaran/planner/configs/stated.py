"""What a configuration states, in Trimaran's words, and what it leaves open."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimaran.nouns.columns import BY_NAME, parse_cell


@dataclass
class Stated:
    """Fields of the nouns that a trainer's configuration states; what it does not is absent.

    `layout` has no `dp`: `devices` or `replicas` say how many, where stated, and `batch_per_replica` the sequences of
    one; `steps` are its micro-batches, where these and the batch make the micro-batch; `replicate` are the groups that
    hold the same, where ZeRO shards among a part. Of stages `ends` are the layers of the first and the last,
    `ends_less` the layers that embedding and head stand for, `chunk` those of a virtual stage; `titan_stages` where the
    first ones take what does not divide. `recomputed_layers` are those of a stage. `model_name` is the catalogue's name
    of the model, `named` the file's. `open` names what is stated by something that the file does not set, `uncounted`
    what the cost model has no word for, `unread` settings that are not known or that nothing can feel; `notes` say how
    something was read.
    """

    trainer: str
    model: dict[str, object] = field(default_factory=dict)
    workload: dict[str, object] = field(default_factory=dict)
    layout: dict[str, object] = field(default_factory=dict)
    stack: dict[str, object] = field(default_factory=dict)
    devices: int | None = None
    replicas: int | None = None
    replicate: int = 1
    ends: tuple[int | None, int | None] = (None, None)
    ends_less: tuple[int, int] = (0, 0)
    chunk: int | None = None
    titan_stages: bool = False
    recomputed_layers: int | None = None
    batch_per_replica: int | None = None
    steps: int | None = None
    model_name: str | None = None
    named: str = ""
    stack_name: str | None = None
    open: list[str] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def optimizer_of(name: object, stated: Stated) -> str:
    """The optimizer of a trainer's name for it; one that has no word here is counted as adam, which is told."""
    try:
        return str(parse_cell(BY_NAME["optimizer"], str(name)))
    except ValueError:
        stated.uncounted.append(f"optimizer {name}, counted as adam")
        return "adam"
