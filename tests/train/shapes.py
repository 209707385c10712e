"""Small models of each family that the trainer's tests train."""

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
