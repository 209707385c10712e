"""The tensors of a model's Hugging Face folder: their names, their shapes, and what else may lie beside them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trimaran.layout.layout import Layout
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted
from trimaran.train.comm.mesh import lone_mesh
from trimaran.train.model.gpt import Stage
from trimaran.train.model.weight import declared_weights
from trimaran.train.state.hugging_face_mixture_names import MIXTURES
from trimaran.train.state.hugging_face_names import DENSE, Entries, Entry

FAMILIES = {**DENSE, **MIXTURES}
Shape = tuple[int, ...]
# Masks and angles that files of some years hold besides: they follow from the configuration.
_BUFFERS = (
    "rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
)  # fmt: skip


def entries(model: Model, kind: str) -> Entries:
    """Every weight of `model` by our name, with their names in full in the family `kind`."""
    family = FAMILIES[kind]
    by_name = {ours: entry.prefixed(family.prefix) for ours, entry in family.outer(model).items()}
    for number in range(model.layers):
        prefix, layer = f"{family.prefix}{family.layers}{number}.", family.of_layer(model, number)
        by_name |= {f"layers.{number}.{ours}": entry.prefixed(prefix) for ours, entry in layer.items()}
    if not model.tied_embedding:
        by_name["head.weight"] = Entry((family.head,))
    return by_name


def shapes(model: Model, kind: str) -> dict[str, Shape]:
    """The shape of every tensor of theirs."""
    found: dict[str, Shape] = {}
    by_name = entries(model, kind)
    stage = Stage(model, Layout(), (model.layers,), lone_mesh())
    for name, (_, _, spec) in declared_weights(stage).items():
        if (entry := by_name.get(spec.drawn_as or name)) is None:
            continue
        whole = spec.shape if spec.real_rows is None else (spec.real_rows, *spec.shape[1:])
        parts = entry.split(model, torch.empty(whole, device="meta"))
        found |= {theirs: tuple(part.shape) for theirs, part in zip(entry.theirs, parts, strict=True)}
    return found


def check_known(stored: Iterable[str], model: Model, kind: str, where: str) -> None:
    """Raise TrimaranError for a tensor that the model has not: left out, the weights would be those of another."""
    family = FAMILIES[kind]
    known = {name for entry in entries(model, kind).values() for name in entry.theirs} | {family.head}
    known |= {name.removeprefix(family.prefix) for name in known}
    for name in stored:
        if name not in known and not name.endswith(_BUFFERS):
            raise TrimaranError(
                f"{where} has a tensor {quoted(name)}, and the {kind} that its configuration states has none: "
                f"its files are not those of its configuration, or hold packed weights or an adapter's"
            )
