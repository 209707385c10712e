"""The weights of latent attention in Hugging Face's DeepSeek families by our names.

They turn features in neighbouring pairs (transformers 5.18, models/deepseek_v3/modeling_deepseek_v3.py,
apply_rotary_pos_emb_interleave; models/deepseek_v2/modeling_deepseek_v2.py, apply_rotary_emb), we the first half with
the second: rows of what is turned are put in our order as they are read, and back as they are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.nouns.attention import LatentAttention
from trimaran.nouns.model import Model
from trimaran.train.state.hugging_face_names import Entries, Entry


def _latent(model: Model) -> LatentAttention:
    assert model.latent_attention is not None, "the family has latent attention"
    return model.latent_attention


def _in_halves(rows: Tensor, turned: int) -> Tensor:
    """(.., features, in) whose last `turned` features are neighbouring pairs: these in two halves."""
    plain, pairs = rows[..., :-turned, :], rows[..., -turned:, :]
    return torch.cat((plain, pairs[..., 0::2, :], pairs[..., 1::2, :]), dim=-2)


def _in_pairs(rows: Tensor, turned: int) -> Tensor:
    """The inverse."""
    plain, first, second = torch.split(rows, [rows.shape[-2] - turned, turned // 2, turned // 2], dim=-2)
    return torch.cat((plain, torch.stack((first, second), dim=-2).flatten(-3, -2)), dim=-2)


def _queries(name: str) -> Entry:
    """Queries of one head after another, as (heads, features, in)."""
    return Entry(
        (name,),
        lambda model, parts: _in_halves(parts[0].view(model.heads, model.head_dim, -1), _latent(model).rotary_dim),
        lambda model, ours: [_in_pairs(ours, _latent(model).rotary_dim).flatten(0, 1)],
    )


def _down(names: tuple[str, ...]) -> Entry:
    """What makes the vectors behind queries, if there are any, and those behind keys and values with what is turned."""

    def split(model: Model, ours: Tensor) -> list[Tensor]:
        latent = _latent(model)
        behind_queries, behind_keys = torch.split(
            _in_pairs(ours, latent.rotary_dim), [latent.query_rank, latent.kv_rank + latent.rotary_dim]
        )
        return [behind_queries, behind_keys] if latent.query_rank else [behind_keys]

    return Entry(names, lambda model, parts: _in_halves(torch.cat(parts), _latent(model).rotary_dim), split)


def latent_attention(model: Model) -> Entries:
    """The weights of one layer's attention."""
    attention = {
        "attention.kv_norm.weight": Entry(("self_attn.kv_a_layernorm.weight",)),
        "attention.keys_values.weight": Entry(
            ("self_attn.kv_b_proj.weight",),
            lambda model, parts: parts[0].view(model.heads, -1, parts[0].shape[1]),
            lambda model, ours: [ours.flatten(0, 1)],
        ),
        "attention.projection.weight": Entry(("self_attn.o_proj.weight",)),
    }
    keys = "self_attn.kv_a_proj_with_mqa.weight"
    if not _latent(model).query_rank:
        return attention | {
            "attention.down.weight": _down((keys,)),
            "attention.queries.weight": _queries("self_attn.q_proj.weight"),
        }
    return attention | {
        "attention.down.weight": _down(("self_attn.q_a_proj.weight", keys)),
        "attention.query_norm.weight": Entry(("self_attn.q_a_layernorm.weight",)),
        "attention.queries.weight": _queries("self_attn.q_b_proj.weight"),
    }
