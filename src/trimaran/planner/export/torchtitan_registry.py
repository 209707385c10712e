"""torchtitan 0.3's form of a configuration: a Python module with a function that makes it.

`python -m torchtitan.train --module planned_layout --config planned` finds such a module by its name on the path
(torchtitan/config/manager.py of 0.3.0). The function starts from torchtitan's own configuration of the model, where
there is one of that shape, and sets what the layout says; where there is none it says so and stops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.layout.layout import Layout
from trimaran.nouns.model import Model
from trimaran.planner.export.torchtitan_experts import BACKENDS

# torchtitan's model and its configuration's function and flavor, by layers, hidden, heads, kv_heads, ffn_hidden, vocab,
# experts, top_k and moe_ffn_hidden (torchtitan 0.3.0, models/*/__init__.py and models/*/config_registry.py).
SHAPES: Mapping[tuple[int, ...], tuple[str, str, str]] = {
    (32, 4096, 32, 8, 14336, 128256, 0, 0, 0): ("llama3", "llama3_8b", "8B"),
    (80, 8192, 64, 8, 28672, 128256, 0, 0, 0): ("llama3", "llama3_70b", "70B"),
    (126, 16384, 128, 8, 53248, 128256, 0, 0, 0): ("llama3", "llama3_405b", "405B"),
    (40, 5120, 40, 8, 17408, 151936, 0, 0, 0): ("qwen3", "qwen3_14b", "14B"),
    (64, 5120, 64, 8, 25600, 151936, 0, 0, 0): ("qwen3", "qwen3_32b", "32B"),
    (48, 2048, 32, 4, 6144, 151936, 128, 8, 768): ("qwen3", "qwen3_30b_a3b", "30B-A3B"),
    (61, 7168, 128, 128, 18432, 129280, 256, 8, 2048): ("deepseek_v3", "deepseek_v3_671b", "671B"),
    (24, 2880, 64, 8, 2880, 201088, 32, 4, 2880): ("gpt_oss", "gpt_oss_20b", "20b"),
    (36, 2880, 64, 8, 2880, 201088, 128, 4, 2880): ("gpt_oss", "gpt_oss_120b", "120b"),
}
_RECOMPUTE = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
_CONVERTERS = {"fp8_rowwise": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter"}


def registry_module(
    layout: Layout, model: Model, training: dict[str, Any], parallelism: dict[str, Any], compiled: dict[str, bool]
) -> str:
    """The module's source; the others are fields of torchtitan's classes of these names, `compiled` of compile's."""
    sizes = model.layers, model.hidden, model.heads, model.kv_heads, model.ffn_hidden, model.vocab
    known = SHAPES.get((*sizes, model.experts, model.top_k, model.moe_ffn_hidden))
    options = _model_options(layout, model)
    lines = [
        *([] if known else _own_model(model)),
        "def planned():",
        *_start(known, options),
        *([f"    config.compile = CompileConfig({_fields(compiled)})"] if compiled else []),
        *(f"    config.training.{name} = {value!r}" for name, value in training.items()),
        "    config.parallelism = ParallelismConfig(",
        *(f"        {name}={value!r}," for name, value in parallelism.items()),
        "    )",
        f"    config.activation_checkpoint = {_RECOMPUTE[layout.recompute]}",
        "    return config",
    ]
    head = f'"""torchtitan 0.3: {layout} on {layout.devices} devices.\n\n{_USE}"""'
    return "\n".join([head, "", *_imports(layout, known, options, bool(compiled)), "", "", *lines])


def _fields(values: Mapping[str, bool]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _imports(
    layout: Layout, known: tuple[str, str, str] | None, options: Mapping[str, str], is_compiled: bool
) -> list[str]:
    compiles = "CompileConfig, " if is_compiled else ""
    imports = [f"from torchtitan.config import {compiles}ParallelismConfig"]
    if layout.recompute != "none":
        policy = _RECOMPUTE[layout.recompute].partition(".")[0]
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {policy}")
    if "converters" in options:
        imports.append(f"from torchtitan.components.quantization import {_CONVERTERS[layout.precision]}")
    if known:
        module, function, _ = known
        imports.append(f"from torchtitan.models.{module}.config_registry import {function}")
        imports += [f"from torchtitan.models.{module} import model_registry"] if options else []
    return sorted(imports)


def _model_options(layout: Layout, model: Model) -> dict[str, str]:
    """What the model is made with, as source: narrow linear layers, and how tokens come to their experts."""
    options = {}
    if converter := _CONVERTERS.get(layout.precision):
        only = 'filter_fqns=["lm_head"], ' if converter == "Float8LinearConverter" else ""
        options["converters"] = f"[{converter}.Config({only}model_compile_enabled=True)]"
    if model.experts and layout.ep > 1:
        options["moe_comm_backend"] = f'"{BACKENDS[layout.dispatcher]}"'
    return options


_USE = """Save as planned_layout.py, put its folder on PYTHONPATH and give torchtitan.train
--module planned_layout --config planned.
"""


def _own_model(model: Model) -> list[str]:
    """A function that is the user's to fill in, and that says so."""
    missing = f"torchtitan 0.3.0 has no configuration of {model.layers} layers of width {model.hidden}"
    return [
        "def own_model(**options):",
        f'    raise NotImplementedError("{missing}: return one of your own here")',
        "",
        "",
    ]


def _start(known: tuple[str, str, str] | None, options: Mapping[str, str]) -> list[str]:
    """The lines that make the configuration to start from, of a model that is made with `options`."""
    given = [f"        {name}={source}," for name, source in options.items()]
    if known is None:
        return ["    config = own_model(", *given, "    )"] if given else ["    config = own_model()"]
    start = f"    config = {known[1]}()"
    if not given:
        return [start]
    return [start, "    config.model_spec = model_registry(", f'        "{known[2]}",', *given, "    )"]
