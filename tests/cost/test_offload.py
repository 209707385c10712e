"""What lies in the host's memory: what leaves the device, what passes the link and what the host steps."""

from __future__ import annotations

import pytest

from trimaran.api import plan
from trimaran.cost.case import Case
from trimaran.cost.effects.offload import LINK_SHARE
from trimaran.cost.estimate import estimate
from trimaran.cost.estimates import Estimate
from trimaran.files.catalogue import catalogue_names, load_cluster, load_model, load_stack
from trimaran.layout.notation import parse_layout
from trimaran.layout.rules import violations
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.stack import Stack
from trimaran.nouns.workload import Workload

LLAMA = Workload(model=load_model("llama3-8b"), seq_len=8192, global_batch=64)
H100 = load_cluster("dgx-h100")
MEGATRON, DEEPSPEED, TITAN = (load_stack(name) for name in ("megatron-core", "deepspeed", "torchtitan"))


def case_of(stack_name: str, **device: float) -> Case:
    cluster = H100.model_copy(update={"device": H100.device.model_copy(update=device)})
    return Case.of(LLAMA, cluster, load_stack(stack_name))


def predicted(case: Case, text: str) -> Estimate:
    return estimate(case, parse_layout(text))


def test_states_on_the_host_leave_the_device_and_are_stepped_at_the_hosts_bandwidth() -> None:
    case, text = case_of("megatron-core"), "dp8,mbs1,zero1,bf16"
    here, there = predicted(case, text), predicted(case, text + ",offload-optimizer")
    assert here.memory[0].optimizer > 0.0 and there.memory[0].optimizer == 0.0
    assert there.mem_gib == pytest.approx(here.mem_gib - here.memory[0].optimizer)
    # fp32 gradients, moments and master weights read and written, bf16 weights written; by parts beside the link
    stepped = case.model.parameters / 8
    host = stepped * (4 + 16 + 8 + 2) / (77e9 * case.calibration.memory)
    link = stepped * 4 / (63e9 * LINK_SHARE)
    assert there.time.offload == pytest.approx(max(host, link), rel=0.02)
    assert here.time.offload == 0.0 and there.time.optimizer < here.time.optimizer
    assert there.sec_per_it > here.sec_per_it


def test_a_larger_batch_makes_the_hosts_step_a_smaller_share() -> None:
    share = []
    for batch in (64, 512):
        case = case_of("megatron-core").with_workload(LLAMA.model_copy(update={"global_batch": batch}))
        found = predicted(case, "dp8,mbs1,zero1,offload-optimizer,bf16")
        share.append(found.time.offload / found.sec_per_it)
    assert share[1] < 0.2 * share[0]


def test_steps_that_do_not_overlap_take_the_sum() -> None:
    text = "dp8,mbs1,zero1,offload-optimizer,bf16"
    case = case_of("megatron-core")
    apart = Case.of(LLAMA, H100, MEGATRON.model_copy(update={"offload_overlaps": False}))
    assert predicted(apart, text).time.offload > predicted(case, text).time.offload


def test_weights_on_the_host_leave_two_layers_here_and_pass_the_link_each_micro_batch() -> None:
    text = "dp8,mbs1,fsdp,bf16"
    case = case_of("torchtitan")
    here, there = predicted(case, text), predicted(case, text + ",offload-weights")
    # fp32 weights count with the optimizer's states; what is gathered and the gradients of the layer at work stay
    assert there.memory[0].weights == here.memory[0].weights and there.memory[0].gradients < here.memory[0].gradients
    assert there.memory[0].optimizer == 0.0
    slow = predicted(case_of("torchtitan", host_link_gb_s=1.0), text + ",offload-weights")
    assert slow.time.offload > there.time.offload > 0.0


@pytest.mark.parametrize("nodes", [1, 8])
def test_what_hides_gathers_hides_no_shards_from_the_host_too(nodes: int) -> None:
    """Both links are slower than a layer, so that a device that computes faster has no less to wait for in all."""
    seconds, offload = [], []
    for times in (1.0, 1.5, 4.0, 20.0):
        peaks = {rate: tflops * times for rate, tflops in H100.device.peak_tflops.items()}
        device = H100.device.model_copy(update={"peak_tflops": peaks, "host_link_gb_s": 0.5})
        slow = H100.inter.model_copy(update={"bandwidth_gbps": 100.0})
        case = Case.of(LLAMA, H100.model_copy(update={"device": device, "inter": slow}), TITAN)
        found = predicted(case, f"dp{8 * nodes},mbs1,fsdp,bf16,offload-weights")
        seconds.append(found.sec_per_it)
        offload.append(found.time.offload)
    assert seconds == sorted(seconds, reverse=True) and offload[-1] > 0.0


def test_weights_on_the_host_never_leave_more_on_the_device() -> None:
    """Of hundreds of ranks a rank's part of all gradients is less than a layer's."""
    case = case_of("torchtitan").with_workload(LLAMA.model_copy(update={"global_batch": 1024}))
    for ranks in (8, 64, 512):
        here, there = (predicted(case, f"dp{ranks},mbs1,fsdp,bf16{more}").mem_gib for more in ("", ",offload-weights"))
        assert there < here


def test_activations_on_the_host_hide_behind_layers_as_far_as_the_link_lets_them() -> None:
    text = "dp8,mbs1,zero1,bf16"
    here = predicted(case_of("megatron-core"), text)
    fast, slow = (
        predicted(case_of("megatron-core", host_link_gb_s=link), text + ",offload-activations") for link in (450.0, 5.0)
    )
    # two of 32 layers' are here
    assert fast.memory[0].activations == pytest.approx(here.memory[0].activations * 2 / 32, rel=0.01)
    assert fast.time.offload == 0.0 and slow.time.offload > 0.0


def test_only_what_recompute_leaves_passes_the_link() -> None:
    """Trimaran's layers wait for it, so that all of it shows: of a layer made again, its input in bf16, down and up."""
    case = Case.of(LLAMA, H100, load_stack("trimaran"))
    found = predicted(case, "dp8,mbs1,zero1,bf16,recompute-full,offload-activations")
    layer_input = 2 * LLAMA.seq_len * LLAMA.model.hidden
    assert found.time.offload == pytest.approx(8 * 32 * 2 * layer_input / (63e9 * LINK_SHARE), rel=0.01)


@pytest.mark.parametrize("stack", ["trimaran", "megatron-core"])
@pytest.mark.parametrize("name", [name for name in catalogue_names("models") if load_model(name).dense_layers])
def test_of_offloaded_layers_dense_ones_are_no_more_than_their_share(name: str, stack: str) -> None:
    """Dense layers keep less than layers of experts, and nothing keeps less than nothing."""
    model = load_model(name)
    workload = Workload(model=model, seq_len=4096, global_batch=64)
    text = "dp8,ep8,zero1,mbs1,offload-activations,bf16"
    mixed = predicted(Case.of(workload, H100, load_stack(stack)), text)
    alike = workload.model_copy(update={"model": model.model_copy(update={"dense_layers": 0})})
    of_experts = predicted(Case.of(alike, H100, load_stack(stack)), text)
    assert 0.0 <= mixed.memory[0].activations <= of_experts.memory[0].activations


def test_each_stack_offloads_what_it_has() -> None:
    refused = {
        (stack.name, text): [v.rule for v in violations(parse_layout(text), LLAMA, H100, stack)]
        for stack in (MEGATRON, DEEPSPEED, TITAN)
        for text in (
            "dp8,mbs1,zero1,offload-optimizer,bf16", "dp8,mbs1,fsdp,offload-weights,bf16",
            "dp8,mbs1,zero1,offload-activations,bf16", "dp4,pp2,mbs1,zero1,offload-activations,bf16",
        )
    }  # fmt: skip
    for (stack, text), rules in refused.items():
        has = any(f"offload-{word}" in text for word in load_stack(stack).offloads)
        assert ("offload" in rules) == (not has or "pp2" in text), f"{stack} {text}: {rules}"


@pytest.mark.parametrize("stack", [MEGATRON, DEEPSPEED], ids=lambda stack: stack.name)
def test_the_optimizer_leaves_the_device_by_zero_alone_on_one_rank_too(stack: Stack) -> None:
    refused = list(violations(parse_layout("dp8,mbs1,offload-optimizer,bf16"), LLAMA, H100, stack))
    assert [v.rule for v in refused] == ["offload"] and "goes with ZeRO stage 1 or more, not 0" in refused[0].sentence
    for degrees in ("dp8", "dp1"):
        layout = parse_layout(f"{degrees},mbs1,zero1,offload-optimizer,bf16")
        assert not list(violations(layout, LLAMA, H100, stack))
    best = plan("llama3-8b", "dgx-h100", 8, devices=1, stack=stack.name, top=1).best.layout
    assert best.dp == 1 and best.offload == "optimizer" and best.zero_stage >= 1


def test_a_stack_that_shards_nothing_on_one_rank_offloads_nothing_there() -> None:
    text = "dp{},mbs1,fsdp,offload-weights,bf16"
    (refused,) = violations(parse_layout(text.format(1)), LLAMA, H100, TITAN)
    assert refused.rule == "offload_alone" and "DP 1 x CP 1 = 1: torchtitan" in refused.sentence
    assert not list(violations(parse_layout(text.format(2)), LLAMA, H100, TITAN))
    assert not list(violations(parse_layout(text.format(1)), LLAMA, H100, DEEPSPEED))


def test_a_device_whose_link_is_not_stated_is_refused_by_name() -> None:
    layout = parse_layout("dp8,mbs1,zero1,offload-optimizer,bf16")
    unknown = H100.model_copy(update={"device": H100.device.model_copy(update={"host_link_gb_s": 0.0})})
    sentences = [v.sentence for v in violations(layout, LLAMA, unknown, MEGATRON) if v.rule == "offload_link"]
    assert sentences and "host_link_gb_s 0 and host_mem_gb_s 77: state both" in sentences[0]


def test_a_search_offloads_where_nothing_fits_without_and_not_else() -> None:
    roomy = plan("llama3-8b", "dgx-h100", 64, devices=8, stack="megatron-core", top=3)
    assert all(entry.layout.offload == "none" for entry in roomy.entries)
    # 13 billion parameters have 16 bytes each and more: one device holds weights and gradients alone
    tight = plan("llama3-8b", "dgx-h100", 8, devices=1, stack="megatron-core", top=1)
    assert tight.entries[0].layout.offload == "optimizer" and tight.entries[0].estimate.fits


@pytest.mark.parametrize(
    ("what", "enough_gib", "little_gib"), [("optimizer", 130.0, 90.0), ("activations", 2048.0, 10.0)]
)
def test_what_the_host_has_no_room_for_stays_on_the_device(what: str, enough_gib: float, little_gib: float) -> None:
    # of an 8B model a node of eight keeps fp32 gradients, moments and master weights: 16 bytes a parameter
    assert 90.0 < LLAMA.model.parameters * 16 / 2**30 < 130.0
    plain = "dp8,mbs1,zero1,bf16"
    here = predicted(case_of("megatron-core"), plain).mem_gib
    for room, leaves in ((enough_gib, True), (little_gib, False)):
        case = case_of("megatron-core").on(H100.model_copy(update={"host_mem_gib": room}))
        assert (predicted(case, f"{plain},offload-{what}").mem_gib < here) == leaves
        assert predicted(case, plain).mem_gib == here, "an accelerator's own memory is not its share of the host's"
        assert predicted(case, "dp8,mbs1,zero1,bf16,recompute-full").fits


def test_a_host_with_little_memory_is_no_way_out_of_a_device_with_little() -> None:
    small = H100.model_copy(update={"device": H100.device.model_copy(update={"mem_gib": 40.0})})
    workload = Workload(model=load_model("llama3-8b"), seq_len=2048, global_batch=64)
    roomy = plan(workload.model, small, 64, devices=1, seq=2048, stack="deepspeed")
    assert "offload" in str(roomy.best.layout)
    with pytest.raises(TrimaranError, match="no layout on 1 device fits"):
        plan(
            workload.model, small.model_copy(update={"host_mem_gib": 64.0}), 64, devices=1, seq=2048, stack="deepspeed"
        )
