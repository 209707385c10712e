"""Whether two models are the same: by the fields on which their weights and their results depend."""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.nouns.model import Model


def immaterial_fields(model: Model) -> set[str]:
    """Fields of a model on which neither its weights nor the trainer's results depend."""
    fields = {"name", "dropout", "mtp_depth"}
    if model.positions != "learned":
        fields |= {"max_positions"}
    if model.positions != "rotary":
        fields |= {"rotary_theta"}
    if model.mlp in ("swiglu", "relu2"):
        fields |= {"activation"}
    if model.experts and not model.dense_layers:
        fields |= {"ffn_hidden"}
    return fields


def differing_fields(model: Model, other: Model) -> Mapping[str, tuple[object, object]]:
    """The fields in which two models differ, each with `model`'s value and the `other`'s."""
    material = [field for field in Model.model_fields if field not in immaterial_fields(model)]
    values = {field: (_meaning(model, field), _meaning(other, field)) for field in material}
    return {field: pair for field, pair in values.items() if pair[0] != pair[1]}


def _meaning(model: Model, field: str) -> object:
    """A field's value in one form, where several say the same."""
    if field == "attention_bias":
        return model.biased_attention
    if field == "query_scale":
        return model.query_scale or model.head_dim
    if field == "router" and not model.expert_groups:
        return model.router.model_copy(update={"group_best": 0})
    return getattr(model, field)
