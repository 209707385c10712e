"""One trial: a layout run once, for real, and the row that comes of it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimaran.bench.launch.contract import Launch, Launcher, Loss, TrialRefusedError
from trimaran.bench.launch.network.shaped_launcher import network_note, network_variant
from trimaran.bench.trial.circumstances import Circumstances
from trimaran.bench.trial.machine import libraries
from trimaran.bench.trial.trial_figures import first_timed_round, median_and_spread, read_result
from trimaran.bench.watch.evidence import collect
from trimaran.bench.watch.limits import Limits
from trimaran.bench.watch.verdict import Verdict, not_loaded, verdict
from trimaran.bench.watch.watch import STACKS_WITHIN_S, watch
from trimaran.files.catalogue import write_atomically
from trimaran.files.row_nouns import run_cells
from trimaran.files.user_file import from_home
from trimaran.layout.flops import OWN_FORMULA, tflops_per_device
from trimaran.layout.layout import Layout, resolve_split
from trimaran.layout.places import nodes_of, peak_tflops, places
from trimaran.layout.rules import check_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.columns import Status
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.variant import PLAIN, Variant
from trimaran.protocol.files import RunFile
from trimaran.protocol.host import Work
from trimaran.protocol.job import TrainJob
from trimaran.protocol.programs import WORKER
from trimaran.protocol.result import RunResult
from trimaran.recipe.data_settings import is_megatron
from trimaran.recipe.recipe import Recipe
from trimaran.store import trial_key

UNSTORED = "unstored"
# What is left of a run whose node or launcher was lost ends within so many seconds.
_ENDED_WITHIN_S = 10.0
# What keeps a folder from being removed while it writes there: a file that has come, or has another name by now, and on
# NFS one that is still open.
_WRITTEN_TO = (errno.ENOTEMPTY, errno.ENOENT, errno.EBUSY)


@dataclass(frozen=True)
class Trial:
    """A layout of a recipe on a cluster under a variant, ready to run."""

    key: str
    recipe: Recipe
    cluster: Cluster
    job: TrainJob
    variant: Variant = PLAIN

    @property
    def layout(self) -> Layout:
        """The layout, its stage split resolved where there is more than one stage."""
        return self.job.layout

    @property
    def variant_text(self) -> str:
        """The row's variant column: what ran beside the layout, the nodes' software and the network too."""
        return ";".join(filter(None, (self.recipe.variant_text(self.variant), network_variant(self.cluster.shaped))))


def prepare_trial(
    recipe: Recipe,
    cluster: Cluster,
    layout: Layout,
    *,
    data_dir: Path,
    work_dir: Path,
    variant: Variant = PLAIN,
) -> Trial:
    """The trial of one layout. Raises TrimaranError where the layout breaks a rule or the variant cannot be had."""
    check_layout(layout, recipe.workload, cluster, recipe.stack)
    _check_rounds(layout, recipe)
    if variant.python is not None:
        libraries(variant.python)  # an interpreter that cannot serve is refused before anything runs
    split = resolve_split(layout, recipe.workload, recipe.stack)
    if len(split) > 1:
        layout = layout.model_copy(update={"stage_split": split})
    key = trial_key(
        recipe.workload,
        layout,
        recipe.stack,
        cluster,
        stage_split=split,
        steps=recipe.sweep.steps,
        warmup_steps=recipe.sweep.warmup_steps,
        document_mask=recipe.train.document_mask,
        variant=recipe.variant_text(variant),
    )
    job = TrainJob(
        workload=recipe.workload,
        layout=layout,
        stage_split=split,
        train=recipe.train,
        data_dir=str(data_dir.resolve()),
        out_dir=str(work_dir.resolve() / f"{layout.label()[:80]}-{key[:8]}"),
        steps=recipe.sweep.steps,
        device="cuda" if cluster.device.kind == "gpu" else "cpu",
        threads_per_rank=variant.threads_per_rank or _cores_per_rank(cluster),
        peak_tflops=peak_tflops(layout, cluster),
    )
    return Trial(key=key, recipe=recipe, cluster=cluster, job=job, variant=variant)


def _check_rounds(layout: Layout, recipe: Recipe) -> None:
    """Raise TrimaranError where a trial ends before a timed round of local steps does."""
    needed = first_timed_round(recipe.sweep.warmup_steps, layout.local_steps) + layout.local_steps
    if layout.local_steps and recipe.sweep.steps < needed:
        raise TrimaranError(
            f"layout {layout}: sweep.steps {recipe.sweep.steps} hold no round of {layout.local_steps} local steps "
            f"after {recipe.sweep.warmup_steps} to warm up: raise steps to {needed}"
        )


def _cores_per_rank(cluster: Cluster) -> int:
    return max(1, cluster.device.cores)


def run_trial(
    trial: Trial,
    launcher: Launcher,
    limits: Limits,
    *,
    on_step: Callable[[int], None] = lambda step: None,
    worker: tuple[str, ...] = WORKER,
) -> Measurement:
    """Run the trial's ranks to whatever end and return the row; failures are rows too.

    `worker` is the command of a rank, to which the job file's name is added; a variant may put another
    interpreter in its first place. A trial whose ranks were lost, by no fault of its own, is run again as often as
    the launcher allows. Raises TrimaranError where nothing could be started (no room for its files, no such
    interpreter).
    """
    for _ in range(launcher.restarts):
        run = run_once(trial, launcher, limits, on_step=on_step, worker=worker)
        if run.loss is None or not run.loss.again:
            return run.row
    return run_once(trial, launcher, limits, on_step=on_step, worker=worker).row


def finished_before(trial: Trial) -> Measurement | None:
    """The row of a run of this very trial that made all its steps and was never stored, as after a full disk.

    A trial's folder holds the file UNSTORED from its beginning until whoever ran it calls `stored`.
    """
    out_dir = Path(trial.job.out_dir)
    try:
        stated = trial.job.model_dump_json(indent=1)
        same = (out_dir / UNSTORED).exists() and RunFile.JOB.of(out_dir).read_text("utf-8") == stated
    except OSError:
        return None
    if not same or out_dir.is_symlink() or not_loaded(out_dir, trial.layout.devices):
        return None  # what made its steps without a library of its variant is a failure, as it was then
    return finished_row(trial)


def finished_row(trial: Trial) -> Measurement | None:
    """The row of what the trial's folder holds the result of; None where that is not of all its steps.

    It states the circumstances of the run, not those in which its row is made.
    """
    result = read_result(RunFile.RESULT.of(trial.job.out_dir), trial.job.steps)
    if isinstance(result, str):
        return None
    surrounds = Circumstances.noted(Path(trial.job.out_dir)) or Circumstances.now(trial.recipe, trial.variant)
    return _row(trial, surrounds, "ok", result, None, None)


def stored(trial: Trial) -> None:
    """Note in the trial's folder that its row is in a store."""
    (Path(trial.job.out_dir) / UNSTORED).unlink(missing_ok=True)


@dataclass(frozen=True)
class Run:
    """One start of a trial's ranks: its row, how it was judged, and why the ranks were lost, where they were.

    `node` is the machine of the rank that its end is laid to, or the machines that were lost. `unnoticed_s` is for how
    long such an end may go unnoticed, by the limits that held.
    """

    row: Measurement
    verdict: Verdict
    loss: Loss | None = None
    node: str | None = None
    unnoticed_s: float = 0.0


def _read_by_ranks(trial: Trial) -> tuple[Path, ...]:
    """What ranks read: tokens, those of Megatron-LM where they lie, and weights to begin with.

    The last are links into another folder where Hugging Face's cache has fetched them. A training that goes on from a
    checkpoint does without them, and they may be gone.
    """
    texts = (path for text in trial.recipe.data.texts for path in text.paths if is_megatron(path))
    tokens = dict.fromkeys(from_home(path).with_suffix(".bin").resolve() for path in texts)
    begins = trial.job.train.init_from
    weights = [Path(begins)] if begins and Path(begins).is_dir() else []
    links = [file for folder in weights for file in sorted(folder.iterdir()) if file.is_symlink()]
    behind = dict.fromkeys(Path(os.path.normpath(file.parent / file.readlink())).parent for file in links)
    return tuple(dict.fromkeys((Path(trial.job.data_dir), *tokens, *weights, *behind)))


def run_once(
    trial: Trial,
    launcher: Launcher,
    limits: Limits,
    *,
    on_step: Callable[[int], None] = lambda step: None,
    worker: tuple[str, ...] = WORKER,
) -> Run:
    """Start the trial's ranks once and see them through to whatever end. Raises TrimaranError as `run_trial` does."""
    out_dir = Path(trial.job.out_dir)
    _fresh_folder(out_dir)
    job_file = RunFile.JOB.of(out_dir)
    write_atomically(job_file, trial.job.model_dump_json(indent=1))
    surrounds = Circumstances.now(trial.recipe, trial.variant)
    surrounds.note(out_dir)
    hosts = trial.cluster.of_hosts
    launch = Launch(
        command=(trial.variant.python or worker[0], *worker[1:], str(job_file)),
        ranks=trial.layout.devices,
        out_dir=out_dir,
        threads_per_rank=trial.job.threads_per_rank,
        environment=trial.variant.environment,
        ranks_per_node=hosts.devices_per_node,
        places=places(trial.layout, hosts) if trial.layout.placed or launcher.tells_groups else (),
        memory_gib=limits.memory_gib,
        pin_cpus=trial.variant.pin_cpus,
        clock_ghz=trial.variant.clock_ghz,
        gpus=trial.job.device == "cuda",
        reads=_read_by_ranks(trial),
    )
    try:
        if not launcher.tells_groups:
            _require_alike(trial)
        ranks = launcher.start(launch)
    except TrialRefusedError as refusal:
        return not_started(trial, refusal, refused=True)
    started = time.monotonic()
    # of ranks that others have started, or elsewhere, this machine's work says nothing
    before = Work.so_far() if ranks.process_ids() else None
    ending = watch(ranks, launch, limits, on_step)
    wall_s = time.monotonic() - started
    after = Work.so_far() if before else None
    others_share = before.others_share(after) if before and after else None
    judged = verdict(ending, launch)
    result: RunResult | str = judged.sentence
    if judged.status == "ok":
        result = read_result(RunFile.RESULT.of(out_dir), trial.job.steps)
        if isinstance(result, str):
            judged = Verdict("fail", result)
    evidence = None
    if judged.status != "ok":
        evidence = collect(judged.sentence, out_dir, ending.exit_codes, ending.silence_s, ending.remarks)
    row = _row(trial, surrounds, judged.status, result, evidence, wall_s)
    lost = ending.loss.nodes if ending.loss else ()
    node = ",".join(lost) or (None if judged.rank is None else ranks.node_of(judged.rank))
    unnoticed_s = _unnoticed_s(judged.status, ending.loss, limits)
    return Run(row.model_copy(update={"others_share": others_share}), judged, ending.loss, node, unnoticed_s)


def _unnoticed_s(status: Status, loss: Loss | None, limits: Limits) -> float:
    """How long it may take until all ranks are ended: by silence and stacks, or by the time to follow one that ended.

    Where some left no word, that was waited for besides.
    """
    if status == "hang":
        return limits.hang_s + STACKS_WITHIN_S
    return limits.peers_s + (loss.silence_s if loss else 0.0)


def not_started(trial: Trial, why: TrimaranError, *, refused: bool = False) -> Run:
    """The run of a trial whose ranks could not be started."""
    surrounds = Circumstances.now(trial.recipe, trial.variant)
    row = _row(trial, surrounds, "not_run", str(why), str(why), 0.0)
    return Run(row, Verdict("not_run", str(why), refused=refused))


def _require_alike(trial: Trial) -> None:
    """Raise TrialRefusedError where ranks are placed among nodes that whoever starts them cannot tell apart."""
    if trial.layout.placed and len(trial.cluster.groups) > 1:
        names = ", ".join(group.name for group in trial.cluster.groups)
        raise TrialRefusedError(
            f"the layout's ranks are placed among groups {names} of {trial.cluster.name or 'the cluster'}, and nothing "
            f"tells which node is of which: name them in [sweep.slurm.groups], or measure on a cluster of one group or "
            f"on a network shaped like it"
        )


def _row(
    trial: Trial,
    surrounds: Circumstances,
    status: Status,
    result: RunResult | str,
    evidence: str | None,
    wall_s: float | None,
) -> Measurement:
    measured = _measured(trial, result)
    if note := network_note(Path(trial.job.out_dir)):
        measured["notes"] = "; ".join(filter(None, (str(measured.get("notes") or ""), note)))
    return Measurement.model_validate(
        {**_stated(trial), **measured, **surrounds.model_dump()}
        | {"status": status, "evidence": evidence, "wall_s": wall_s}
    )


def _stated(trial: Trial) -> dict[str, object]:
    """The columns that were known before the run."""
    layout, cluster, workload = trial.layout, trial.cluster.of_hosts, trial.recipe.workload
    per_node = cluster.devices_per_node  # by which placed ranks number their devices, also where they use fewer
    return {
        "cluster": cluster.name or None,
        "stack": trial.recipe.stack.name or None,
        "hardware": cluster.device.name or None,
        "nodes": nodes_of(layout, cluster),
        "devices_per_node": per_node if layout.placed else min(layout.devices, per_node),
        "devices": layout.devices,
        **run_cells(workload, layout),
        "flops_formula": OWN_FORMULA,
        "network_delay_ms": cluster.inter.latency_us * 1e-3 if cluster.shaped else None,
        "network_gbps": cluster.inter.bandwidth_gbps if cluster.shaped else None,
        "variant": trial.variant_text or None,
        "trial_key": trial.key,
        "recipe": trial.recipe.name,
        "seed": trial.recipe.train.seed,
    }


def _measured(trial: Trial, result: RunResult | str) -> dict[str, object]:
    """The columns that a finished run fills."""
    if isinstance(result, str):
        return {}
    workload, layout = trial.recipe.workload, trial.layout
    seconds, spread = median_and_spread(result.sec_per_it, trial.recipe.sweep.warmup_steps, layout.local_steps)
    losses = result.finite_losses
    diverged = len(losses) < len(result.losses)
    return {
        "sec_per_it": seconds,
        "sec_per_it_spread": spread,
        "tflops": tflops_per_device(workload, layout.tp, layout.devices, seconds, OWN_FORMULA),
        "tokens_per_s_per_gpu": workload.tokens_per_step / seconds / layout.devices,
        "mem_gib": max(result.mem_gib_per_rank),
        "mem_gib_per_rank": result.mem_gib_per_rank,
        "step_times_s": result.sec_per_it,
        "losses": losses,
        "notes": f"the loss is not finite from step {len(losses) + 1} on" if diverged else None,
    }


def _fresh_folder(out_dir: Path) -> None:
    """An empty folder in place of what an interrupted run of the same trial may have left.

    What is left of that run may write a last file as it ends.
    """
    deadline = time.monotonic() + _ENDED_WITHIN_S
    try:
        if out_dir.is_symlink():
            out_dir.unlink()
        while out_dir.exists():
            try:
                shutil.rmtree(out_dir)
            except OSError as error:
                if error.errno not in _WRITTEN_TO or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        out_dir.mkdir(parents=True)
        (out_dir / UNSTORED).touch()
    except OSError as error:
        raise TrimaranError(
            f"trial folder {out_dir} cannot be made: {error.strerror or error}; free space, check permissions, or "
            f"choose another --runs"
        ) from None
