"""Model from a Hugging Face `config.json`, and back."""

from __future__ import annotations

from typing import Any

from trimaran.files.hugging_face_families import DENSE, Config, InexpressibleError
from trimaran.files.hugging_face_mixtures import MIXTURES
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.text import quoted

FAMILIES = {**DENSE, **MIXTURES}


def model_from_config(config: Config, source: str) -> Model:
    """The Model that a Hugging Face config describes.

    Raises TrimaranError when the kind is unknown or a key is missing; pydantic's
    ValidationError when a value is not possible.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise TrimaranError(
            f"{source}: model_type {quoted(kind)} is not one of {', '.join(FAMILIES)}: if its layers are those of one "
            f"of them, name that one"
        )
    try:
        fields = FAMILIES[kind](config)
        fields["vocab"] = config["vocab_size"]
    except KeyError as error:
        raise TrimaranError(f"{source}: key {error} is missing from a {kind} config: add it") from None
    except InexpressibleError as error:
        raise TrimaranError(f"{source}: {error}: no model here has that; plan with the nearest") from None
    name = config.get("_name_or_path") or source
    return Model.model_validate({"name": str(name), **fields})


def config_from_model(model: Model) -> dict[str, Any]:
    """The `config.json` of the Hugging Face model that computes what `model` does.

    Raises TrimaranError where there is none among GPT-2, BLOOM and Llama.
    """
    kind = kind_of(model)
    shared = {"vocab_size": model.vocab, "tie_word_embeddings": model.tied_embedding, "model_type": kind}
    if kind == "gpt2":
        return shared | {
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": model.layers,
            "n_embd": model.hidden,
            "n_head": model.heads,
            "n_inner": model.ffn_hidden,
            "n_positions": model.max_positions,
            "layer_norm_epsilon": model.norm_epsilon,
            "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
        }
    if kind == "bloom":
        return shared | {
            "architectures": ["BloomForCausalLM"],
            "n_layer": model.layers,
            "hidden_size": model.hidden,
            "n_head": model.heads,
            "seq_length": model.max_positions,
            "layer_norm_epsilon": model.norm_epsilon,
        }
    scaling = None
    if model.rotary_scaling is not None:
        scaling = model.rotary_scaling.model_dump()
        scaling = {"rope_type": "llama3", "original_max_position_embeddings": scaling.pop("original_max_positions")} | (
            scaling
        )
    return shared | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_hidden,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "rope_theta": model.rotary_theta,
        "rope_scaling": scaling,
    }


def kind_of(model: Model) -> str:
    """Which of gpt2, bloom and llama computes what `model` does. Raises TrimaranError where none does."""
    plain = {"norm": "layernorm", "mlp": "gelu", "bias": True, "kv_heads": model.heads}
    plain |= {"head_dim": model.hidden // model.heads}
    needs: dict[str, dict[str, Any]] = {
        "gpt2": plain | {"embedding_norm": False},
        "bloom": plain | {"embedding_norm": True, "ffn_hidden": 4 * model.hidden, "activation": "gelu_tanh"},
        "llama": {"norm": "rmsnorm", "mlp": "swiglu", "bias": False, "embedding_norm": False},
    }
    kind = {"learned": "gpt2", "alibi": "bloom", "rotary": "llama"}[model.positions]
    for field, value in model.traits.items():
        raise TrimaranError(
            f"model.{field} is {value}, which Hugging Face's {kind} lacks (positions {model.positions} choose {kind}): "
            f"weights of such a model cannot be read or written"
        )
    for field, value in ({"head": "vocabulary"} | needs[kind]).items():
        if getattr(model, field) != value:
            raise TrimaranError(
                f"model.{field} is {getattr(model, field)}, Hugging Face's {kind} has {value} "
                f"(positions {model.positions} choose {kind}): there is no such Hugging Face model"
            )
    return kind
