"""torchtitan's names of models and their flavors, which exports write and imports of configurations read back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from trimaran.files.catalogue import load_model
from trimaran.nouns.model import Model


class Flavor(NamedTuple):
    """A model of torchtitan's: its name, as that of its folder, and which of its sizes."""

    name: str
    size: str

    @property
    def function(self) -> str:
        """The function of 0.3's registry that makes its configuration, where it is among CONFIGURED."""
        return f"{self.name}_{re.sub(r'[-.]', '_', self.size.lower())}"


# Catalogue models by flavor (torchtitan 0.2.2 and 0.3.0, models/*/__init__.py).
FLAVORS: Mapping[Flavor, str] = {
    Flavor("llama3", "1B"): "llama3.2-1b", Flavor("llama3", "3B"): "llama3.2-3b",
    **{Flavor("llama3", size): f"llama3.1-{size.lower()}" for size in ("8B", "70B", "405B")},
    **{Flavor("qwen3", size): f"qwen3-{size.lower()}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    **{Flavor("qwen3", size): f"qwen3-{size.lower()}" for size in ("30B-A3B", "235B-A22B")},
    Flavor("deepseek_v3", "16B"): "deepseek-v2-lite", Flavor("deepseek_v3", "236B"): "deepseek-v2",
    Flavor("deepseek_v3", "671B"): "deepseek-v3",
    Flavor("gpt_oss", "20b"): "gpt-oss-20b", Flavor("gpt_oss", "120b"): "gpt-oss-120b",
}  # fmt: skip
# Those that 0.3.0 has and 0.2.2 has not.
SINCE_0_3 = frozenset({Flavor("llama3", "1B"), Flavor("llama3", "3B")})
# Those of which 0.3.0 has a whole configuration (models/*/config_registry.py).
CONFIGURED = frozenset({
    *(Flavor("llama3", size) for size in ("8B", "70B", "405B")),
    *(Flavor("qwen3", size) for size in ("0.6B", "1.7B", "14B", "32B", "30B-A3B")),
    *(Flavor("deepseek_v3", size) for size in ("16B", "671B")), *(Flavor("gpt_oss", size) for size in ("20b", "120b")),
})  # fmt: skip

# Those that 0.2.2 has no pipeline of (models/qwen3/__init__.py, line 199; models/gpt_oss/__init__.py, line 85). 0.3.0
# has none where weights are tied (models/common/decoder.py, update_from_config).
_WITHOUT_PIPELINE = ("qwen3", "gpt_oss")


def flavor_of(model: Model, version: str) -> Flavor | None:
    """The flavor that is as large as a model, which a file for that version can start from; None: there is none."""
    among = CONFIGURED if version == "0.3" else FLAVORS.keys() - SINCE_0_3
    sizes = _sizes(model)
    alike = (flavor for flavor, name in FLAVORS.items() if flavor in among and _sizes(load_model(name)) == sizes)
    return next(alike, None)


def without_pipeline(model: Model, version: str) -> str:
    """What of a model that version has no pipeline of, in words; "": it has one."""
    if version == "0.3":
        return "a head that shares the embedding's weights" if model.tied_embedding else ""
    flavor = flavor_of(model, version)
    return flavor.name if flavor and flavor.name in _WITHOUT_PIPELINE else ""


def _sizes(model: Model) -> tuple[object, ...]:
    attention = model.heads, model.kv_heads, model.head_dim, model.latent_attention
    experts = (
        model.experts,
        model.top_k,
        model.moe_ffn_hidden,
        model.shared_experts,
        model.dense_layers,
        model.experts_every,
    )
    return model.layers, model.hidden, model.ffn_hidden, model.vocab, model.tied_embedding, *attention, *experts
