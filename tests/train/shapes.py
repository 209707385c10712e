"""Small models of each family that the trainer's tests train."""

from trimaran.layout.layout import Layout
from trimaran.nouns.attention import LatentAttention
from trimaran.nouns.dispatcher import Router
from trimaran.nouns.model import Model

# 24 heads and 24 sequences a step divide by every degree up to 8 but 5 and 7; 8 layers not by 3.
SMALL = Model(layers=8, hidden=48, heads=24, vocab=300, max_positions=16)
BLOOM = SMALL.model_copy(update={"positions": "alibi", "embedding_norm": True})
LLAMA = SMALL.model_copy(
    update={
        "kv_heads": 12,
        "ffn_hidden": 96,
        "positions": "rotary",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "bias": False,
        "tied_embedding": False,
    }
)


def as_deep_as(layout: Layout, model: Model, least: int = 2) -> Model:
    """The model with as many layers as show what the layout does, or its own: each costs every step time.

    Four where layers take turns at something: whose activations are kept, and whose weights are gathered meanwhile.
    """
    stages = layout.pp * layout.vpp
    if layout.stage_split or stages > 4:
        return model
    in_turns = layout.recompute_every > 1 or layout.zero_stage == 3
    return model.model_copy(update={"layers": 4 if in_turns or stages > 2 else least})


# Half a layer's inner width each for 8 experts, one expert for all tokens, and a first layer without any.
MIXTURE = LLAMA.model_copy(
    update={"layers": 4, "experts": 8, "top_k": 2, "moe_ffn_hidden": 48, "shared_experts": 1, "dense_layers": 1}
)
# Traits of other families, several at a time: biases of q, k and v, norms of heads, windows; norms behind blocks and of
# all heads as one; caps, norms on both sides, windows in turns, a scaled embedding; residuals side by side.
QWEN = LLAMA.model_copy(update={"head_dim": 4, "attention_bias": "qkv", "qk_norm": "head", "sliding_window": 6})
# No norm stands before OLMO's first queries: of plain embeddings (0.02) and 48 columns they would be as small as the
# norms' epsilon, where round-off of one process alone grows 10,000-fold in two steps.
OLMO = LLAMA.model_copy(update={"norm_placement": "after", "qk_norm": "all_heads", "scaled_embedding": True})
GEMMA = LLAMA.model_copy(
    update={
        "mlp": "geglu", "activation": "gelu_tanh", "norm_placement": "both", "sliding_window": 5,
        "full_attention_every": 2, "query_scale": 3.0, "attention_softcap": 0.5, "logit_softcap": 1.0,
        "scaled_embedding": True, "tied_embedding": True,
    }
)  # fmt: skip
NEOX = SMALL.model_copy(
    update={
        "head_dim": 4, "positions": "rotary", "rotary_share": 0.5, "activation": "gelu", "parallel_residual": True,
        "tied_embedding": False,
    }
)  # fmt: skip
# Low-rank vectors behind queries, keys and values: DeepSeek's attention, in a dense model, and its router behind it;
# widths of queries and of values apart.
LATENT = LLAMA.model_copy(
    update={
        "layers": 4, "kv_heads": 24, "head_dim": 6,
        "latent_attention": LatentAttention(query_rank=20, kv_rank=12, plain_dim=4, rotary_dim=2, value_dim=3),
    }
)  # fmt: skip
DEEPSEEK = LATENT.model_copy(
    update={
        "experts": 8, "top_k": 2, "moe_ffn_hidden": 48, "shared_experts": 1, "dense_layers": 1, "expert_groups": 4,
        "top_groups": 2, "router": Router(scores="sigmoid", scale=2.5, group_best=2, bias=True),
    }
)  # fmt: skip
