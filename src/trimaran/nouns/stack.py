"""Stack: what the training software does, as far as memory and time can feel it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from trimaran.nouns.noun import Noun
from trimaran.nouns.precision import PrecisionName
from trimaran.nouns.recompute import Recompute

DataParallelKind = Literal["all_reduce", "parameter_server", "fully_sharded"]
Schedule = Literal["none", "gpipe", "1f1b", "interleaved", "zero_bubble"]
RmsNorm = Literal["fused", "eager", "composite", "torch"]
FlashKernel = Literal["flash", "cudnn"]
Fp8Scaling = Literal["delayed", "current", "blockwise"]
MemoryReport = Literal["allocated", "reserved", "device_used", "node_used", "resident"]


class RecomputeModule(Noun):
    """A part of a layer that some software can be told to make again, and the operators that it covers."""

    name: str
    operators: tuple[str, ...]


class Stack(Noun):
    """A small description of one piece of training software.

    Bytes are per parameter of the mixed-precision recipe; `memory_report` says what the
    software's own memory figure counts, since predicted memory is compared with that.
    """

    name: str = ""
    software: str = Field(default="", description="the software and its version or year, as a plan names it")
    framework: Literal["megatron", "torch", "gpipe", "oneflow", "trimaran"] = "torch"
    kernels_like: str = Field(default="", description="another stack whose measured kernels this one runs")
    gathers_beside_products: bool = Field(
        default=False, description="collectives run beside the products all the time, and slow them"
    )
    flash_attention: bool = False
    flash_kernel: FlashKernel = Field(
        default="flash", description="whose kernel that is: FlashAttention-2's or cuDNN's"
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
    fused_accumulation: bool = Field(
        default=False, description="the product that makes a weight's gradient adds it to the sum of those before"
    )
    overlap_pp: bool = False
    overlaps_sends: tuple[Schedule, ...] = Field(
        default=(), description="schedules under which sends run beside compute, where not all do (overlap_pp)"
    )
    splits_sends: tuple[Schedule, ...] = Field(
        default=(), description="schedules in which TP ranks send a part of an activation each, and gather it there"
    )
    recomputes_stage: bool = Field(default=False, description="full recompute makes a whole stage's activations again")
    recompute_stops_early: bool = Field(
        default=False, description="full recompute ends once all that the backward wants is there"
    )
    master_weight_bytes: int = Field(default=4, ge=0, le=8, description="fp32 master copy under 16 bit")
    grad_bytes_16bit: int = Field(default=2, ge=2, le=8, description="gradient accumulation under 16 bit")
    wide_gradients: tuple[PrecisionName, ...] = Field(
        default=("bf16",), description="precisions whose gradients take grad_bytes_16bit"
    )
    wide_gradient_stages: tuple[Annotated[int, Field(ge=0, le=3)], ...] = Field(
        default=(0, 1, 2, 3), description="ZeRO stages under which they do; under the others 16 bit"
    )
    rms_norm: RmsNorm = Field(
        default="eager",
        description="RMS norms (and rotary angles): one kernel that keeps its input; Python's operators, which keep it "
        "in fp32 and what the weight multiplies; PyTorch's composite, both in fp32; torch: PyTorch's own of today",
    )
    native_gelu: bool = Field(default=False, description="GELU is PyTorch's kernel, which keeps its input alone")
    joint_qkv: bool = Field(
        default=False, description="one product makes queries, keys and values, which stay one tensor"
    )
    repeats_kv: bool = Field(default=False, description="grouped keys and values are repeated for every query head")
    copies_context: bool = Field(
        default=False,
        description="after rotary angles attention's result is kept in its own order and in the next product's",
    )
    keeps_gathered: bool = Field(
        default=False,
        description="sequence parallelism keeps what it gathered for a product, not this rank's slice of it",
    )
    loss_copies: int = Field(default=3, ge=1, le=8, description="fp32 copies of the logits that an fp32 loss makes")
    frees_logits: bool = Field(default=False, description="16-bit logits are let go before the loss's backward")
    lean_activation: bool = Field(default=False, description="an MLP's activation keeps its inputs alone, fused or not")
    holds_mlp_gradients: bool = Field(
        default=False, description="the MLP's backward holds the gradients of its inner activations and its output"
    )
    alibi_tensor: bool = Field(default=False, description="ALiBi is one (heads / TP, s, s) tensor that layers share")
    loss_chunk_cpu_tokens: int = Field(default=0, ge=0, description="tokens whose loss is made at once; 0: all")
    loss_chunk_gpu_tokens: int = Field(default=0, ge=0, description="the same on a GPU")
    heap_keeps_logits: bool = Field(default=False, description="CPU: no later tensor takes the place of the logits")
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
    gathers_ends: bool = Field(
        default=False, description="ZeRO-3 keeps embedding and head gathered over forward and backward"
    )
    fragmentation: float = Field(
        default=0.0, ge=0, lt=1, description="what the allocator reserves beside the logits, of them; 0: not traced"
    )
    low_gradient_bytes: int = Field(
        default=0, ge=0, le=4, description="16-bit gradients that stay beside those of wide_gradients"
    )
    narrow_as: str = Field(
        default="", description="the stack as which measured rows of narrow precisions run, where those need another"
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
    bucket_elements: int = Field(default=0, ge=0, description="elements of each of two gradient buckets")
    uneven_stages: bool = Field(default=False, description="layers may differ between stages")
    recomputes_by_stage: bool = Field(
        default=False, description="recompute_every counts the layers of each virtual stage by themselves"
    )
    ends_count_as_layers: bool = Field(
        default=False,
        description="embedding and head stand for a layer each: where layers + 2 divide, or always with uneven_stages",
    )
    head_weighted_stages: bool = False
    tied_embedding_replicated: bool = Field(default=True, description="last stage keeps a copy and reduces it")
    pads_vocab: bool = True
    schedules: tuple[Schedule, ...] = ("gpipe", "1f1b")
    zero_stages: tuple[Annotated[int, Field(ge=0, le=3)], ...] = Field(default=(0,), min_length=1)
    pipelined_zero_stages: tuple[Annotated[int, Field(ge=0, le=3)], ...] = Field(
        default=(0, 1, 2, 3), min_length=1, description="those of zero_stages that go with a pipeline"
    )
    dp_kinds: tuple[DataParallelKind, ...] = Field(default=("all_reduce",), min_length=1)
    precisions: tuple[PrecisionName, ...] = Field(default=("fp32", "fp16", "bf16"), min_length=1)
    recomputes: tuple[Recompute, ...] = Field(default=("none", "full"), min_length=1)
    sequence_parallel: bool = False
    sequence_parallel_default: bool = Field(
        default=False, description="tensor parallelism runs with sequence parallelism unless told otherwise"
    )
    model_traits: tuple[str, ...] | None = Field(
        default=None, description="traits beyond GPT-2's, BLOOM's and Llama's that it trains; None: whatever is asked"
    )
    tensor_parallel: bool = True
    pipeline_parallel: bool = True
    memory_report: MemoryReport = "allocated"
    source: str = ""

    @property
    def blocking_schedules(self) -> tuple[Schedule, ...]:
        """Schedules under which ranks wait while they send."""
        return () if self.overlap_pp else tuple(word for word in get_args(Schedule) if word not in self.overlaps_sends)
