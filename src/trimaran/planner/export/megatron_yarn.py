"""YaRN's numbers in Megatron-LM's words, which exports write and imports of configurations read back.

From megatron/training/arguments.py (_add_mla_args and _add_network_size_args), argument_utils.py
(_apply_yarn_config_from_args) and megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py at core_v0.19.0.
Latent attention takes its numbers from fields of MLATransformerConfig, of which three have options; other attention has
an option for each since core 0.19, before which nothing sets them (core_v0.18.0, gpt_model.py, line 186).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from trimaran.nouns.attention import RotaryYarn, magnitude
from trimaran.nouns.model import Model

YARN = "yarn"
FACTOR, MSCALE, MSCALE_ALL_DIM = "--rotary-scaling-factor", "--mscale", "--mscale-all-dim"
# Cosines and sines grow by the ratio of two magnitudes, of --mscale and of --mscale-all-dim.
USUAL_MSCALE = 1.0
APART: Mapping[str, str] = {
    "--yarn-original-max-position-embeddings": "original_max_positions",
    "--yarn-beta-fast": "beta_fast",
    "--yarn-beta-slow": "beta_slow",
}
UNTRUNCATED = "--no-yarn-correction-range-round-to-int"
# What is taken where no option says otherwise (MLATransformerConfig, and YarnRotaryEmbedding's own).
USUAL: Mapping[str, float] = {"original_max_positions": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
# Fields of MLATransformerConfig by the model's names, which configurations in Python or YAML may state.
FIELDS: Mapping[str, str] = {
    "original_max_positions": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
# Those whose --position-embedding-type does not know yarn, or where nothing sets its numbers.
WITHOUT_YARN = ("0.18", "0.17", "0.16", "0.15")


def yarn_flags(model: Model) -> list[str]:
    """YaRN's numbers, as far as Megatron-LM has options for them."""
    yarn = model.rotary_yarn
    if yarn is None:
        return []
    if model.latent_attention is not None:
        mscale = _mscale(yarn, yarn.mscale_all_dim)
        return [
            f"{FACTOR} {yarn.factor:.10g}",
            f"{MSCALE} {mscale:.10g}",
            f"{MSCALE_ALL_DIM} {yarn.mscale_all_dim:.10g}",
        ]
    flags = [f"{FACTOR} {yarn.factor:.10g}", f"{MSCALE} {_mscale(yarn, 0.0):.10g}"]
    flags += [f"{flag} {getattr(yarn, field):.10g}" for flag, field in APART.items()]
    return flags if yarn.truncate else [*flags, UNTRUNCATED]


def untold_yarn(model: Model) -> list[str]:
    """A comment for each number that Megatron-LM has no option for, or that is not known."""
    yarn = model.rotary_yarn
    if yarn is None:
        unknown = f"# By how much yarn stretches the rotary angles is not stated: state {FACTOR}."
        return [unknown] if model.rotary_stretch == YARN else []
    untold = []
    if model.latent_attention is not None:
        for name, usual in USUAL.items():
            if (value := getattr(yarn, name)) != usual:
                where = f"set MLATransformerConfig.{FIELDS[name]}" if name in FIELDS else "it always rounds"
                untold.append(
                    f"# Megatron-LM has no option for rotary_yarn.{name} {value:g}, it takes {usual:g}: {where}."
                )
    elif yarn.score_factor != 1.0:
        scores = f"rotary_yarn.mscale_all_dim {yarn.mscale_all_dim:g}"
        untold.append(f"# Megatron-LM scales scores by {scores} in latent attention alone.")
    if yarn.factor == 1.0 and yarn.attention_factor != 1.0:
        grown = f"rotary_yarn.attention_factor {yarn.attention_factor:g}"
        untold.append(f"# Megatron-LM has no option for {grown} beside a factor of 1.")
    return untold


def _mscale(yarn: RotaryYarn, all_dim: float) -> float:
    """The --mscale by which cosines and sines grow by `attention_factor`, beside --mscale-all-dim `all_dim`."""
    if yarn.factor == 1.0:
        return USUAL_MSCALE  # any magnitude is then 1
    grown = yarn.attention_factor * magnitude(yarn.factor, all_dim)
    return (grown - 1.0) / (0.1 * math.log(yarn.factor))
