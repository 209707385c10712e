"""Checkpoints for torch.distributed.checkpoint: how pieces are planned, written and read.

PyTorch's own file format pickles its metadata, and a pickle runs code when it is read. Here tensors lie in
safetensors files and everything else in JSON. Planning across ranks, the resharding when a checkpoint is read on
another layout, and telling all ranks of a failure of one are torch.distributed.checkpoint's.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trimaran.train.state.manifest import (
    MANIFEST_NAME,
    SUMS_NAME,
    Chunk,
    DamagedError,
    Manifest,
    SavedTensor,
    chunk_key,
    read_manifest,
    sync_folder,
    write_durably,
)
from trimaran.train.state.pieces import Piece

# What safetensors calls the types that weights and optimizer state may have.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_ALIGNMENT = 8


class PieceSavePlanner(SavePlanner):
    """Plans the writing of this rank's pieces; no piece may be another rank's too."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = {MetadataIndex(piece.name, piece.offsets): piece for piece in pieces}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the pieces are known."""

    def create_local_plan(self) -> SavePlan:
        """One item a piece."""
        return SavePlan([_write_item(index, piece) for index, piece in self._pieces.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each rank's own, and the list of all tensors and chunks."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The piece's memory."""
        return self._pieces[write_item.index].tensor


def _write_item(index: MetadataIndex, piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
    properties = TensorProperties(dtype=piece.tensor.dtype)
    return WriteItem(
        index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, torch.Size(piece.shape))
    )


class FolderWriter(StorageWriter):
    """Writes a checkpoint beside its place, and puts it there whole: files, manifest, checksums, then the name.

    `head` is the manifest without files and tensors; `beside` are other files to keep a copy of.
    """

    def __init__(self, checkpoint: Path, head: Manifest, rank: int, beside: Sequence[Path] = ()) -> None:
        self._checkpoint, self._head, self._rank, self._beside = checkpoint, head, rank, beside
        self._partial = partial_folder(checkpoint)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder."""
        self._partial.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and have it on the disk."""
        results: list[WriteResult] = []
        if plan.items:
            name = f"rank-{self._rank:05d}.safetensors"
            digest = _write_safetensors(self._partial / name, plan.items, planner)
            results = [WriteResult(item.index, item.tensor_storage_size() or 0, (name, digest)) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write manifest and checksums, and give the folder its name (rank 0, once all have written)."""
        written = {result.storage_data: None for rank in results for result in rank}
        files = {name: (number, digest) for number, (name, digest) in enumerate(written)}
        file_of = {result.index: files[result.storage_data[0]][0] for rank in results for result in rank}
        manifest = self._head.model_copy(update={"files": tuple(files), "tensors": _saved_tensors(metadata, file_of)})
        sums = {name: digest for name, (_, digest) in files.items()}
        sums[MANIFEST_NAME] = write_durably(self._partial / MANIFEST_NAME, manifest.model_dump_json().encode())
        sums |= {path.name: write_durably(self._partial / path.name, path.read_bytes()) for path in self._beside}
        lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
        write_durably(self._partial / SUMS_NAME, lines.encode())
        sync_folder(self._partial)
        # one of the same step is damaged or of another course of the training
        old = going_folder(self._checkpoint)
        if self._checkpoint.exists():
            self._checkpoint.rename(old)
        self._partial.rename(self._checkpoint)
        sync_folder(self._checkpoint.parent)
        shutil.rmtree(old, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Checkpoints are not found by an id."""
        return False


def partial_folder(checkpoint: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return checkpoint.with_name(f"saving-{checkpoint.name}")


def going_folder(checkpoint: Path) -> Path:
    """What a checkpoint is renamed to before it is removed, so that it is whole or not there."""
    return checkpoint.with_name(f"old-{checkpoint.name}")


def remove_left_overs(folder: Path) -> None:
    """Remove what a killed training was writing or removing in a folder of checkpoints."""
    any_step = folder / "step-*"
    for pattern in (partial_folder(any_step).name, going_folder(any_step).name):
        for left_over in folder.glob(pattern):
            shutil.rmtree(left_over, ignore_errors=True)


def _saved_tensors(metadata: Metadata, file_of: dict[MetadataIndex, int]) -> dict[str, SavedTensor]:
    saved = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = tuple(
            Chunk(file=file_of[MetadataIndex(name, c.offsets)], offsets=tuple(c.offsets), sizes=tuple(c.sizes))
            for c in tensor.chunks
        )
        saved[name] = SavedTensor(dtype=_NAMES[tensor.properties.dtype], shape=tuple(tensor.size), chunks=chunks)
    return saved


def _write_safetensors(path: Path, items: list[WriteItem], planner: SavePlanner) -> str:
    """Write the items' tensors as one file, straight from their memory; its SHA-256.

    safetensors' own writer would copy every tensor first.
    """
    header: dict[str, Any] = {}
    at = 0
    tensors = []
    for item in items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor) and item.index.offset is not None
        size = tensor.numel() * tensor.element_size()
        key = item.index.fqn + chunk_key(item.index.offset)
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        tensors.append(tensor)
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    seen = hashlib.sha256()
    with path.open("wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            seen.update(block)
            file.write(block)
        for tensor in tensors:
            memory = tensor.reshape(-1).view(torch.uint8).numpy().data
            seen.update(memory)
            file.write(memory)
        file.flush()
        os.fsync(file.fileno())
    return seen.hexdigest()


class PieceLoadPlanner(LoadPlanner):
    """Plans the reading of pieces, each from whatever chunks of the checkpoint overlap it."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.name].append(piece)
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the list of what was saved."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Reads that fill every piece. Raises DamagedError where the checkpoint does not hold all of one."""
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
        """Nothing: reads go straight to where they belong."""


class FolderReader(StorageReader):
    """Reads a checkpoint's tensors, converting their precision to that of the memory they go to.

    `alive` is called with each piece read. Raises DamagedError where the manifest cannot be read or names a type of
    number that is not known.
    """

    def __init__(self, checkpoint: Path, alive: Callable[[], None]) -> None:
        self._checkpoint, self._alive = checkpoint, alive
        self._manifest = read_manifest(checkpoint)
        self._metadata = Metadata({name: _metadata(name, saved) for name, saved in self._manifest.tensors.items()})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """All tensors and their chunks, from the manifest."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: files are opened when they are read."""

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
                with safe_open(self._checkpoint / name, framework="pt") as file:
                    for item in items:
                        self._alive()
                        _read(file, item, planner)
            except (SafetensorError, OSError) as error:
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
