"""Reads torchtitan 0.2's TOML files with its own ConfigManager, and cuts stages with its own function.

Standard input: a JSON list of [layers of the model, TOML file]; standard output: a JSON list of what is then set.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

# The package without its own first lines, which import what needs a GPU.
FOLDER = Path(str(importlib.util.find_spec("torchtitan").submodule_search_locations[0]))
PACKAGE = ModuleType("torchtitan")
PACKAGE.__path__ = [str(FOLDER)]
sys.modules["torchtitan"] = PACKAGE
ConfigManager = importlib.import_module("torchtitan.config").ConfigManager

# Without what the module needs to train: the function is plain Python.
SOURCE = FOLDER / "distributed" / "pipeline_parallel.py"
FUNCTION = next(
    node
    for node in ast.parse(SOURCE.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name == "generate_llm_fqn_per_model_part"
)
SCOPE: dict[str, Any] = {"math": math, "logger": logging.getLogger()}
exec(compile(ast.Module([FUNCTION], []), str(SOURCE), "exec"), SCOPE)


def stages(layers: int, parallelism: Any) -> list[list[str]]:
    """The modules of each stage, counted as pipeline_llm does (lines 52 to 119)."""
    if parallelism.module_fqns_per_model_part is not None:
        return parallelism.module_fqns_per_model_part  # type: ignore[no-any-return]
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    single = parallelism.pipeline_parallel_schedule in ("1F1B", "GPipe")
    count = parallelism.pipeline_parallel_degree * (1 if single else 2)
    if per_stage is not None:
        count = math.ceil((layers + first + last) / per_stage)
        assert count % parallelism.pipeline_parallel_degree == 0
    return SCOPE["generate_llm_fqn_per_model_part"](count, layers, first, last)  # type: ignore[no-any-return]


def read(layers: int, text: str) -> dict[str, Any]:
    """The configuration, with the stages of its pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(text)
        config = ConfigManager().parse_args(["--job.config_file", str(file)])
    parts = stages(layers, config.parallelism) if config.parallelism.pipeline_parallel_degree > 1 else []
    return {**asdict(config), "stages": parts}


print(json.dumps([read(layers, text) for layers, text in json.load(sys.stdin)]))
