"""Runs torchtitan 0.3's configuration modules with its own classes, and cuts stages with its own functions.

Standard input: a JSON list of [layers of the model, source of the module]; standard output: a JSON list of what is set.
The model's registry, which needs a GPU's packages, is one that makes torchtitan's own classes of settings alone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _get_pipeline_metadata


@dataclass
class Config:
    """As torchtitan.trainer.Trainer.Config, of which only these parts are set."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    activation_checkpoint: Any = None
    model_spec: Any = None


@dataclass
class Converter:
    """As torchtitan.components.quantization's, which needs torchao."""

    model_compile_enabled: bool
    filter_fqns: tuple[str, ...] = ()


class Registry(ModuleType):
    """A module of configurations or of models: any name makes a configuration, or takes the converters it is given."""

    def __getattr__(self, name: str) -> Any:
        """What the module exports."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "model_registry":
            return lambda flavor, **options: {"flavor": flavor, **{key: str(value) for key, value in options.items()}}
        if name.endswith("Converter"):
            return SimpleNamespace(Config=Converter)
        return own_of_405b


def own_of_405b() -> Config:
    """What every name makes: more than a plan asks for, as llama3_405b of 0.3.0 does."""
    compiled = CompileConfig(enable=True, enable_async_tensor_parallel=True)
    return Config(compile=compiled, model_spec={"converters": "of its own"})


for name in ("llama3", "qwen3", "deepseek_v3", "gpt_oss"):
    for module in (f"torchtitan.models.{name}", f"torchtitan.models.{name}.config_registry"):
        sys.modules[module] = Registry(module)
sys.modules["torchtitan.components.quantization"] = Registry("torchtitan.components.quantization")


def read(layers: int, source: str) -> dict[str, Any]:
    """What the module's function makes, with the stages of its pipeline; or why it makes nothing."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    try:
        config = scope["planned"]()
    except NotImplementedError as error:
        return {"refused": str(error)}
    recompute = {FullAC.Config: "full", SelectiveAC.Config: "selective", type(None): "none"}
    parallelism = config.parallelism
    parts = parallelism.module_fqns_per_model_part
    if parts is None and parallelism.pipeline_parallel_degree > 1:
        dims = SimpleNamespace(pp=parallelism.pipeline_parallel_degree)
        model = SimpleNamespace(layers=range(layers))
        parts = _generate_llm_fqn_per_model_part(*_get_pipeline_metadata(dims, parallelism, model))
    return {
        "training": asdict(config.training),
        "parallelism": asdict(parallelism),
        "compile": asdict(config.compile),
        "activation_checkpoint": {"mode": recompute[type(config.activation_checkpoint)]},
        "model_spec": config.model_spec,
        "stages": parts or [],
    }


print(json.dumps([read(layers, text) for layers, text in json.load(sys.stdin)]))
