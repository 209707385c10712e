"""Writing a checkpoint through torch.distributed.checkpoint: which rank writes which pieces, and how they lie in files.

PyTorch's file format pickles its metadata, and a pickle runs code when it is read. Here tensors lie in safetensors
files and everything else in JSON. Planning across ranks, resharding when a checkpoint is read on another layout, and
telling all ranks that a rank has failed are left to torch.distributed.checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trimaran.train.state.manifest import (
    MANIFEST_NAME,
    SUMS_NAME,
    Chunk,
    Manifest,
    SavedTensor,
    chunk_key,
    copy_durably,
    sync_folder,
    write_durably,
)
from trimaran.train.state.pieces import Piece

# a training of a single process has no process group, which is in order
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# The types that weights and optimizer state may have, by the names that safetensors gives them.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_ALIGNMENT = 8


class PieceSavePlanner(SavePlanner):
    """Plans the writing of this rank's pieces; no two ranks may write the same piece."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = {MetadataIndex(piece.name, piece.offsets): piece for piece in pieces}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the pieces are known."""

    def create_local_plan(self) -> SavePlan:
        """An item for each piece."""
        return SavePlan([_write_item(index, piece) for index, piece in self._pieces.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan of each rank, and the list of all tensors and chunks."""
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
    """Writes a checkpoint under another name, files before manifest and checksums, and renames it once it is whole.

    `head` is the manifest without files and tensors; `beside` are other files to copy into the checkpoint. Not
    `in_place`, it stays under the other name (`partial_folder`).
    """

    def __init__(
        self, checkpoint: Path, head: Manifest, rank: int, beside: Sequence[Path] = (), *, in_place: bool = True
    ) -> None:
        self._checkpoint, self._head, self._rank, self._beside = checkpoint, head, rank, beside
        self._in_place = in_place
        self._partial = partial_folder(checkpoint)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes a single checkpoint."""

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
        """Write this rank's file, until it is on the disk."""
        results: list[WriteResult] = []
        if plan.items:
            name = f"rank-{self._rank:05d}.safetensors"
            digest = _write_safetensors(self._partial / name, plan.items, planner)
            results = [WriteResult(item.index, item.tensor_storage_size() or 0, (name, digest)) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write manifest and checksums, and rename the folder (rank 0, once all have written)."""
        written = {result.storage_data: None for rank in results for result in rank}
        files = {name: (number, digest) for number, (name, digest) in enumerate(written)}
        file_of = {result.index: files[result.storage_data[0]][0] for rank in results for result in rank}
        manifest = self._head.model_copy(update={"files": tuple(files), "tensors": _saved_tensors(metadata, file_of)})
        sums = {name: digest for name, (_, digest) in files.items()}
        sums[MANIFEST_NAME] = write_durably(self._partial / MANIFEST_NAME, manifest.model_dump_json().encode())
        sums |= {path.name: copy_durably(path, self._partial / path.name) for path in self._beside}
        lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
        write_durably(self._partial / SUMS_NAME, lines.encode())
        sync_folder(self._partial)
        if not self._in_place:
            return
        # a checkpoint of the same step is damaged, or of a training that went on from an earlier step
        old = going_folder(self._checkpoint)
        if os.path.lexists(self._checkpoint):
            self._checkpoint.rename(old)
        self._partial.rename(self._checkpoint)
        sync_folder(self._checkpoint.parent)
        remove(old)

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
            remove(left_over)


def remove(path: Path) -> None:
    """Remove a checkpoint, or whatever else has the name of one; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


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

    The writer of safetensors would copy every tensor first.
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
    checksum = hashlib.sha256()
    with path.open("wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            checksum.update(block)
            file.write(block)
        for tensor in tensors:
            memory = tensor.reshape(-1).view(torch.uint8).numpy().data
            checksum.update(memory)
            file.write(memory)
        file.flush()
        os.fsync(file.fileno())
    return checksum.hexdigest()


def first_reason(error: CheckpointException) -> str:
    """Why the first of the ranks that failed did."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, OSError):
        return f"rank {rank}: {cause.strerror or cause}"
    return f"rank {rank}: {cause}"
