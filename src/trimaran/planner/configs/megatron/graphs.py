"""Which modules of a layer Megatron-LM's flags have it replay as CUDA graphs."""

from __future__ import annotations

from typing import get_args

from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import GraphedModule
from trimaran.nouns.text import quoted
from trimaran.planner.configs.flags import Flags
from trimaran.planner.configs.stated import Stated
from trimaran.planner.export.megatron_words import GRAPHED_BY, GRAPHED_MODULES, OLD_GRAPHED_MODULES, WHOLE

# What 0.15 and later take for --cuda-graph-impl local and transformer_engine (megatron/training/arguments.py).
_OLD_SWITCHES = ("--enable-cuda-graph", "--external-cuda-graph")
# What stands for whole layers, or for more, among the modules; layers of state-space models are none of ours.
_ALL, _NOT_OURS = ("full", "full_iteration"), "mamba"


def graphs(flags: Flags, stated: Stated) -> None:
    """Nothing where no graph is asked for, all of a layer where no module is named, or the whole iteration is."""
    by = flags.word(GRAPHED_BY, ("none", "local", "transformer_engine", "full_iteration"))
    switched = [flag for flag in _OLD_SWITCHES if flags.has(flag)]
    named = [word for flag in (GRAPHED_MODULES, OLD_GRAPHED_MODULES) for value in flags.words(flag)
             for word in value.replace(",", " ").split()]  # fmt: skip
    if by == "none" or (by is None and not switched):
        return
    known = get_args(GraphedModule)
    for word in named:
        if word not in (*known, *_ALL, _NOT_OURS):
            raise TrimaranError(f"{GRAPHED_MODULES} is {quoted(word)}: of it only {', '.join(known)} can be said here")
    whole = by == "full_iteration" or not named or not set(named).isdisjoint(_ALL)
    modules = {module for kind in WHOLE.values() for module in kind} if whole else set(named)
    stated.stack["graphed"] = tuple(module for module in known if module in modules)
