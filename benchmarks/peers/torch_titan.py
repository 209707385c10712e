"""torchtitan's Llama under its own FSDP2 or 1F1B pipeline.

    python benchmarks/peers/torch_titan.py JOB.json

torchtitan has no GPT-2, so this is its Llama 3 of the same hidden size, layers and heads, with a SwiGLU of 2/3 the
inner width: products of the same operations, rotary positions, RMSNorm, an untied head. Model, parallelisation,
loss and clipping are torchtitan's; its loop wants tokenizers and data sets of its own, so the loop is a peer's.
Its tensor parallelism is not among the contenders: on gloo with PyTorch 2.13 a first backward was still waiting after
a minute.
"""

from __future__ import annotations

import logging
import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

# the shim: torchtitan takes a machine without an accelerator for one with CUDA, and reads the Triton kernels of its
# mixtures of experts, which no Llama calls
torch._utils._get_available_device_type = lambda: "cpu"
sys.modules["torchtitan.models.moe.kernels"] = MagicMock()

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


def config_of(peer: Peer) -> JobConfig:
    """The job in torchtitan's terms."""
    config, layout = JobConfig(), peer.layout
    config.training.seq_len = peer.job.workload.seq_len
    config.training.local_batch_size = peer.job.workload.global_batch // layout.dp
    config.training.dtype = DTYPES[peer.dtype]
    config.training.mixed_precision_param = config.training.mixed_precision_reduce = DTYPES[peer.dtype]
    config.activation_checkpoint.mode = "none"
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
    arguments = arguments_of(peer.model, peer.job.workload.seq_len)
    shards = layout.dp if layout.zero_stage == 3 else 1
    dims = ParallelDims(layout.dp // shards, shards, 1, 1, layout.pp, 1, 1, peer.world_size)
    with torch.device("meta"):
        whole = Transformer(arguments).to(peer.dtype)
    schedule = None
    reports = peer.rank == 0
    if layout.pp > 1:
        schedule, parts, first, reports = pipeline_llm(
            whole, dims, config, device, arguments, parallelize_llama, cross_entropy_loss
        )
    else:
        parts = [parallelize_llama(whole, dims, config)]
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
        utils.clip_grad_norm_(parameters, peer.job.train.clip_grad, foreach=True, pp_mesh=dims.get_optional_mesh("pp"))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    peer.train(step, optimizer, reports=reports)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
