"""Snapshots that nodes hold in memory between checkpoints, each node's own files and those of the node before it.

A snapshot is a checkpoint whose files lie in the memory of nodes: `/dev/shm/trimaran-held-TRAINING/NODE/step-...`. It
outlives the ranks, which a fault ends on all nodes, and with it any one node may be lost. Ranks that start anew write
the newest one that is still whole into the folder of checkpoints, and go on from there as from any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from trimaran.files.user_file import open_file, read_bytes, regular_file
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.environment import NODE, SLURM_NODE
from trimaran.protocol.host import GIB, free_memory_bytes, name_until_reboot
from trimaran.train.comm.shared_memory import SHM_DIR
from trimaran.train.state.checkpoint_writer import (
    FolderWriter,
    PieceSavePlanner,
    first_reason,
    partial_folder,
    remove_left_overs,
)
from trimaran.train.state.manifest import (
    MANIFEST_BYTES,
    SUMS_NAME,
    Manifest,
    folder_name,
    saved_steps,
    sync_folder,
    write_durably,
)
from trimaran.train.state.pieces import Piece

_PREFIX = "trimaran-held-"
_TENSORS = ".safetensors"
# What is sent at once, in bytes.
_CHUNK = 1 << 26
# While a snapshot is made the one before it is kept: twice a node's own files and its neighbour's.
_AT_ONCE = 2
# What a training left that ended by a fault, and that nobody went on with, is removed by the next one after so long.
_FORGOTTEN_AFTER_S = 86400.0

T = TypeVar("T")
Alive = Callable[[], None]


class NotHeldError(Exception):
    """A snapshot that could not be held; the message says on which node and why."""


@dataclass(frozen=True)
class _Found:
    """A snapshot that a rank finds in its node's memory: its checksums, and which of its files are here."""

    sums: str
    folder: Path
    files: frozenset[str]

    @property
    def all_files(self) -> list[str]:
        """The files of tensors that the whole snapshot has, by its checksums."""
        names = (line.partition("  ")[2] for line in self.sums.splitlines())
        return [name for name in names if name.endswith(_TENSORS)]


def node_name() -> str:
    """The name of this rank's node: as its launcher says, or the machine's own and what tells it from namesakes."""
    return os.environ.get(NODE) or os.environ.get(SLURM_NODE) or name_until_reboot()


class HeldSnapshots:
    """The snapshots of one training, as the ranks of `group` see them; every rank has to make the same calls.

    `group` is None for a training of a single rank. Raises nothing for what cannot be held: `holds` is then False.
    """

    def __init__(self, checkpoints: Path, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._me = dist.get_rank(group) if group else 0
        training = hashlib.sha256(str(checkpoints).encode()).hexdigest()[:16]
        self._root = SHM_DIR / f"{_PREFIX}{training}"
        self._names = self._gather(node_name())
        self._node = self._names[self._me]
        self._folder = self._root / self._node
        self._checked = False
        # of a single node nothing would be left when it is lost
        self.holds = len(set(self._names)) > 1
        if self._leads:
            _remove_forgotten(self._root)
            # of nodes that share a machine, one that begins anew may be letting go of what another looks at
            with contextlib.suppress(FileNotFoundError):
                for folder in _node_folders(self._root):
                    remove_left_overs(folder)

    @property
    def nodes(self) -> list[str]:
        """The nodes, in the order of their first ranks; each one's files are held by the next one too."""
        return list(dict.fromkeys(self._names))

    def hold(self, head: Manifest, pieces: Sequence[Piece], beside: Sequence[Path] = ()) -> dict[str, float]:
        """Hold the pieces of all ranks, and drop what was held before; the GiB that each node then holds.

        `beside` are other files that a checkpoint has.

        Raises NotHeldError, on all ranks, where there is no room.
        """
        own = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in pieces)
        gib = self._require_room(own)
        final = self._folder / folder_name(head.step)
        partial = partial_folder(final)
        try:
            with self._agreed():
                _make_own_folder(self._root)
                partial.mkdir(parents=True, exist_ok=True)
            try:
                save(
                    {},
                    storage_writer=FolderWriter(final, head, self._me, beside, in_place=False),
                    planner=PieceSavePlanner(pieces),
                    process_group=self._group,
                )
            except CheckpointException as error:
                raise NotHeldError(first_reason(error)) from None
            self._send_to_neighbours(partial)
            told = self._from_first(self._beside(partial))
            with self._agreed():
                if self._leads:
                    for name, content in told.items():
                        (partial / name).write_bytes(content)
                    shutil.rmtree(final, ignore_errors=True)
                    partial.rename(final)
        except NotHeldError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        # nothing older goes before every node holds the new one
        if self._leads:
            self._drop(lambda step: step != head.step)
        return gib

    def bring_back(self, checkpoints: Path, alive: Alive) -> str | None:
        """Write the newest snapshot that is whole, and newer than all checkpoints, as one of these, and let go of it.

        A sentence that says so, or why what is held cannot be used; None where nothing newer is held.
        """
        found = self._gather(self._found())
        newest = self._from_first((saved_steps(checkpoints) or [-1])[0] if self._me == 0 else -1)
        lacking = None
        for step in sorted({step for each in found for step in each if step > newest}, reverse=True):
            holders = [each.get(step) for each in found]
            missing = _missing(holders)
            if missing:
                nodes = sorted({name for name, holder in zip(self._names, holders, strict=True) if holder})
                lacking = lacking or (
                    f"a snapshot of step {step} is held by {', '.join(nodes)} and lacks {missing}: it is passed over"
                )
                continue
            begin = time.monotonic()
            nodes = sorted({name for name, holder in zip(self._names, holders, strict=True) if holder})
            try:
                self._write_back(checkpoints / folder_name(step), holders, alive)
            except NotHeldError as error:
                return f"the snapshot of step {step} that is held in memory could not be written: {error}"
            self.discard()
            seconds = time.monotonic() - begin
            return (
                f"the snapshot of step {step}, held in memory by {', '.join(nodes)}, is written as a checkpoint in "
                f"{seconds:.2f} s"
            )
        return lacking

    def discard(self) -> None:
        """Remove all that these nodes hold of the training."""
        if self._leads:
            shutil.rmtree(self._root, ignore_errors=True)

    @property
    def _leads(self) -> bool:
        """Whether this is the first rank of its node."""
        return self._names.index(self._node) == self._me

    def _require_room(self, own: int) -> dict[str, float]:
        """Raise NotHeldError where a node has no room for what it would hold; otherwise the GiB of each node."""
        room = 0
        with contextlib.suppress(OSError):
            room = min(shutil.disk_usage(SHM_DIR).free, free_memory_bytes())
        sizes = self._gather((own, room))
        of_node = {
            node: sum(size for name, (size, _) in zip(self._names, sizes, strict=True) if name == node)
            for node in self.nodes
        }
        before = dict(zip(self.nodes, [self.nodes[-1], *self.nodes[:-1]], strict=True))
        held = {node: of_node[node] + of_node[before[node]] for node in self.nodes}
        if not self._checked:
            free = {name: size for name, (_, size) in zip(self._names, sizes, strict=True)}
            for node, size in held.items():
                if _AT_ONCE * size > free[node]:
                    raise NotHeldError(
                        f"node {node} needs {_AT_ONCE * size / GIB:.2f} GiB of memory in {SHM_DIR} and has "
                        f"{free[node] / GIB:.2f} GiB"
                    )
            self._checked = True
        return {node: size / GIB for node, size in held.items()}

    def _send_to_neighbours(self, partial: Path) -> None:
        """Send this rank's file to a rank of the next node, and take those that come from the node before."""
        path = partial / _file_name(self._me)
        sizes = self._gather(path.stat().st_size if path.exists() else 0)
        target = self._neighbour_of(self._me)
        sources = [rank for rank in range(len(sizes)) if sizes[rank] and self._neighbour_of(rank) == self._me]
        arriving: list[tuple[int, Tensor]] = []
        with self._agreed():
            for source in sources:
                taken = partial / _file_name(source)
                with taken.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, sizes[source])
                arriving.append((source, _mapped(taken, sizes[source], shared=True)))
        works = []
        for source, tensor in arriving:
            works += [dist.irecv(part, group=self._group, group_src=source) for part in torch.split(tensor, _CHUNK)]
        if sizes[self._me]:
            sent = _mapped(path, sizes[self._me], shared=False)
            works += [dist.isend(part, group=self._group, group_dst=target) for part in torch.split(sent, _CHUNK)]
        for work in works:
            if work is not None:
                work.wait()

    def _neighbour_of(self, rank: int) -> int:
        """The rank of the next node that takes the file of a rank."""
        nodes = self.nodes
        there = nodes[(nodes.index(self._names[rank]) + 1) % len(nodes)]
        ranks = [other for other, name in enumerate(self._names) if name == there]
        place = [other for other, name in enumerate(self._names) if name == self._names[rank]].index(rank)
        return ranks[place % len(ranks)]

    def _beside(self, partial: Path) -> dict[str, bytes]:
        """What rank 0 wrote beside the tensors: manifest, checksums, tokenizer."""
        return {} if self._me else {path.name: _read(path) for path in _without_tensors(partial)}

    def _found(self) -> dict[int, _Found]:
        """What lies in this machine's memory, by step."""
        found: dict[int, _Found] = {}
        for folder in _node_folders(self._root):
            for step in saved_steps(folder):
                place = folder / folder_name(step)
                files = frozenset(path.name for path in place.glob(f"*{_TENSORS}"))
                with contextlib.suppress(OSError, TrimaranError):
                    sums = _read(place / SUMS_NAME).decode(errors="replace")
                    # of nodes that share a machine, the one that holds more
                    if step not in found or len(found[step].files) < len(files):
                        found[step] = _Found(sums, place, files)
        return found

    def _write_back(self, checkpoint: Path, holders: Sequence[_Found | None], alive: Alive) -> None:
        """Write a snapshot as a checkpoint: each file by one of the ranks that find it in their memory."""
        partial, mine = partial_folder(checkpoint), holders[self._me]
        files = sorted({name for holder in holders if holder for name in holder.files})
        first = next(rank for rank, holder in enumerate(holders) if holder)
        try:
            with self._agreed():
                partial.mkdir(parents=True, exist_ok=True)
                for number, name in enumerate(files):
                    having = [rank for rank, holder in enumerate(holders) if holder and name in holder.files]
                    if having[number % len(having)] == self._me and mine:
                        _copy(mine.folder / name, partial / name, alive)
                if first == self._me and mine:
                    for path in _without_tensors(mine.folder):
                        write_durably(partial / path.name, _read(path))
            with self._agreed():
                if self._me == 0:
                    sync_folder(partial)
                    partial.rename(checkpoint)
                    sync_folder(checkpoint.parent)
        except NotHeldError:
            if self._me == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _drop(self, goes: Callable[[int], bool]) -> None:
        for folder in _node_folders(self._root):
            for step in filter(goes, saved_steps(folder)):
                shutil.rmtree(folder / folder_name(step), ignore_errors=True)

    @contextlib.contextmanager
    def _agreed(self) -> Iterator[None]:
        """Raise NotHeldError on all ranks where the block fails on one of them, once all have come here."""
        failure = ""
        try:
            yield
        except (OSError, TrimaranError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            failure = f"node {self._node}: {why or error}"
        for told in self._gather(failure):
            if told:
                raise NotHeldError(told)

    def _gather(self, value: T) -> list[T]:
        """Every rank's value."""
        if self._group is None:
            return [value]
        gathered: list[T | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, value, group=self._group)
        return [each for each in gathered if each is not None]

    def _from_first(self, value: T) -> T:
        """Rank 0's value."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]


def _missing(holders: Iterable[_Found | None]) -> str | None:
    """The first file that no node holds of a snapshot; None where there is none."""
    there = [holder for holder in holders if holder]
    if len({holder.sums for holder in there}) > 1:
        return "checksums that agree"
    held = {name for holder in there for name in holder.files}
    return next((name for name in there[0].all_files if name not in held), None)


def _without_tensors(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix != _TENSORS]


def _read(path: Path) -> bytes:
    return read_bytes(path, path.name, MANIFEST_BYTES)


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}{_TENSORS}"


def _mapped(path: Path, size: int, *, shared: bool) -> Tensor:
    """The bytes of a file, which lies in memory, without a copy."""
    return torch.from_file(str(regular_file(path, path.name, None)), shared=shared, size=size, dtype=torch.uint8)


def _node_folders(root: Path) -> list[Path]:
    if root.is_symlink() or not root.is_dir() or root.stat().st_uid != os.getuid():
        return []
    return [path for path in root.iterdir() if path.is_dir()]


def _make_own_folder(root: Path) -> None:
    """Make the folder, which others of this machine may not read. Raises OSError where it is another user's."""
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise PermissionError(13, f"{root} is another user's")


def _copy(source: Path, target: Path, alive: Alive) -> None:
    with open_file(source, source.name, None) as read, target.open("wb") as written:
        while block := read.read(_CHUNK):
            alive()
            written.write(block)
        written.flush()
        os.fsync(written.fileno())


def _remove_forgotten(own: Path) -> None:
    """Remove what other trainings of this user left long ago."""
    for root in SHM_DIR.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            newest = max((folder.stat().st_mtime for folder in _node_folders(root)), default=None)
            if root != own and newest is not None and time.time() - newest > _FORGOTTEN_AFTER_S:
                shutil.rmtree(root, ignore_errors=True)
