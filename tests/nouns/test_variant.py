"""Claims about variants: what a sweep file may say of a trial's circumstances, and what it may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.variant import Variant, require_trust
from trimaran.recipe.sweep_settings import SweepSettings

NAMES = st.from_regex(r"OMP_[A-Z0-9_]{1,20}", fullmatch=True)
VALUES = st.text(st.characters(codec="ascii", exclude_categories=("C",), exclude_characters=";"), max_size=50)


@given(
    environment=st.dictionaries(NAMES, VALUES.map(str.strip)),
    pin=st.booleans(),
    clock=st.none() | st.sampled_from((1.5, 2.2, 3.0)),
)
def test_a_variants_text_says_all_that_it_sets(environment: dict[str, str], pin: bool, clock: float | None) -> None:
    variant = Variant(environment=environment, pin_cpus=pin, clock_ghz=clock)
    row = Measurement(
        layers=1, hidden=1, heads=1, seq_len=1, vocab=2, mbs=1, gbs=1, variant=variant.text() or None
    )  # fmt: skip
    expected = dict(environment)
    expected |= {"pin_cpus": "yes"} if pin else {}
    expected |= {"clock": f"{clock:g}GHz"} if clock else {}
    assert row.variants == expected
    assert (variant.text() == "") is (variant == Variant())


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("A B", "1", "no name of a variable"),
        ("A=B", "1", "no name of a variable"),
        ("", "1", "no name of a variable"),
        ("RANK", "0", "set by the harness"),
        ("MASTER_ADDR", "10.0.0.1", "set by the harness"),
        ("TRIMARAN_RENDEZVOUS_FD", "0", "set by the harness"),
        ("OMP_NUM_THREADS", "1;clock=9GHz", "one line"),
        ("OMP_NUM_THREADS", "1\nLD_PRELOAD=/tmp/x.so", "one line"),
        ("OMP_NUM_THREADS", "\x1b[2J", "one line"),
        ("OMP_NUM_THREADS", "x" * 5000, "one line"),
        ("OMP_NUM_THREADS", "two", "threads of a rank"),
        ("OMP_NUM_THREADS", "0", "threads of a rank"),
    ],
)
def test_a_hostile_environment_is_refused(name: str, value: str, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Variant(environment={name: value})


@pytest.mark.parametrize(
    "variant",
    [
        Variant(python="/tmp/evil"),
        Variant(environment={"LD_PRELOAD": "/tmp/evil.so"}),
        Variant(environment={"LD_PRELOAD": "./evil.so"}),
        Variant(environment={"LD_LIBRARY_PATH": "."}),
        Variant(environment={"LD_AUDIT": "evil.so"}),
        Variant(environment={"PYTHONPATH": "evil"}),
        Variant(environment={"PYTHONSTARTUP": "evil.py"}),
        Variant(environment={"OMP_TOOL_LIBRARIES": "/tmp/evil.so"}),
        Variant(environment={"PATH": "evil"}),
    ],
)
def test_a_recipe_runs_code_of_its_choice_only_where_the_user_says_so(variant: Variant) -> None:
    with pytest.raises(TrimaranError, match=r"variants\[1\].*add --trust"):
        require_trust((Variant(), variant), trusted=False)
    require_trust((Variant(), variant), trusted=True)


def test_common_tuning_needs_no_trust() -> None:
    common = {
        "LD_PRELOAD": "libtcmalloc.so.4",
        "OMP_NUM_THREADS": "2",
        "NCCL_ALGO": "Ring",
        "CUDA_LAUNCH_BLOCKING": "1",
    }
    require_trust((Variant(environment=common, pin_cpus=True, clock_ghz=2.0),), trusted=False)


def test_an_interpreter_is_named_by_its_whole_path() -> None:
    with pytest.raises(ValidationError, match="absolute path"):
        Variant(python="python3")


def test_a_variant_stated_twice_is_a_mistake() -> None:
    with pytest.raises(ValidationError, match="twice"):
        SweepSettings(variants=({"clock_ghz": 2.0}, {"clock_ghz": 2.0}))
