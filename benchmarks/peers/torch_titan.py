"""torchtitan's Llama under its own FSDP2 or 1F1B pipeline, or its mixture of experts alone or with EP.

    python benchmarks/peers/torch_titan.py JOB.json

torchtitan has no GPT-2, so this is its Llama 3 of the same hidden size, layers and heads, with a SwiGLU of 2/3 the
inner width: products of the same operations, rotary positions, RMSNorm, an untied head. Model, parallelisation,
loss and clipping are torchtitan's; its loop wants tokenizers and data sets of its own, so the loop is a peer's.
A mixture is its Qwen3 without norms of queries and keys, whose router then is Mixtral's: softmax, the chosen ones'
scores over their sum, no loss of the load. Its experts run one by one in fp32, since its grouped products are bf16
alone. Under EP it shards all other weights by FSDP2, which it cannot do without.
Its tensor parallelism is not among the contenders: on gloo with PyTorch 2.13 a first backward was still waiting after
a minute.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist

KERNELS = "torchtitan.models.moe.kernels"
# the shim: torchtitan takes a machine without an accelerator for one with CUDA, imports Triton for the indices of its
# mixtures' tokens, which it can make without, and counts integers by an operator that a CPU has for floats alone
torch._utils._get_available_device_type = lambda: "cpu"
with mock.patch.dict(sys.modules, {"triton": mock.MagicMock(), "triton.language": mock.MagicMock()}):
    [titan] = importlib.util.find_spec("torchtitan").submodule_search_locations
    spec = importlib.util.spec_from_file_location(KERNELS, f"{titan}/models/moe/kernels.py")
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
kernels.generate_permute_indices = partial(kernels.generate_permute_indices, use_cpu=True)
sys.modules[KERNELS] = kernels
torch.histc = lambda x, bins, min, max: torch.bincount(x, minlength=bins)

from peer import Peer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model

from trimaran.nouns.model import Model, padded_vocab

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def arguments_of(model: Model, seq_len: int) -> TransformerModelArgs:
    """The shape in torchtitan's terms: a SwiGLU's inner width is 2/3 of 4 x hidden there by itself."""
    return TransformerModelArgs(
        dim=model.hidden,
        n_layers=model.layers,
        n_heads=model.heads,
        vocab_size=padded_vocab(model.vocab, 1),
        multiple_of=128,
        max_seq_len=seq_len,
    )


def mixture_of(model: Model, seq_len: int, dtype: torch.dtype) -> Qwen3ModelArgs:
    """The mixture in torchtitan's terms."""
    return Qwen3ModelArgs(
        dim=model.hidden,
        n_layers=model.layers,
        n_heads=model.heads,
        n_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=padded_vocab(model.vocab, 1),
        hidden_dim=model.ffn_hidden,
        rope_theta=model.rotary_theta,
        qk_norm=False,
        max_seq_len=seq_len,
        enable_weight_tying=model.tied_embedding,
        moe_enabled=True,
        moe_inter_dim=model.moe_ffn_hidden,
        moe_args=MoEArgs(
            num_experts=model.experts,
            num_shared_experts=0,
            score_func="softmax",
            route_norm=True,
            score_before_experts=False,
            top_k=model.top_k,
            use_grouped_mm=dtype == torch.bfloat16,
            load_balance_coeff=None,
        ),
    )


def config_of(peer: Peer) -> JobConfig:
    """The job in torchtitan's terms."""
    config, layout = JobConfig(), peer.layout
    config.training.seq_len = peer.job.workload.seq_len
    config.training.local_batch_size = peer.job.workload.global_batch // layout.dp
    config.training.dtype = DTYPES[peer.dtype]
    config.training.mixed_precision_param = config.training.mixed_precision_reduce = DTYPES[peer.dtype]
    config.activation_checkpoint.mode = "none"
    config.parallelism.expert_parallel_degree = layout.ep
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.parallelism.pipeline_parallel_microbatch_size = layout.mbs
    if layout.pp == 2:
        names = [f"layers.{number}" for number in range(peer.model.layers)]
        cut = peer.job.stage_split[0]
        config.parallelism.module_fqns_per_model_part = [
            ["tok_embeddings", *names[:cut]],
            [*names[cut:], "norm", "output"],
        ]
    return config


def main() -> None:
    logging.disable(logging.INFO)
    peer = Peer()
    layout, device = peer.layout, torch.device("cpu")
    dist.init_process_group("gloo")
    config = config_of(peer)
    seq_len, parallelize = peer.job.workload.seq_len, parallelize_llama
    shards = layout.dp if layout.zero_stage == 3 else 1
    dims = ParallelDims(layout.dp // shards, shards, 1, 1, layout.pp, layout.ep, 1, peer.world_size)
    with torch.device("meta"):
        if peer.model.experts:
            arguments, parallelize = mixture_of(peer.model, seq_len, peer.dtype), parallelize_qwen3
            whole = Qwen3Model(arguments).to(peer.dtype)
        else:
            arguments = arguments_of(peer.model, seq_len)
            whole = Transformer(arguments).to(peer.dtype)
    schedule = None
    reports = peer.rank == 0
    if layout.pp > 1:
        schedule, parts, first, reports = pipeline_llm(
            whole, dims, config, device, arguments, parallelize_llama, cross_entropy_loss
        )
    else:
        parts = [parallelize(whole, dims, config)]
    for part in parts:
        part.to_empty(device=device)
        with torch.no_grad():
            part.init_weights(buffer_device=device)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                # gloo has sums alone: the mean is taken apart from them
                module.set_force_sum_reduction_for_comms(True)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = peer.adamw(parameters)
    tokens = peer.job.workload.global_batch * peer.job.workload.seq_len

    def forward_backward(text: Tensor) -> float:
        inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if schedule is None:
            loss = cross_entropy_loss(parts[0](inputs), targets) / tokens
            loss.backward()
            return loss.item() * layout.dp
        found: list[Tensor] = []
        wanted = {"target": targets, "losses": found} if reports else {}
        schedule.step(*((inputs,) if first else ()), **wanted, return_outputs=False)
        return torch.stack(found).detach().sum().item() / tokens if found else 0.0

    def step(text: Tensor) -> float:
        loss = forward_backward(text)
        pipeline, has_ep = dims.get_optional_mesh("pp"), dims.ep_enabled
        utils.clip_grad_norm_(parameters, peer.job.train.clip_grad, foreach=True, pp_mesh=pipeline, ep_enabled=has_ep)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    peer.train(step, optimizer, reports=reports)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
