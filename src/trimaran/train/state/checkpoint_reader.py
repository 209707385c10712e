"""Reading a checkpoint through torch.distributed.checkpoint: pieces of any layout from the chunks that overlap them."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trimaran.files.user_file import regular_file
from trimaran.nouns.noun import TrimaranError
from trimaran.train.state.checkpoint_writer import DTYPES, first_reason
from trimaran.train.state.manifest import DamagedError, SavedTensor, chunk_key, read_manifest
from trimaran.train.state.pieces import Piece


class PieceLoadPlanner(LoadPlanner):
    """Plans the reading of pieces, each from the chunks of the checkpoint that overlap it."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.name].append(piece)
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the list of tensors and chunks that were saved."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Reads that fill every piece. Raises DamagedError where the checkpoint lacks a part of a piece."""
        assert self._metadata is not None
        items: list[ReadItem] = []
        for name, pieces in self._pieces.items():
            saved = self._metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata):
                raise DamagedError(f"it has no tensor {name}")
            if tuple(saved.size) != pieces[0].shape:
                raise DamagedError(f"tensor {name} has shape {tuple(saved.size)}, the model's is {pieces[0].shape}")
            wanted = [ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape) for piece in pieces]
            reads = create_read_items_for_chunk_list(name, saved, wanted)
            if sum(read.lengths.numel() for read in reads) != sum(piece.tensor.numel() for piece in pieces):
                raise DamagedError(f"tensor {name} has gaps")
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Never: only tensors are saved."""
        raise DamagedError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a piece that the read fills."""
        index = read_item.dest_index.index
        assert index is not None
        tensor = self._pieces[read_item.dest_index.fqn][index].tensor
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: reads fill the pieces in place."""


class FolderReader(StorageReader):
    """Reads a checkpoint's tensors, converting their precision to that of the pieces they fill.

    `alive` is called with each piece read. Raises DamagedError where the manifest cannot be read or names a type of
    number that is not known.
    """

    def __init__(self, checkpoint: Path, alive: Callable[[], None]) -> None:
        self._checkpoint, self._alive = checkpoint, alive
        self._manifest = read_manifest(checkpoint)
        self._metadata = Metadata({name: _metadata(name, saved) for name, saved in self._manifest.tensors.items()})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads a single checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """All tensors and their chunks, from the manifest."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: files are opened when they are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file. Raises DamagedError for one that is no safetensors file or lacks a chunk."""
        by_file: dict[int, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            saved = self._manifest.tensors[item.storage_index.fqn]
            assert item.storage_index.index is not None
            by_file[saved.chunks[item.storage_index.index].file].append(item)
        for number, items in by_file.items():
            name = self._manifest.files[number]
            try:
                with safe_open(regular_file(self._checkpoint / name, name, None), framework="pt") as file:
                    for item in items:
                        self._alive()
                        _read(file, item, planner)
            except (SafetensorError, OSError, TrimaranError) as error:
                raise DamagedError(f"{name} cannot be read ({error})") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Checkpoints are not found by an id."""
        return False


def _read(file: Any, item: ReadItem, planner: LoadPlanner) -> None:
    assert item.storage_index.offset is not None
    chunk = file.get_slice(item.storage_index.fqn + chunk_key(item.storage_index.offset))
    spans = zip(item.storage_offsets, item.lengths, strict=True)
    planner.resolve_tensor(item).copy_(chunk[tuple(slice(begin, begin + length) for begin, length in spans)])


def _metadata(name: str, saved: SavedTensor) -> TensorStorageMetadata:
    if saved.dtype not in DTYPES:
        raise DamagedError(f"tensor {name} is of type {saved.dtype}, not one of {', '.join(DTYPES)}")
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in saved.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[saved.dtype]), torch.Size(saved.shape), chunks)


def load_pieces(checkpoint: Path, pieces: Iterable[Piece], alive: Callable[[], None]) -> None:
    """Fill the pieces from a checkpoint, by this rank alone. Raises TrimaranError where it does not hold them."""
    try:
        load({}, storage_reader=FolderReader(checkpoint, alive), planner=PieceLoadPlanner(list(pieces)), no_dist=True)
    except DamagedError as error:
        raise TrimaranError(f"checkpoint {checkpoint}: {error}") from None
    except CheckpointException as error:
        raise TrimaranError(f"checkpoint {checkpoint}: {first_reason(error)}") from None
