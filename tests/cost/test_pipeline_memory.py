"""What pipelines hold besides the layers' activations: what they send and receive, both ends, and gradients to sum."""

from __future__ import annotations

import numpy as np
import pytest

from trimaran.api import workload_of
from trimaran.cost.calibration import prior
from trimaran.cost.case import Case
from trimaran.cost.estimate import estimate, estimate_many
from trimaran.cost.estimates import MemoryParts
from trimaran.cost.grid import LayoutGrid
from trimaran.cost.memory.stage import in_flight
from trimaran.files.catalogue import load_cluster, load_model, load_stack
from trimaran.files.row_nouns import nouns_of
from trimaran.files.row_table import packaged_table
from trimaran.layout.notation import parse_layout
from trimaran.layout.schedule import actions
from trimaran.nouns.workload import Workload

GIB = 2.0**30
A100 = load_cluster("dgx-a100-80gb")
GPT = Workload(model=load_model("gpt3-13b"), seq_len=2048, global_batch=256)
HIDDEN = GPT.seq_len * GPT.model.hidden * 2 / GIB  # of one sequence in 16 bit


def held(stack: str, label: str, workload: Workload = GPT, **facts: object) -> tuple[MemoryParts, ...]:
    """Memory of each stage in GiB, activations as counted."""
    case = Case.of(workload, A100, load_stack(stack).model_copy(update=facts))
    plain = prior(A100, case.stack).model_copy(update={"activation_scale": 1.0})
    return estimate(Case.of(workload, A100, case.stack, plain), parse_layout(label)).memory


def more(stack: str, label: str, **without: object) -> list[float]:
    """By how much each stage's activations shrink without some facts, in hidden states of one sequence."""
    pairs = zip(held(stack, label), held(stack, label, **without), strict=True)
    return [(one.activations - other.activations) / HIDDEN for one, other in pairs]


def test_what_a_stage_has_sent_stays_once_for_each_micro_batch_in_flight() -> None:
    found = more("megatron", "dp1,tp1,pp4,mbs1,recompute-full,fp16", keeps_sent=False)
    assert found == pytest.approx([4, 3, 2, 0])  # the last stage sends nothing
    assert more("megatron", "dp1,tp2,pp4,mbs2,sp,recompute-full,fp16", keeps_sent=False) == pytest.approx([4, 3, 2, 0])
    # two chunks a rank, of which the last rank's second has the head
    chunks = more("megatron", "dp1,tp1,pp4,vpp2,mbs1,recompute-full,fp16", keeps_sent=False)
    assert chunks == pytest.approx([11, 9, 7, 2.5])


def test_deepspeed_keeps_parts_of_what_tp_ranks_send_and_copies_of_what_comes_whole() -> None:
    alone = "dp1,tp1,pp4,mbs1,recompute-full,fp16"
    assert more("megatron-deepspeed", alone, keeps_sent=False) == pytest.approx([4, 3, 2, 0])
    assert more("megatron-deepspeed", alone, clones_received=False) == pytest.approx([0, 3, 2, 1])
    shared = "dp1,tp4,pp4,mbs1,recompute-full,fp16"
    assert more("megatron-deepspeed", shared, keeps_sent=False) == pytest.approx([1, 0.75, 0.5, 0])


def test_torch_s_pipelines_have_places_for_what_they_receive_of_all_micro_batches() -> None:
    """Of 8 micro-batches a gradient each but on the last stage, and inputs of those not in flight but on the first."""
    workload = workload_of("llama3.1-8b", 8)
    hidden = workload.seq_len * workload.model.hidden * 2 / GIB
    label = "dp1,tp1,pp4,mbs1,recompute-full,bf16"
    ready, later = (held("torchtitan", label, workload, receives_into_all=at_once) for at_once in (True, False))
    found = [(one.activations - other.activations) / hidden for one, other in zip(ready, later, strict=True)]
    assert found == pytest.approx([8, 8 + 5, 8 + 6, 7])


def test_oneflow_s_pipelines_have_places_for_twice_as_many_micro_batches_as_stages() -> None:
    """Eight of each layer's input and the one that is made, on all stages but the last, however few micro-batches.

    A forward has memory of its own there: as much as a layer at work takes.
    """
    label = "dp1,tp2,pp4,mbs1,recompute-full,fp16"
    few = GPT.model_copy(update={"global_batch": 2})
    layers = GPT.model.layers / 4
    at_work = more("oneflow", label, stage_places=0)[2] - (9 - 2) * layers
    assert at_work > 1
    counted = [(9 - in_flight) * layers + at_work for in_flight in (4, 3, 2)]
    masks = (9 - 4) / 2  # of the embedding's dropout, a byte an element
    assert more("oneflow", label, stage_places=0) == pytest.approx([counted[0] + masks, *counted[1:], 0])
    ahead = zip(held("oneflow", label, few), held("oneflow", label), strict=True)
    assert [few_batches.activations for few_batches, _ in ahead] == pytest.approx(
        [stage.activations for stage in held("oneflow", label)]
    )


def test_oneflow_s_pipelines_under_tp_hold_what_was_measured_before_anything_is_fitted() -> None:
    rows = [row for row in packaged_table("dlperf_v100").measurements if row.stack == "oneflow" and row.mem_gib]
    piped = [row for row in rows if (row.pp or 1) > 1 and (row.tp or 1) > 1]
    assert len(piped) == 3
    for row in piped:
        nouns = nouns_of(row)
        case = Case.of(nouns.workload, nouns.cluster, nouns.stack, prior(nouns.cluster, nouns.stack))
        assert estimate(case, nouns.layout).reported_mem_gib == pytest.approx(row.mem_gib, rel=0.05)


@pytest.mark.parametrize("stack", ["megatron", "torchtitan", "megatron-deepspeed"])
@pytest.mark.parametrize("label", ["dp1,tp2,pp2,vpp2,mbs1", "dp1,tp1,pp2,mbs1,recompute-full"])
def test_of_two_stages_a_search_counts_no_third_between_them(stack: str, label: str) -> None:
    workload = workload_of("llama3.1-8b", 64)
    classifier = workload.model_copy(update={"model": workload.model.model_copy(update={"head": "classifier"})})
    case = Case.of(classifier, load_cluster("jean-zay-a100-80gb"), load_stack(stack))
    layout = parse_layout(label)
    searched = estimate_many(case, LayoutGrid.from_layouts([layout], case.workload, case.stack))
    assert searched.mem_gib[0] == pytest.approx(estimate(case, layout).mem_gib, rel=1e-12)


def test_megatron_core_and_this_engine_keep_nothing_of_what_they_send() -> None:
    for stack in ("megatron-core", "trimaran"):
        known = load_stack(stack)
        assert not known.keeps_sent and not known.clones_received and not known.keeps_pipeline_logits


def test_the_embedding_s_dropout_mask_and_norm_stay_whatever_is_recomputed() -> None:
    normed = GPT.model_copy(update={"model": GPT.model.model_copy(update={"embedding_norm": True})})
    label = "dp1,tp1,pp4,mbs1,recompute-full,fp16"
    plain, with_norm = held("megatron", label), held("megatron", label, normed)
    assert (with_norm[0].activations - plain[0].activations) / HIDDEN == pytest.approx(4.0)
    assert with_norm[1].activations == pytest.approx(plain[1].activations)


def test_the_last_stage_of_an_earlier_torchtitan_keeps_the_logits_of_all_micro_batches() -> None:
    workload = workload_of("llama3.1-8b", 8)
    label = "dp1,tp1,pp4,mbs1,recompute-full,bf16"
    earlier, freed = (held("torchtitan", label, workload, keeps_pipeline_logits=kept) for kept in (True, False))
    logits = workload.seq_len * workload.model.vocab * 2 / GIB
    assert earlier[-1].logits - freed[-1].logits == pytest.approx(7 * logits, rel=1e-3)
    assert earlier[0] == freed[0]
    assert not load_stack("torchtitan-0.2").keeps_pipeline_logits


@pytest.mark.parametrize(
    ("stack", "bytes_kept", "states"),
    [("torchtitan", 2 + 4, 0), ("torchtitan-0.2", 4, 0), ("torchtitan-0.2-compiled", 2, 0), ("trimaran", 0, 2)],
)
def test_gpipe_keeps_what_the_losses_of_all_micro_batches_need(stack: str, bytes_kept: int, states: int) -> None:
    """torch 2.13, ScheduleGPipe: losses are made with the forwards; fp32 ones keep a log-softmax, fused ones logits.

    Ours has made its gradients: that of the hidden state stays, beside the one that the last norm read.
    """
    workload = workload_of("llama3.1-8b", 8)
    label = "dp1,tp1,pp4,mbs1,recompute-full,bf16"
    at_once, one = (
        held(stack, label + ",gpipe", workload)[-1],
        held(stack, label, workload, keeps_pipeline_logits=False)[-1],
    )
    logits = workload.seq_len * workload.model.vocab / GIB
    kept = bytes_kept * logits + states * workload.seq_len * workload.model.hidden * 2 / GIB
    assert at_once.logits - one.logits == pytest.approx(7 * kept, rel=1e-3)


def test_logits_that_stay_are_there_while_a_layer_is_made_again() -> None:
    """Of a vocabulary so small that a layer made again is larger than the logits of all micro-batches."""
    small = workload_of("llama3.1-8b", 8)
    small = small.model_copy(update={"model": small.model.model_copy(update={"vocab": 1280})})
    label = "dp1,tp1,pp4,mbs1,recompute-full,bf16"
    earlier, freed = (held("torchtitan", label, small, keeps_pipeline_logits=kept)[-1] for kept in (True, False))
    assert earlier.activations - freed.activations == pytest.approx(0.33 * (earlier.logits - freed.logits))


def test_flattened_gradients_count_where_activations_leave_no_room_for_them() -> None:
    kept = {"flattened_gradients": ()}
    small, large = "dp4,tp1,pp1,mbs1,recompute-full,fp32", "dp4,tp1,pp1,mbs8,fp32"
    one, other = held("megatron", small)[0], held("megatron", small, **kept)[0]
    copies = one.optimizer - other.optimizer
    assert copies == pytest.approx(one.gradients - one.activations - one.logits)
    assert held("megatron", large)[0] == held("megatron", large, **kept)[0]


def test_the_30b_of_document_001_holds_what_was_measured_before_anything_is_fitted() -> None:
    """The node's whole use: rows of TP 4 and 8 to 10%, and that of TP 1 wants more than it had when it ran out."""
    rows = [
        row
        for row in packaged_table("seeds").measurements
        if row.source.startswith("001") and row.table == "T1" and row.recompute == "full"
    ]
    assert [row.tp for row in rows] == [1, 4, 8, 4]
    for row in rows:
        nouns = nouns_of(row)
        found = estimate(
            Case.of(nouns.workload, nouns.cluster, nouns.stack, prior(nouns.cluster, nouns.stack)), nouns.layout
        )
        if row.status == "ok":
            assert found.reported_mem_gib == pytest.approx(row.mem_gib, rel=0.1)
        else:
            assert row.status == "oom" and found.reported_mem_gib > (row.mem_gib or 0.0)


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize(
    ("p", "split"),
    [(3, "2-2-1-1-1-1"), (4, "2-3-3-3-3-3-3-1"), (2, "3-3-3-2-2-2"), (4, "3x25-2-2-1"), (2, "1-2-2-1"), (3, "2x6")],
)
def test_an_interleaved_rank_keeps_most_where_a_fuller_chunk_goes_forward_as_another_goes_back(
    p: int, split: str, micro_batches: int
) -> None:
    """As many times as many micro-batches as ranks, played action by action."""
    layers = parse_layout(f"pp{p},split{split}").stage_split
    assert layers is not None
    model = GPT.model.model_copy(update={"layers": sum(layers)})
    workload = GPT.model_copy(update={"model": model, "global_batch": p * micro_batches})
    layout = parse_layout(f"pp{p},vpp{len(layers) // p},mbs1,split{split}")
    grid = LayoutGrid.from_layouts([layout], workload, load_stack("trimaran"))
    for rank in range(p):
        kept = [0]
        for action in actions("interleaved", rank, p, len(layers), p * micro_batches):
            kept.append(kept[-1] + layers[action.stage] * {"forward": 1, "backward": -1}[action.kind])
        counted = in_flight(grid, np.array([float(rank)]))[0] * sum(layers[rank::p])
        assert counted == pytest.approx(max(kept)), rank
