"""Stack: what the training software does, as far as memory and time can feel it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveInt

from trimaran.nouns.dispatcher import DispatcherName
from trimaran.nouns.flops_formula import FlopsFormula
from trimaran.nouns.model import Model
from trimaran.nouns.noun import Noun
from trimaran.nouns.precision import PrecisionName
from trimaran.nouns.recompute import Recompute, RecomputeModule, modules_of
from trimaran.nouns.spoken.noted import Noted

DataParallelKind = Literal["all_reduce", "parameter_server", "fully_sharded"]
ContextParallelKind = Literal["ring", "all_gather", "ulysses"]
# How the exchange of tokens hides: not, behind shared experts, or behind another micro-batch's layer.
ExpertOverlap = Literal["none", "shared", "batch"]
# What lies in the host's memory: moments and master weights; those, weights and gradients; or what layers keep.
Offload = Literal["none", "optimizer", "weights", "activations"]
# In what replicas send each other what they sum; what that loses is kept and sent later (error feedback).
Compression = Literal["none", "fp16", "int8", "powersgd"]
Schedule = Literal["none", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
# Schedules of two chunks a rank, folded: rank r of p holds stages r and 2 p - 1 - r, so that the first has both ends.
FOLDED: tuple[Schedule, ...] = ("zbv", "dualpipev")
RmsNorm = Literal["fused", "eager", "composite", "torch"]
FusedAccumulation = Literal["never", "alike", "always"]
Concatenation = Literal["never", "batches", "scatters", "always"]
FlashKernel = Literal["flash", "cudnn", "triton"]
Fp8Scaling = Literal["delayed", "current", "blockwise"]
GroupedProducts = Literal["one_kernel", "beside_each_other", "one_by_one"]
GraphedModule = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess"]
# What some software's own checks refuse, by the rules of trimaran.layout.stop_rules.
Stop = Literal[
    "delayed_recompute", "stages_among_experts", "experts_over_copies", "biased_slices", "ulysses_halves",
    "halves_of_slices", "further_positions", "narrow_blocks", "graphs_again",
]  # fmt: skip
Optimizer = Literal["adam", "sgd"]
MemoryReport = Literal["allocated", "reserved", "device_used", "node_used", "resident"]


class Stack(Noun):
    """A small description of one piece of training software.

    Bytes are per parameter of the mixed-precision recipe; `memory_report` says what the
    software's own memory figure counts, since predicted memory is compared with that.
    """

    name: str = ""
    software: str = Field(default="", description="the software and its version or year, as a plan names it")
    framework: Literal["megatron", "torch", "gpipe", "oneflow", "trimaran"] = "torch"
    kernels_like: str = Field(
        default="",
        description="another stack whose measured kernels this one runs, but for attention where its kernel is another",
    )
    op_us: float = Field(
        default=26.0, gt=0, description="GPU: host time of one operator by prior, measured by benchmarks/host_time.py"
    )
    graphed: tuple[GraphedModule, ...] = Field(
        default=(), description="GPU: modules of a layer whose operators the host replays as one CUDA graph"
    )
    gathers_beside_products: bool = Field(
        default=False, description="collectives run beside the products all the time, and slow them"
    )
    flash_attention: bool = False
    flash_kernel: FlashKernel = Field(
        default="flash", description="whose kernel that is: FlashAttention-2's, cuDNN's or one in Triton"
    )
    fused_softmax: bool = Field(default=False, description="Megatron's kernels; eligibility is checked by shape")
    fused_softmax_max_seq: int = Field(default=2048, gt=0)
    fused_gelu: bool = False
    dropout: bool = Field(default=False, description="runs its dropout kernels, as the Megatrons do by default")
    keeps_freed_memory: bool = Field(default=True, description="CPU: as tcmalloc does, and glibc's malloc does not")
    fused_layernorm: bool = False
    fused_optimizer: bool = False
    fp32_softmax: bool = False
    fp32_loss: bool = Field(default=True, description="logits are cast to fp32 for the loss")
    overlap_dp: float = Field(default=0.0, ge=0, le=1, description="share of the gradient traffic hidden by prior")
    overlapped_zero_stages: tuple[Annotated[int, Field(ge=0, le=3)], ...] = Field(
        default=(0, 1, 2, 3), description="ZeRO stages whose traffic hides at all"
    )
    gathers_behind_forward: bool = Field(
        default=False, description="weights that ZeRO-1 and 2 gather arrive while the first forward runs"
    )
    sums_behind_weights: bool = Field(
        default=False, description="TP sums an input's gradient while the product for the weight's gradient runs"
    )
    sums_behind_products: bool = Field(
        default=False,
        description="inside a node, sequence parallelism's gathers and sums run in pieces beside the next product",
    )
    fused_accumulation: FusedAccumulation = Field(
        default="never",
        description="the product that makes a weight's gradient adds it to those of earlier micro-batches: always, or "
        "where these are kept in its own precision",
    )
    overlap_pp: bool = False
    overlaps_sends: tuple[Schedule, ...] = Field(
        default=(), description="schedules under which sends run beside compute, where not all do (overlap_pp)"
    )
    splits_sends: tuple[Schedule, ...] = Field(
        default=(), description="schedules in which TP ranks send a part of an activation each, and gather it there"
    )
    keeps_sent: bool = Field(
        default=False, description="a stage keeps what it has sent until its backward, a part of it where it sent that"
    )
    clones_received: bool = Field(
        default=False, description="a stage works on a copy of what it received whole, and keeps both"
    )
    receives_into_all: bool = Field(
        default=False, description="a stage has places for what it receives of all micro-batches, from the first on"
    )
    stage_places: int = Field(
        default=0, ge=0,
        description="places on a pipeline's stages but the last, times the stages, for what a backward needs of a "
        "micro-batch, made ahead beside the forward's own; 2: forwards go ahead; 0: as many as are in flight",
    )  # fmt: skip
    keeps_pipeline_logits: bool = Field(
        default=False, description="the last stage keeps the logits of all micro-batches until the next iteration"
    )
    recomputes_stage: bool = Field(default=False, description="full recompute makes a whole stage's activations again")
    recompute_stops_early: bool = Field(default=False, description="full recompute ends once all it is for is there")
    master_weight_bytes: int = Field(default=4, ge=0, le=8, description="fp32 master copy under 16 bit")
    moment_bytes_16bit: float = Field(
        default=4.0, gt=0, le=4, description="each of Adam's moments beside a master copy, the mean of both"
    )
    grad_bytes_16bit: int = Field(default=2, ge=2, le=8, description="gradient accumulation under 16 bit")
    wide_gradients: tuple[PrecisionName, ...] = Field(
        default=("bf16",), description="precisions whose gradients take grad_bytes_16bit"
    )
    narrow_gradient_stages: tuple[Annotated[int, Field(ge=0, le=3)], ...] = Field(
        default=(), description="ZeRO stages whose gradients travel in 16 bit, whatever they are summed in"
    )
    wide_sum_stages: tuple[Annotated[int, Field(ge=0, le=3)], ...] = Field(
        default=(), description="ZeRO stages whose gradients travel in fp32, whatever they are kept in"
    )
    wide_gradient_stages: tuple[Annotated[int, Field(ge=0, le=3)], ...] = Field(
        default=(0, 1, 2, 3), description="ZeRO stages under which they do; under the others 16 bit"
    )
    compiled: bool = Field(default=False, description="layers run under torch.compile, which exports ask for")
    rms_norm: RmsNorm = Field(
        default="eager",
        description="RMS norms (and rotary angles): one kernel that keeps its input; Python's operators, which keep it "
        "in fp32 and what the weight multiplies; PyTorch's composite, both in fp32; torch: PyTorch's own of today",
    )
    native_gelu: bool = Field(default=False, description="GELU is PyTorch's kernel, which keeps its input alone")
    joint_qkv: bool = Field(
        default=False, description="one product makes queries, keys and values, which stay one tensor"
    )
    copies_values: bool = Field(
        default=False, description="attention copies values out of that one tensor, which is then let go"
    )
    repeats_kv: bool = Field(default=False, description="grouped keys and values are repeated for every query head")
    copies_context: bool = Field(
        default=False,
        description="after rotary angles, or of heads that were dealt out, attention's result is kept in its own order "
        "and in the next product's",
    )
    attends_in_blocks: bool = Field(
        default=False,
        description="windows, caps, and bf16 on a CPU with a key a query go by blocks; queries, keys and values stay",
    )
    attention_blocks: tuple[PositiveInt, PositiveInt] = Field((128, 512), description="queries of a block: CPU, GPU")
    keeps_gathered: bool = Field(
        default=False,
        description="sequence parallelism keeps what it gathered for a product, not this rank's slice of it",
    )
    gathers_again: bool = Field(
        default=False,
        description="sequence parallelism gathers what a product kept of its input once more for the weight's "
        "gradient, and waits for it",
    )
    concatenates_slices: Concatenation = Field(
        default="never",
        description="sequence parallelism, whose slices are gathered and scattered along the first dimension, copies "
        "what is whole to lay them along the sequence: of several sequences, for scatters of one too, or always",
    )
    loss_copies: int = Field(default=3, ge=1, le=8, description="fp32 copies of the logits that an fp32 loss makes")
    loss_copies_over_tp: int | None = Field(
        default=None, ge=1, le=8, description="the same where TP ranks share the vocabulary; None: as loss_copies"
    )
    frees_logits: bool = Field(default=False, description="16-bit logits are let go before the loss's backward")
    lean_activation: bool = Field(default=False, description="an MLP's activation keeps its inputs alone, fused or not")
    holds_mlp_gradients: bool = Field(
        default=False, description="what the MLP's backward holds of gradients counts beside what layers keep"
    )
    alibi_tensor: bool = Field(default=False, description="ALiBi is one (heads / TP, s, s) tensor that layers share")
    loss_chunk_cpu_tokens: int = Field(default=0, ge=0, description="tokens whose loss is made at once; 0: all")
    loss_chunk_gpu_tokens: int = Field(default=0, ge=0, description="the same on a GPU")
    sums_by_unit: bool = Field(
        default=False, description="gradients that replicas share out are summed unit by unit, and whole in two of them"
    )
    keeps_unit_places: bool = Field(
        default=False, description="CPU: two places for layers' whole weights and gradients stay, apart from the ends'"
    )
    loss_makes_gradients: bool = Field(default=False, description="the loss makes the head's gradients, by chunks")
    agrees_every_step: bool = Field(
        default=False, description="every step ends with a sum of loss and gradient norm over all ranks"
    )
    selective: tuple[str, ...] = Field(
        default=("attention",),
        description="operators that selective recompute makes again; of a run of them the first one's input is kept",
    )
    recompute_modules: tuple[RecomputeModule, ...] = Field(
        default=(), description="modules that the software can be told by name to make again"
    )
    recompute_every: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        default=(1,), min_length=1, description="of how many layers full recompute may make one again"
    )
    selective_keeps: tuple[str, ...] = Field(
        default=(), description="results that selective recompute keeps of a layer, which it makes again but for them"
    )
    shards_master: bool = Field(
        default=False, description="ZeRO-3 shards fp32 weights alone, and casts what it gathers"
    )
    copies_gathered: bool = Field(
        default=False, description="ZeRO-3 copies what it gathered of a unit into its parameters"
    )
    gradient_passes: int = Field(
        default=0,
        ge=0,
        le=8,
        description="passes over a unit's gradients as the backward leaves them until what ZeRO-3 scatters is laid "
        "together, which is written besides; 0: it lies so from the start",
    )
    clears_unit_gradients: bool = Field(
        default=False,
        description="ZeRO 2 and 3 set a unit's gradients to zero before each backward adds to them, and then add a "
        "rank's part to those of earlier micro-batches",
    )
    all_reduced_zero_stages: tuple[Annotated[int, Field(ge=1, le=2)], ...] = Field(
        default=(), description="ZeRO stages whose gradients are all-reduced, though a rank keeps its part alone"
    )
    bucket_passes: int = Field(
        default=0,
        ge=0,
        le=12,
        description="passes over gradients, as they travel, by which ZeRO 1 and 2 lay them into buckets and scale them",
    )
    gradient_buffer_passes: int = Field(
        default=0,
        ge=0,
        le=12,
        description="passes over all gradients of a rank beside norm and clipping, which ZeRO-1 then does of its share",
    )
    live_parameters: int = Field(
        default=0, ge=0, description="parameters that ZeRO-3 gathers ahead and keeps, where two layers have fewer"
    )
    reuse_parameters: int = Field(
        default=0, ge=0, description="ZeRO-3 keeps gathered what it wants again within so many parameters"
    )
    pipelines_keep_whole: bool = Field(
        default=False,
        description="ZeRO-3 of a pipeline gathers weights with the first micro-batch and keeps them, and whole "
        "gradients, to the last one, after which they are scattered",
    )
    micro_batches_as_stages: bool = Field(
        default=False, description="a pipeline runs as many micro-batches as it has stages unless it is told otherwise"
    )
    interleaved_chunks: int = Field(
        default=1, ge=1, le=8, description="virtual stages of interleaved rows that state none; 1: not known"
    )
    gathers_ends: bool = Field(
        default=False, description="ZeRO-3 keeps embedding and head gathered over forward and backward"
    )
    fragmentation: float = Field(
        default=0.0, ge=0, lt=1, description="what the allocator reserves beside the logits, of them; 0: not traced"
    )
    flattened_gradients: tuple[PrecisionName, ...] = Field(
        default=(), description="precisions whose gradients replicas sum as one tensor, a copy of them all"
    )
    low_gradient_bytes: int = Field(
        default=0, ge=0, le=4, description="16-bit gradients that stay beside those of wide_gradients"
    )
    narrow_as: str = Field(
        default="", description="the stack as which measured rows of narrow precisions run, where those need another"
    )
    noted: tuple[Noted, ...] = Field(
        default=(), description="stacks as which measured rows are read whose columns system or notes have these words"
    )
    fp8_scaling: Fp8Scaling = Field(
        default="current",
        description="precision fp8 scales a tensor by its largest value of the steps before or of now, or its blocks",
    )
    keeps_casts: bool = Field(
        default=False,
        description="linear layers keep their operands as cast for their products; else they keep 16 bit and cast anew",
    )
    casts_weights_once: bool = Field(
        default=False, description="weights are cast for their products once an iteration, not every micro-batch"
    )
    gathers_casts: bool = Field(
        default=False, description="sharded weights are cast for their products before they are gathered"
    )
    slices_casts: bool = Field(
        default=True, description="sequence parallelism gathers what was cast for a product, where its format allows"
    )
    grouped_products: GroupedProducts = Field(
        default="one_by_one",
        description="experts' products: one kernel for all, kernels of their own on several streams, or one by one",
    )
    weighs_results: bool = Field(
        default=False, description="experts' results, not what they activate, are multiplied by tokens' weights"
    )
    pads_experts: bool = Field(
        default=False,
        description="experts' tokens are copied with padding for narrow products, unless the dispatcher permutes them",
    )
    experts_block_rows: int = Field(
        default=0,
        ge=0,
        description="CPU: experts' rows lie in whole blocks of so many where code is generated; 0: as they come",
    )
    bucket_elements: int = Field(default=0, ge=0, description="elements of each of two gradient buckets")
    uneven_stages: bool = Field(default=False, description="layers may differ between stages")
    recomputes_by_stage: bool = Field(
        default=False, description="recompute_every counts the layers of each virtual stage by themselves"
    )
    ends_count_as_layers: bool = Field(
        default=False,
        description="embedding and head stand for a layer each: where layers + 2 divide, or always with uneven_stages",
    )
    bare_ends: bool = Field(default=False, description="first and last stage may hold embedding and head alone")
    head_weighted_stages: bool = False
    tied_embedding_replicated: bool = Field(default=True, description="last stage keeps a copy and reduces it")
    pads_vocab: bool = True
    schedules: tuple[Schedule, ...] = ("gpipe", "1f1b")
    zero_stages: tuple[Annotated[int, Field(ge=0, le=3)], ...] = Field(default=(0,), min_length=1)
    pipelined_zero_stages: tuple[Annotated[int, Field(ge=0, le=3)], ...] = Field(
        default=(0, 1, 2, 3), min_length=1, description="those of zero_stages that go with a pipeline"
    )
    lone_zero_stages: tuple[Annotated[int, Field(ge=1, le=3)], ...] = Field(
        default=(), description="those of zero_stages that a lone rank runs too, and offloads by; none: it runs none"
    )
    dp_kinds: tuple[DataParallelKind, ...] = Field(default=("all_reduce",), min_length=1)
    precisions: tuple[PrecisionName, ...] = Field(default=("fp32", "fp16", "bf16"), min_length=1)
    recomputes: tuple[Recompute, ...] = Field(
        default=("none", "full"),
        min_length=1,
        description="what a search proposes; modules that these name may be joined in any way",
    )
    sequence_parallel: bool = False
    sequence_parallel_default: bool = Field(
        default=False, description="tensor parallelism runs with sequence parallelism unless told otherwise"
    )
    tensor_wants_slices: bool = Field(
        default=False, description="tensor parallelism runs with sequence parallelism alone"
    )
    whole_weights_alone: bool = Field(
        default=False,
        description="weights are whole (ZeRO 0) where each replica is one rank alone; TP and PP of one replica go with "
        "them in fp32, and CP shards them",
    )
    model_traits: tuple[str, ...] | None = Field(
        default=None, description="traits beyond GPT-2's, BLOOM's and Llama's that it trains; None: whatever is asked"
    )
    tensor_parallel: bool = True
    pipeline_parallel: bool = True
    context_parallel: tuple[ContextParallelKind, ...] = Field(
        default=(),
        description="how ranks that share a sequence let each query meet all keys: keys and values go round a ring, "
        "are gathered, or heads are dealt out in place of tokens (Ulysses); none: no context parallelism",
    )
    context_limits: tuple[tuple[str, tuple[ContextParallelKind, ...]], ...] = Field(
        default=(), description="traits of a model, each with the kinds of context parallelism that attend so"
    )
    ring_keeps_steps: bool = Field(
        default=False, description="ring attention keeps each step's keys, values and result until the last step"
    )
    packs_context: bool = Field(
        default=False, description="a ring, or gathered keys and values, work with copies of a rank's own alone"
    )
    adds_embedding_rows: bool = Field(default=False, description="an embedding's gradients are added row by row")
    gathers_for_steps: bool = Field(default=False, description="gathered keys and values are attended to in steps")
    turns_jointly: bool = Field(default=False, description="Ulysses turns queries, keys and values in one exchange")
    context_repeats_kv: bool = Field(
        default=False, description="Ulysses repeats keys and values where it has more ranks than these have heads"
    )
    placements: tuple[str, ...] = Field(
        default=(),
        description="orders of axes in which it lays out ranks, from neighbours outwards (`tp-dp-pp`); none: in any",
    )
    fsdp: Literal["own", "torch"] = Field(default="own", description="whose FSDP it runs, its own or PyTorch's")
    hybrid_zero_stages: tuple[Annotated[int, Field(ge=1, le=3)], ...] = Field(
        default=(), description="ZeRO stages that can share out among a part of the replicas; none: among all alone"
    )
    sums_copies_once: bool = Field(
        default=False, description="copies of ZeRO-3's shards are summed once an iteration, not every micro-batch"
    )
    expert_parallel: bool = Field(default=False, description="experts of a layer lie on ranks of their own")
    own_expert_tensor: bool = Field(
        default=False, description="experts' tensor parallelism may be any, not that of the other weights or 1 alone"
    )
    whole_experts: bool = Field(
        default=False, description="experts on ranks of their own are whole where a run does not say otherwise"
    )
    experts_want_slices: bool = Field(
        default=False, description="experts with tensor parallelism run with sequence parallelism alone"
    )
    dispatchers: tuple[DispatcherName, ...] = Field(
        default=(), description="how tokens come to the ranks of their experts, and back"
    )
    expert_overlaps: tuple[ExpertOverlap, ...] = Field(
        default=(), description="what the exchange of tokens can run beside: shared experts, or another micro-batch"
    )
    overlaps_batches: tuple[Schedule, ...] = Field(
        default=("none", "interleaved"),
        description="schedules under which that other micro-batch's layer can run beside",
    )
    stops_at: tuple[Stop, ...] = Field(default=(), description="what its own checks refuse, by rules of these names")
    multi_token_prediction: bool = Field(default=False, description="a model's modules for further tokens are trained")
    offloads: tuple[Offload, ...] = Field(default=(), description="what can lie in the host's memory")
    compressions: tuple[Compression, ...] = Field(
        default=(), description="in what replicas can send each other gradients, with error feedback"
    )
    local_steps: bool = Field(
        default=False, description="replicas can train apart for several steps, and agree by an outer optimizer"
    )
    unlike_replicas: bool = Field(
        default=False, description="replicas can take unlike numbers of micro-batches in an iteration"
    )
    offload_overlaps: bool = Field(
        default=False, description="gradients go to the host, are stepped there and come back by parts, at once"
    )
    offload_waits: bool = Field(
        default=False, description="each tensor that a layer keeps goes to the host before the layer goes on"
    )
    fused_host_step: bool = Field(default=False, description="the host's optimizer passes over all states once")
    flops_formula: FlopsFormula | None = Field(default=None, description="the calculator behind its logs' TFLOPs")
    memory_report: MemoryReport = "allocated"
    source: str = ""

    def can_recompute(self, word: str) -> bool:
        """Whether it does what a word of recompute says: one of its own, or modules that its own name."""
        named = {module for one in self.recomputes for module in modules_of(one)}
        return word in self.recomputes or bool(modules_of(word) and named.issuperset(modules_of(word)))

    def trained(self, model: Model) -> Model:
        """The model as this software trains it: without modules for further tokens where it has none."""
        if self.multi_token_prediction or not model.mtp_depth:
            return model
        return model.model_copy(update={"mtp_depth": 0})

    @property
    def blocking_schedules(self) -> tuple[Schedule, ...]:
        """Schedules under which ranks wait while they send."""
        return () if self.overlap_pp else tuple(word for word in get_args(Schedule) if word not in self.overlaps_sends)
