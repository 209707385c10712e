"""What this trainer trains. Whatever a job asks for beyond it is refused before any work is done."""

from __future__ import annotations

from trimaran.noun import TrimaranError
from trimaran.recipe import TrainJob


def check_supported(job: TrainJob) -> None:
    """Raise TrimaranError with one sentence for the first thing that the trainer does not do."""
    model, layout = job.workload.model, job.layout
    refusals = (
        (layout.precision == "fp16", "precision fp16 is asked for, the trainer does fp32, bf16 and bf16_pure"),
        (model.head != "vocabulary", f"head {model.head} is asked for, the trainer does vocabulary"),
        (model.dropout > 0, f"dropout {model.dropout} is asked for, the trainer does 0"),
        (job.workload.optimizer != "adam", f"optimizer {job.workload.optimizer} is asked for, the trainer does adam"),
    )
    for refused, sentence in refusals:
        if refused:
            raise TrimaranError(f"{sentence}: change it in the recipe")
    if sum(job.stage_split) != model.layers or min(job.stage_split) < 1:
        raise TrimaranError(
            f"stage_split {'-'.join(map(str, job.stage_split))} has {sum(job.stage_split)} layers, the model "
            f"{model.layers}, and each stage needs one: correct stage_split"
        )
    ramp = job.workload.ramp_up
    batches = ramp.steps(job.workload.global_batch) if ramp else (job.workload.global_batch,)
    for batch in batches:
        if batch % (layout.dp * layout.mbs):
            raise TrimaranError(
                f"global batch {batch} is not a multiple of DP {layout.dp} x micro-batch {layout.mbs} = "
                f"{layout.dp * layout.mbs}: change one of them"
            )
        if layout.schedule == "interleaved" and layout.micro_batches(batch) % layout.pp:
            raise TrimaranError(
                f"global batch {batch} makes {layout.micro_batches(batch)} micro-batches, and the interleaved "
                f"schedule needs a multiple of PP {layout.pp}: change one of them"
            )
    if layout.sequence_parallel and (layout.tp == 1 or job.workload.seq_len % layout.tp):
        raise TrimaranError(
            f"sequence parallelism is asked for with seq_len {job.workload.seq_len} and TP {layout.tp}, which has to "
            f"divide it and be 2 at least: change one of them"
        )
    for name, size in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ffn_hidden", model.ffn_hidden)):
        if size % layout.tp:
            raise TrimaranError(f"{name} {size} is not a multiple of TP {layout.tp}: choose a TP that divides it")
