"""A dry run: one step of one rank of each kind, traced at full size without its devices, beside what is planned."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trimaran.cost.case import Case
from trimaran.cost.estimate import memory_per_stage
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.rank_work import RankWork, rank_work
from trimaran.layout.layout import Layout, resolve_split
from trimaran.layout.rules import check_layout
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.dry_run import DryRunJob, TracedRank
from trimaran.protocol.job import TrainJob
from trimaran.recipe.recipe import Recipe
from trimaran.recipe.train_settings import TrainSettings
from trimaran.study.torch_programs import run_program
from trimaran.study.workspace import Workspace

GIB, PETA, GIGA = 2.0**30, 1e15, 1e9
# How much of an all-reduce of the same bytes each kind of collective moves; what is not here moves as much. Exchanges
# of tokens count as they are.
_MOVED = {"all_gather": 0.5, "reduce_scatter": 0.5, "broadcast": 0.5, "reduce": 0.5}
_MOVED_BY_REPLICAS = {**_MOVED, "all_to_all": 0.5}

Row = dict[str, Any]


def dry_run(
    case: Case,
    train: TrainSettings,
    layout: Layout,
    rank: int | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Rows of each traced rank: what it holds, computes and sends, traced and planned.

    One rank of each kind is traced, or `rank` alone; which ones, is said, since each may take minutes. Raises
    TrimaranError where the case is none that can be traced, the layout breaks a rule or has no such rank.
    """
    refuse_untraceable(case)
    workload, stack = case.workload, case.stack
    check_layout(layout, workload, case.cluster, stack)
    if rank is not None and not 0 <= rank < layout.devices:
        raise TrimaranError(f"rank {rank} is not one of the {layout.devices} of {layout}: name one from 0 on")
    split = resolve_split(layout, workload, stack)
    a_step = workload.model_copy(update={"ramp_up": None})
    job = TrainJob(
        workload=a_step, layout=layout, stage_split=split, train=train, data_dir="", out_dir="", steps=1,
        device="cuda",
    )  # fmt: skip
    grid = LayoutGrid.from_layouts([layout], case.workload, case.stack)
    ranks = (rank,) if rank is not None else _one_of_each_kind(layout, grid, workload.model.dense_layers)
    batches = layout.micro_batches(workload.global_batch)
    say(f"tracing ranks {', '.join(map(str, ranks))} of {layout}; micro-batches of each: {batches}")
    rows = []
    for traced in _trace(DryRunJob(job=job, ranks=ranks)):
        own = layout.all_as(layout.coordinate("dp", traced.rank))
        (memory,) = memory_per_stage(case, LayoutGrid.from_layouts([own], workload, stack))
        planned = {name: getattr(memory[traced.stage], name) for name in ("weights", "gradients", "optimizer")}
        planned["activations, logits"] = memory[traced.stage].activations + memory[traced.stage].logits
        rows += list(_rows(traced, planned, rank_work(case, own, traced.stage)))
    return rows


def case_to_trace(recipe: Recipe, workspace: Workspace) -> Case:
    """The case of a recipe whose ranks are traced. Nothing is probed for it.

    Raises TrimaranError where its cluster is this machine, which was not probed, and as `refuse_untraceable`.
    """
    if recipe.cluster is None and not workspace.cluster_file.exists():
        raise TrimaranError(
            f"recipe {recipe.name}: cluster is this machine, which is not probed, and a dry run traces what GPUs hold: "
            f'name a cluster of them, as cluster = "dgx-h100", or a file that `trimaran probe` wrote on one'
        )
    case = Case.of(recipe.workload, workspace.cluster(recipe, runs_here=False), recipe.stack)
    refuse_untraceable(case)
    return case


def refuse_untraceable(case: Case) -> None:
    """Raise TrimaranError for another software than Trimaran's own trainer, and for what is no GPU."""
    cluster, framework = case.cluster, case.stack.framework
    if framework != "trimaran":
        raise TrimaranError(
            f"stack {case.stack.name} is not Trimaran's own trainer, which is what a dry run traces: choose --stack "
            f"trimaran, or do without the trace"
        )
    if cluster.device.kind != "gpu":
        raise TrimaranError(
            f"cluster {cluster.name} is of {cluster.device.kind} slots, and a dry run traces what GPUs hold: name a "
            f"cluster of GPUs, or bench the layout as it is"
        )


def _one_of_each_kind(layout: Layout, grid: LayoutGrid, dense_layers: int) -> tuple[int, ...]:
    """Ranks of the first stage, the last, and of those between the first with each number of layers of each kind.

    Of these it keeps the most micro-batches in flight; ranks that differ in TP and DP alone do the same, but
    replicas that take unlike numbers of micro-batches: of these it is one of those that take the most.
    """
    layers = grid.splits.layers(grid.split_row).sum(axis=1)[0].tolist()
    dense = grid.splits.first_in_stages(grid.split_row, dense_layers).sum(axis=1)[0].tolist()
    kinds = {
        (stage == 0, stage == layout.pp - 1, layers[stage], dense[stage]): stage for stage in reversed(range(layout.pp))
    }
    busiest = layout.replica_batches.index(max(layout.replica_batches)) if layout.replica_batches else 0
    return tuple(sorted(stage * layout.stride("pp") + busiest * layout.stride("dp") for stage in kinds.values()))


def _trace(job: DryRunJob) -> list[TracedRank]:
    with tempfile.TemporaryDirectory(prefix="trimaran-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(job.model_dump_json(), encoding="utf-8")
        told = run_program("trimaran.train.programs.dry_run", [str(path)], "train --dry-run", capture=True)
    return [TracedRank.model_validate_json(line) for line in told.splitlines()]


def _rows(traced: TracedRank, memory: dict[str, float], work: RankWork) -> Iterator[Row]:
    rank = f"{traced.rank} (stage {traced.stage}, {traced.layers} layers)"

    def row(what: str, unit: str, found: float, planned: float | None, count: int | None = None) -> Row:
        off = found / planned - 1.0 if planned else None
        return {
            "rank": rank, "what": what, "unit": unit, "traced": found, "planned": planned, "off": off, "count": count
        }  # fmt: skip

    held = {"activations, logits" if part == "activations" else part: size for part, size in traced.memory.items()}
    for part, planned in memory.items():
        yield row(part, "GiB", held.get(part, 0) / GIB, planned)
    yield row("memory at its peak", "GiB", sum(held.values()) / GIB, sum(memory.values()))
    yield row("products", "PFLOP", traced.operations / PETA, work.operations / PETA)
    for axis in dict.fromkeys([*work.sent, *(each.axis for each in traced.collectives)]):
        along = [each for each in traced.collectives if each.axis == axis]
        moves = _MOVED_BY_REPLICAS if axis == "dp" else _MOVED
        moved = sum(each.size * moves.get(each.kind, 1.0) for each in along)
        planned_bytes = work.sent.get(axis)
        yield row(
            f"sent along {axis}", "GB", moved / GIGA, None if planned_bytes is None else planned_bytes / GIGA,
            sum(each.count for each in along),
        )  # fmt: skip
