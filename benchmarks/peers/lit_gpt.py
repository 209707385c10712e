"""litgpt's GPT under Lightning Fabric, as `litgpt pretrain` sets it up: alone or under DistributedDataParallel.

    python benchmarks/peers/lit_gpt.py JOB.json

litgpt knows no learned positions and no tied head, so its model is the same shape with rotary positions on a
quarter of each head and an output matrix of its own: the same products, 3.1 million weights more.
"""

from __future__ import annotations

import lightning
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from peer import Peer
from torch import Tensor

from trimaran.nouns.model import Model, padded_vocab


def config_of(model: Model) -> Config:
    """The shape in litgpt's terms."""
    return Config(
        block_size=model.max_positions,
        n_layer=model.layers,
        n_embd=model.hidden,
        n_head=model.heads,
        padded_vocab_size=padded_vocab(model.vocab, 1),
        intermediate_size=model.ffn_hidden,
        parallel_residual=False,
        bias=True,
        attn_bias=True,
        mlp_class_name="GptNeoxMLP",
    )


def main() -> None:
    peer = Peer()
    strategy = "auto"
    if peer.world_size > 1:
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=peer.world_size,
        strategy=strategy,
        precision="bf16-true" if peer.dtype == torch.bfloat16 else "32-true",
    )
    fabric.launch()
    torch.set_num_threads(peer.job.threads_per_rank)
    with fabric.init_module():
        module = GPT(config_of(peer.model))
    module.apply(module._init_weights)
    model, optimizer = fabric.setup(module, peer.adamw(list(module.parameters())))

    def step(text: Tensor) -> float:
        total, parts = 0.0, peer.micro_batches(text)
        for i, part in enumerate(parts):
            with fabric.no_backward_sync(model, enabled=i < len(parts) - 1):
                loss = chunked_cross_entropy(model(part[:, :-1]), part[:, 1:].contiguous(), chunk_size=0) / len(parts)
                fabric.backward(loss)
            total += loss.item()
        fabric.clip_gradients(model, optimizer, max_norm=peer.job.train.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        return total

    peer.train(step, optimizer, reports=peer.rank == 0)


if __name__ == "__main__":
    main()
