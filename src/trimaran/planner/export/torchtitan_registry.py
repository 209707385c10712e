"""torchtitan 0.3's form of a configuration: a Python module with a function that makes it.

`python -m torchtitan.train --module planned_layout --config planned` finds such a module by its name on the path
(torchtitan/config/manager.py of 0.3.0). The function starts from torchtitan's own configuration of the model, where
there is one of that shape, and sets what the layout says; where there is none it says so and stops. The model and what
is compiled are always set: torchtitan's own may be more than was planned, as llama3_405b, whose layers are in fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.layout.layout import Layout
from trimaran.nouns.model import Model
from trimaran.planner.export.torchtitan_experts import BACKENDS
from trimaran.planner.export.torchtitan_flavors import Flavor, flavor_of

_RECOMPUTE = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
_CONVERTERS = {"fp8_rowwise": "Float8LinearConverter", "mxfp8": "MXFP8LinearConverter"}

# A step as one CUDA graph, which 0.3.0 makes unless told otherwise, no stack counts, and pipelines and most exchanges
# of experts do not go with (trainer.py, _validate_cuda_graphs).
_LAUNCHED = {"disable_cuda_graphs": True}


def registry_module(
    layout: Layout, model: Model, training: dict[str, Any], parallelism: dict[str, Any], compiled: dict[str, bool]
) -> str:
    """The module's source; the others are fields of torchtitan's classes of these names, `compiled` of compile's."""
    known = flavor_of(model, "0.3")
    options = _model_options(layout, model)
    lines = [
        *([] if known else _own_model(model)),
        "def planned():",
        *_start(known, options),
        f"    config.compile = CompileConfig({_fields(compiled)})",
        *(f"    config.training.{name} = {value!r}" for name, value in (training | _LAUNCHED).items()),
        "    config.parallelism = ParallelismConfig(",
        *(f"        {name}={value!r}," for name, value in parallelism.items()),
        "    )",
        f"    config.activation_checkpoint = {_RECOMPUTE[layout.recompute]}",
        "    return config",
    ]
    head = f'"""torchtitan 0.3: {layout} on {layout.devices} devices.\n\n{_USE}"""'
    return "\n".join([head, "", *_imports(layout, known, options), "", "", *lines])


def _fields(values: Mapping[str, bool]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _imports(layout: Layout, known: Flavor | None, options: Mapping[str, str]) -> list[str]:
    imports = ["from torchtitan.config import CompileConfig, ParallelismConfig"]
    if layout.recompute != "none":
        policy = _RECOMPUTE[layout.recompute].partition(".")[0]
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {policy}")
    if "converters" in options:
        imports.append(f"from torchtitan.components.quantization import {_CONVERTERS[layout.precision]}")
    if known:
        imports.append(f"from torchtitan.models.{known.name}.config_registry import {known.function}")
        imports.append(f"from torchtitan.models.{known.name} import model_registry")
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


def _start(known: Flavor | None, options: Mapping[str, str]) -> list[str]:
    """The lines that make the configuration to start from, of a model that is made with `options`."""
    given = [f"        {name}={source}," for name, source in options.items()]
    if known is None:
        return ["    config = own_model(", *given, "    )"] if given else ["    config = own_model()"]
    made = ["    config.model_spec = model_registry(", f'        "{known.size}",', *given, "    )"]
    return [f"    config = {known.function}()", *made]
