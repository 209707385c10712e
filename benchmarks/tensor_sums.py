"""What sums over TP in wider numbers cost a bf16 step, and what they bring.

    python benchmarks/tensor_sums.py

Two ranks train the workload of benchmarks/training.py (8 layers, hidden 384, 8 sequences of 256 tokens) with TP 2, one
thread each, through shared memory and through gloo's sockets. `bf16` is the trainer as it is: each rank rounds its part
of a sum to bf16. `summed in fp32` sends these parts in fp32, and `made and summed in fp32` makes them by fp32 products
of the same bf16 factors, so that nothing is rounded before the sum. Seconds are the median of steps in turns. The
distance is how far losses of 12 steps lie from the nearest of one process's under micro-batches of 8, 4, 2 and 1, over
what these differ by themselves. Writes benchmarks/results/tensor_sums.md.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from _others import others_since
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.workload import Workload
from trimaran.protocol.host import Work, processor_name
from trimaran.protocol.job import DataJob, TrainJob
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.comm.group import Group, GroupFactory
from trimaran.train.comm.mesh import build_mesh
from trimaran.train.engine.trainer import Trainer
from trimaran.train.model.autograd import apply
from trimaran.train.model.product import add_product, linear, product
from trimaran.train.model.tensor_parallel import ColumnLinear, RowLinear
from trimaran.train.model.weight import Weight
from trimaran.train.programs.tokenise import prepare
from trimaran.train.run.first_weights import first_weights
from trimaran.train.run.samples import open_data

RESULTS = Path(__file__).parent / "results" / "tensor_sums.md"
WORKLOAD = Workload(
    model=Model(layers=8, hidden=384, heads=6, vocab=8192, max_positions=256, activation="gelu"),
    seq_len=256,
    global_batch=8,
)
WAYS = ("bf16", "summed in fp32", "made and summed in fp32")
TURNS, STEPS = 15, 12
ALONE = ("mbs8,bf16", "mbs4,bf16", "mbs2,bf16", "mbs1,bf16")


class _WideRow(torch.autograd.Function):
    """A row-cut product whose part of the sum is made in fp32, summed, and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, group: Group) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        y = linear(x.float(), weight.float())
        group.all_reduce(y)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        width = x.shape[-1]
        add_product(ctx.weight.main_grad, dy.reshape(-1, dy.shape[-1]), x.reshape(-1, width))
        return product(dy, ctx.weight), None, None


class _WideColumn(torch.autograd.Function):
    """A column-cut product whose input's gradient is made in fp32, summed, and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Weight, group: Group) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.group = weight, bias, group
        return linear(x, weight.view(-1, x.shape[-1]), bias.view(-1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        width, rows = x.shape[-1], dy.reshape(-1, dy.shape[-1])
        add_product(ctx.weight.main_grad.view(-1, width), rows, x.reshape(-1, width))
        ctx.bias.main_grad.view(-1).add_(rows.sum(0))
        dx = product(dy.float(), ctx.weight.float().view(-1, width))
        ctx.group.all_reduce(dx)
        return dx.to(dy.dtype), None, None, None


def _row(layer: RowLinear, x: Tensor) -> Tensor:
    y = apply(_WideRow, x, layer.weight, layer.group)
    return y if layer.bias is None else y + layer.bias


def _column(layer: ColumnLinear, x: Tensor) -> Tensor:
    return apply(_WideColumn, x, layer.weight, layer.bias, layer.group)


def _summed(plain: Any, group: Group, tensor: Tensor) -> None:
    if tensor.dtype != torch.bfloat16:
        plain(group, tensor)
        return
    wide = tensor.float()
    plain(group, wide)
    tensor.copy_(wide)


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    """Sum over TP so."""
    plain = Group.all_reduce
    with contextlib.ExitStack() as stack:
        if name == "summed in fp32":

            def summed(group: Group, tensor: Tensor) -> None:
                _summed(plain, group, tensor)

            stack.enter_context(mock.patch.object(Group, "all_reduce", summed))
        elif name == "made and summed in fp32":
            stack.enter_context(mock.patch.object(RowLinear, "forward", _row))
            stack.enter_context(mock.patch.object(ColumnLinear, "forward", _column))
        yield


def job(layout: str, data: Path) -> TrainJob:
    parsed = parse_layout(layout)
    return TrainJob(
        workload=WORKLOAD, layout=parsed, stage_split=(WORKLOAD.model.layers,), train=TrainSettings(steps=STEPS),
        data_dir=str(data), out_dir="", steps=STEPS,
    )  # fmt: skip


def trainer(asked: TrainJob, factory: GroupFactory, rank: int) -> Trainer:
    mesh = build_mesh(asked.layout, rank, range(asked.layout.devices), factory)
    assert mesh is not None
    return Trainer(asked, mesh, open_data(asked)[0], torch.device("cpu"), first_weights(asked, lambda: None))


def serve(rank: int, folder: Path, data: Path, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    # groups of what is no CPU share no memory
    for machine, device in (("shared memory", "cpu"), ("gloo's sockets", "cuda")):
        factory = GroupFactory(torch.device(device))
        of_ways = {name: trainer(job("tp2,mbs8,bf16", data), factory, rank) for name in WAYS}
        losses: dict[str, list[float]] = {name: [] for name in WAYS}
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        for turn in range(TURNS):
            for name in WAYS:
                begin = time.perf_counter()
                with way(name):
                    loss = of_ways[name].step().loss
                seconds[name].append(time.perf_counter() - begin)
                losses[name] += [loss] if turn < STEPS else []
        pipe.send((machine, {name: statistics.median(each[2:]) for name, each in seconds.items()}, losses))
    pipe.send(None)


def alone(data: Path) -> list[list[float]]:
    """Losses of one process under each micro-batch."""
    found = []
    for layout in ALONE:
        one = trainer(job(layout, data), GroupFactory(torch.device("cpu")), 0)
        found.append([one.step().loss for _ in range(STEPS)])
    return found


def main() -> None:
    torch.set_num_threads(1)
    began = Work.so_far()
    lines = ["| sums over | | seconds a step | more | distance from one process |", "| --- | --- | --: | --: | --: |"]
    with tempfile.TemporaryDirectory() as folder:
        source = DataSettings(paths=(str(Path(__file__).parents[1] / "src"),))
        data = prepare(DataJob(data=source, vocab=WORKLOAD.model.vocab, cache_dir=folder))
        expected = alone(data)
        spread = max((max(at) - min(at)) / min(at) for at in zip(*expected, strict=True))
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [context.Process(target=serve, args=(rank, Path(folder), data, pipes[rank][1])) for rank in range(2)]
        for rank in ranks:
            rank.start()
        while (told := pipes[0][0].recv()) is not None:
            machine, seconds, losses = told
            for name in WAYS:
                steps = zip(losses[name], *expected, strict=True)
                far = max(min(abs(loss - one) / one for one in at) for loss, *at in steps)
                more = seconds[name] / seconds["bf16"] - 1
                lines.append(f"| {machine} | {name} | {seconds[name]:.3f} | {more:+.1%} | {far / spread:.1f} |")
        for rank in ranks:
            rank.join()
    said = f"On {processor_name()}, PyTorch {torch.__version__}. {others_since(began)}"
    text = f"# Sums over TP in wider numbers\n\n{said}\n\n" + "\n".join(lines) + "\n"
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
