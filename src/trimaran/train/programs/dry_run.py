"""One step of some ranks of a training at full size, without its devices: `python -m trimaran.train.programs.dry_run`.

The argument is a file with a `trimaran.protocol.dry_run.DryRunJob`; each rank is printed as a line of JSON. Every rank
is built as in the training, of shapes on the meta device, which stands for a GPU here. What it sends goes to a process
group that does nothing. Only where numbers decide, at the step's end, the step is not the trainer's own: its loss
counts as finite. Of a pipeline's steady state, which is the longer the more micro-batches there are, a part is traced
and counts as often as it comes.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # what collectives do to shapes
from numpy.typing import NDArray
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trimaran.layout.schedule import Action
from trimaran.layout.steady import Shortened, shortened
from trimaran.protocol.dry_run import DryRunJob, TracedCollective, TracedRank
from trimaran.protocol.job import TrainJob
from trimaran.train.comm.group import Group, GroupFactory
from trimaran.train.comm.mesh import Mesh, build_mesh
from trimaran.train.engine.trainer import Trainer
from trimaran.train.model import offload
from trimaran.train.model.mixture import dispatch
from trimaran.train.model.weight import WeightSpec
from trimaran.train.programs.run_job import run_job
from trimaran.train.programs.tracing import Trace, as_on_cuda
from trimaran.train.text.sampler import Sampler

META = torch.device("meta")
# A process group that does nothing, on shapes too: what passes tensors on in a ring asks for its device's own.
BACKENDS = "cpu:fake,cuda:fake,meta:fake"
# PyTorch has AdamW's fused kernel on the meta device, and SGD's not; both change tensors in place.
_KERNELS = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
_KERNELS.impl("_fused_sgd_", lambda *tensors, **settings: None)  # type: ignore[no-untyped-call]
# It has no count of values there either, whose size is known where all values that may be are.
_KERNELS.impl("bincount", lambda values, weights=None, minlength=0: values.new_empty(minlength))  # type: ignore[no-untyped-call]
# What a group that does nothing has begun is done: it says so of nothing, and tensors that were sent would stay.
torch._C._distributed_c10d.FakeWork.is_completed = lambda work: True  # type: ignore[method-assign, assignment]


class _OwnGroups(GroupFactory):
    """Makes the groups that the traced rank is in, and no others: there may be thousands."""

    def __init__(self) -> None:
        super().__init__(META)

    def _make(self, ranks: tuple[int, ...], me: int, *, second: bool) -> Group | None:
        return super()._make(ranks, me, second=second) if me in ranks else None


class _AnyText:
    """Samples of the right shape."""

    end_of_document = 0

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len

    def batch(self, first: int, count: int) -> NDArray[np.int64]:
        """So many samples and their next token."""
        return np.zeros((count, self._seq_len + 1), dtype=np.int64)


def _shapes(name: str, spec: WeightSpec) -> Tensor:
    return torch.empty(spec.shape, device=META)


@contextlib.contextmanager
def evenly_loaded() -> Iterator[None]:
    """Send each expert as many tokens: shapes do not say which are chosen. Ranks still tell each other how many."""
    counted = dispatch.rows_sent

    def even(chosen: Tensor, count: int, ep: Group, etp: Group) -> tuple[Tensor, Tensor]:
        counted(chosen, count, ep, etp)
        return _even_rows(chosen, count, ep, etp)

    try:
        dispatch.rows_sent = even
        yield
    finally:
        dispatch.rows_sent = counted


@contextlib.contextmanager
def host_is_elsewhere() -> Iterator[None]:
    """Let what lies in the host's memory be shapes alone, which no trace counts."""
    there, back = offload.to_host, offload.to_device
    try:
        offload.to_host = _described  # type: ignore[assignment]
        offload.to_device = _made  # type: ignore[assignment]
        yield
    finally:
        offload.to_host, offload.to_device = there, back


def _described(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _made(described: tuple[torch.Size, torch.dtype]) -> Tensor:
    shape, dtype = described
    return torch.empty(shape, dtype=dtype, device=META)


def _even_rows(chosen: Tensor, count: int, ep: Group, etp: Group) -> tuple[Tensor, Tensor]:
    """What `dispatch.rows_sent` counts where all experts are chosen as often."""
    rows = torch.arange(count + 1) * len(chosen) // count
    by_source = rows.diff().view(1, ep.size, -1).repeat(ep.size, 1, 1)
    return by_source, by_source[None, :, ep.index].repeat(etp.size, 1, 1)


class _Repeats:
    """Adds to a trace what a shortened list of actions leaves out, which is what it does from `begin` to `end`."""

    def __init__(self, trace: Trace, of: Shortened) -> None:
        self._trace, self._of = trace, of
        self._done = 0
        self._at_begin = trace.so_far()

    def after(self, action: Action) -> None:
        """An action of the rank is over."""
        self._done += 1
        if self._done == self._of.begin:
            self._at_begin = self._trace.so_far()
        if self._done == self._of.end:
            self._trace.repeat_since(self._at_begin, self._of.more)


def _shortened(job: TrainJob, mesh: Mesh) -> tuple[TrainJob, Shortened]:
    """The job with a steady state as short as it can be, if replicas are alike; and what of a rank's actions recurs."""
    layout, batch = job.layout, job.workload.global_batch
    micro_batches = layout.samples_of(mesh.dp.index, batch)[1] // layout.mbs
    if layout.replica_batches:
        return job, Shortened(micro_batches, 0, 0, 0)
    stages = layout.pp * layout.vpp
    few = shortened(layout.schedule, mesh.pp.index, layout.pp, stages, micro_batches)
    fewer = {"global_batch": few.micro_batches * layout.mbs * layout.dp}
    return job.model_copy(update={"workload": job.workload.model_copy(update=fewer)}), few


def trace_rank(job: TrainJob, rank: int) -> TracedRank:
    """Build one rank and trace its first step.

    Token numbers of micro-batches that are not traced, 8 bytes each, are not counted.
    """
    begin = time.perf_counter()
    dist.init_process_group(BACKENDS, store=FakeStore(), rank=rank, world_size=job.layout.devices)
    try:
        mesh = build_mesh(job.layout, rank, range(job.layout.devices), _OwnGroups())
        assert mesh is not None, "every rank of the world is in the layout"
        trace = Trace(_names(mesh, "dp", "pp", "cp", "tp"), _names(mesh, "cp", "etp", "ep"))
        sampler = cast(Sampler, _AnyText(job.workload.seq_len))
        with as_on_cuda(), evenly_loaded(), host_is_elsewhere():
            few_job, few = _shortened(job, mesh)
            repeats = _Repeats(trace, few)
            trainer = Trainer(few_job, mesh, sampler, META, _shapes, repeats.after)
            for what, tensor in _held(trainer):
                trace.watch(tensor, what)
            with trace:
                trainer.forward_backward()
                trainer.optimizer.step(learning_rate=1.0, grad_norm=2.0)
                if trainer.outer is not None:
                    trainer.outer.agree()
                trainer.data_parallel.publish()
    finally:
        dist.destroy_process_group()
    collectives = tuple(
        TracedCollective(axis=axis, kind=kind, count=sent.count, size=sent.size)
        for (axis, kind), sent in sorted(trace.sent.items())
    )
    return TracedRank(
        rank=rank,
        stage=mesh.pp.index,
        layers=len(trainer.stage.layers),
        parameters=trainer.flat.parameters,
        memory=trace.held.at_peak,
        operations=trace.operations,
        collectives=collectives,
        seconds=time.perf_counter() - begin,
    )


def _names(mesh: Mesh, *axes: str) -> dict[str, str]:
    """The axis that each of a rank's process groups is along; of several with the same ranks the last of `axes`.

    Ranks that hold the same weights agree along `dp`, be they parts of the replicas or share sequences besides; where
    they share sequences alone, along `cp`.
    """
    agreeing = [("dp", group) for holders in mesh.holders.values() for group in (holders.sharers, holders.copies)]
    experts, along = ([(axis, mesh.along[axis]) for axis in some] for some in (("ep", "etp"), axes))
    groups = [("world", mesh.world), ("tied", mesh.tied), *experts, *agreeing, *along, ("pp", mesh.pp_returning)]
    return {group.handle.group_name: axis for axis, group in groups if group.handle is not None}


def _held(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """What a rank holds all the time, by part."""
    for unit in trainer.flat.units:
        yield "weights", unit.weights
        yield "gradients", unit.grads
    # gradients and master weights that are views of the units' are theirs
    for grads in trainer.flat.grads:
        yield "gradients", grads
    for master in trainer.flat.master:
        yield "weights" if trainer.flat.master_is_weights else "optimizer", master
    for tensors in trainer.states.values():
        for tensor in tensors:
            yield "optimizer", tensor


def dry_run(job: DryRunJob) -> None:
    """Trace the ranks one after the other."""
    for rank in job.ranks:
        print(trace_rank(job.job, rank).model_dump_json(), flush=True)


if __name__ == "__main__":
    sys.exit(run_job(DryRunJob, dry_run, sys.argv[1:]))
