"""Sources of weights: what a training begins with, what is sampled from and what is converted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trimaran.files.same_model import differing_fields
from trimaran.layout.layout import Layout
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.train.comm.group import GroupFactory
from trimaran.train.comm.mesh import build_mesh
from trimaran.train.model.gpt import Stage
from trimaran.train.model.weight import Initial, Weight, WeightSpec, declared_weights
from trimaran.train.state.checkpoint_weights import CheckpointWeights
from trimaran.train.state.hugging_face import HuggingFaceWeights
from trimaran.train.state.weight_files import CheckpointFiles, HuggingFaceFiles, find_weights


class Source(Protocol):
    """Weights of a whole model by our names, each read on request."""

    folder: Path
    model: Model

    def read(self, name: str) -> Tensor:
        """The weight `name`, vocabulary without padding. Raises TrimaranError where it is not there."""
        ...


def open_source(path: Path, alive: Callable[[], None] = lambda: None) -> Source:
    """The weights that `find_weights` finds; raises as that does."""
    return source_of(find_weights(path, alive))


def source_of(files: HuggingFaceFiles | CheckpointFiles) -> Source:
    """The weights in files that were found."""
    return HuggingFaceWeights(files) if isinstance(files, HuggingFaceFiles) else CheckpointWeights(files)


def check_same_model(source: Source, model: Model, asked_by: str) -> None:
    """Raise TrimaranError where `source` holds weights of another model than `model`."""
    for field, (ours, theirs) in differing_fields(model, source.model).items():
        raise TrimaranError(
            f"{asked_by}: the weights in {source.folder} have {field} {theirs}, model.{field} is {ours}: "
            f"set the model to the weights' own"
        )


def initial_from(source: Source) -> Initial:
    """A model's initial values, read from `source`.

    Asking for one raises TrimaranError where its shape is not the model's, or a number of it is not finite.
    """

    def values(name: str, spec: WeightSpec) -> Tensor:
        full = source.read(spec.drawn_as or name).float()
        shape = spec.shape if spec.real_rows is None else (spec.real_rows, *spec.shape[1:])
        if tuple(full.shape) != shape:
            raise TrimaranError(
                f"{source.folder}: weight {name} has shape {tuple(full.shape)}, the model's is {shape}: "
                f"its files are not those of its configuration"
            )
        if not bool(full.isfinite().all()):
            raise TrimaranError(
                f"{source.folder}: weight {name} holds numbers that are not finite: take another folder"
            )
        padding = spec.shape[0] - full.shape[0]
        return functional.pad(full, (0, 0, 0, padding)) if padding else full

    return values


def whole_model(source: Source, device: torch.device, dtype: torch.dtype) -> Stage:
    """The model of `source` on a single device, for forward passes alone."""
    mesh = build_mesh(Layout(), 0, range(1), GroupFactory(device))
    assert mesh is not None, "rank 0 is in a layout of a single rank"
    stage = Stage(source.model, Layout(), (source.model.layers,), mesh)
    initial = initial_from(source)
    for name, (owner, attribute, spec) in declared_weights(stage).items():
        values = initial(name, spec).to(device, dtype)
        setattr(owner, attribute, Weight(values, requires_grad=False))
    return stage


def whole_logits(stage: Stage, tokens: Tensor, *, last: bool = False) -> Tensor:
    """(b, s) tokens -> (b, s, vocabulary), or (b, 1, vocabulary) of the `last` alone, by a model that is whole."""
    assert stage.head is not None, "a whole model has its head"
    x = stage(tokens, 0)
    return stage.head.logits(x[:, -1:] if last else x)
