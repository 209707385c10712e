"""YaRN's numbers pass through Megatron-LM's options both ways, and what these cannot say is said beside them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.api import workload_of
from trimaran.files.catalogue import load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.nouns.attention import RotaryYarn
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.planner.configs.flags import flags_of
from trimaran.planner.configs.megatron.arguments import megatron
from trimaran.planner.configs.nested import nested_flags
from trimaran.planner.configs.stated import Stated
from trimaran.planner.export.exporters import export
from trimaran.planner.export.megatron_mixtures import latent_flags
from trimaran.planner.export.megatron_words import kind_flags
from trimaran.planner.export.megatron_yarn import untold_yarn, yarn_flags

CORE = load_stack("megatron-core")
LATENT, OTHER = load_model("deepseek-v3"), load_model("qwen3-8b").model_copy(update={"rotary_stretch": "yarn"})
FACTORS = st.floats(1.01, 1000)


def read_back(model: Model) -> Stated:
    """What the reader of arguments makes of the flags of a model's attention."""
    flags = [*kind_flags(model), *latent_flags(model), *yarn_flags(model)]
    return megatron(flags_of(" ".join(flags).split())[0])


@given(factor=FACTORS, grown=st.floats(0.2, 5), all_dim=st.floats(0, 2), original=st.integers(16, 100_000))
def test_latent_attentions_numbers_are_read_back(factor: float, grown: float, all_dim: float, original: int) -> None:
    wanted = RotaryYarn(factor=factor, original_max_positions=original, attention_factor=grown, mscale_all_dim=all_dim)
    model = LATENT.model_copy(update={"rotary_yarn": wanted})
    read = RotaryYarn.model_validate(read_back(model).model["rotary_yarn"])
    assert math.isclose(read.factor, factor, rel_tol=1e-8) and math.isclose(read.attention_factor, grown, rel_tol=1e-7)
    assert math.isclose(read.score_factor, wanted.score_factor, rel_tol=1e-8)
    # no option states where the angles come from, which is then said
    assert read.original_max_positions == 4096
    assert any(f"original_max_positions {original}," in line for line in untold_yarn(model)) == (original != 4096)


@given(
    factor=FACTORS, grown=st.floats(0.2, 5), fast=st.floats(2, 100), original=st.integers(16, 9999), whole=st.booleans()
)
def test_other_attentions_numbers_are_read_back(
    factor: float, grown: float, fast: float, original: int, whole: bool
) -> None:
    wanted = RotaryYarn(
        factor=factor, original_max_positions=original, attention_factor=grown, beta_fast=fast, beta_slow=fast / 2,
        truncate=whole,
    )  # fmt: skip
    model = OTHER.model_copy(update={"rotary_yarn": wanted})
    read = RotaryYarn.model_validate(read_back(model).model["rotary_yarn"])
    assert read.model_dump() == pytest.approx(wanted.model_dump(), rel=1e-7) and not untold_yarn(model)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b"])
def test_published_numbers_are_read_back_to_the_last_digit(name: str) -> None:
    model = load_model(name)
    assert RotaryYarn.model_validate(read_back(model).model["rotary_yarn"]) == model.rotary_yarn


def test_a_number_without_an_option_is_named_in_what_is_written() -> None:
    written = export(parse_layout("dp64,pp8,ep64,mbs1,bf16"), workload_of("kimi-k2", 512), CORE, "megatron-lm")
    assert (
        "# Megatron-LM has no option for rotary_yarn.beta_fast 1, it takes 32: set MLATransformerConfig.beta_fast."
        in (written.splitlines())
    )


def test_without_a_factor_the_numbers_are_not_known_and_that_is_said() -> None:
    unknown = LATENT.model_copy(update={"rotary_yarn": None})
    stated = read_back(unknown)
    assert "rotary_yarn" not in stated.model and stated.model["rotary_stretch"] == "yarn"
    assert any("--rotary-scaling-factor is not stated" in note for note in stated.notes)
    assert any("state --rotary-scaling-factor" in line for line in untold_yarn(unknown))


def test_a_recipe_states_the_fields_that_arguments_have_not() -> None:
    fields: dict[str, object] = {"num_layers": 61, "multi_latent_attention": True, "mscale_all_dim": 1.0}
    fields |= {"rotary_scaling_factor": 32.0, "beta_fast": 1.0}
    read = RotaryYarn.model_validate(megatron(nested_flags({"model": fields})).model["rotary_yarn"])
    assert read == load_model("kimi-k2").rotary_yarn


@pytest.mark.parametrize("version", ["0.18", "0.15"])
def test_only_latent_attention_has_yarn_before_its_options(version: str) -> None:
    gpt_oss, deepseek = (workload_of(name, 256) for name in ("gpt-oss-20b", "deepseek-v3"))
    with pytest.raises(TrimaranError, match=f"model.rotary_stretch yarn in core {version}"):
        export(parse_layout("dp8,ep8,mbs1,bf16"), gpt_oss, CORE, "megatron-lm", version)
    said = export(parse_layout("dp64,ep64,mbs1,bf16"), deepseek, CORE, "megatron-lm", version)
    assert "--rotary-scaling-factor 40" in said and "--mscale-all-dim 1" in said
