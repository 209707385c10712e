"""GPT-2 or Mixtral of Hugging Face transformers, alone or under DistributedDataParallel by accelerate.

python benchmarks/peers/hugging_face.py JOB.json
"""

from __future__ import annotations

from contextlib import nullcontext

from accelerate import Accelerator
from peer import Peer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from trimaran.nouns.model import Model, padded_vocab


def config_of(model: Model) -> GPT2Config:
    """The shape in transformers' terms; GPT-2's tanh GELU is replaced by the model's exact one."""
    return GPT2Config(
        vocab_size=padded_vocab(model.vocab, 1),
        n_positions=model.max_positions,
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        n_inner=model.ffn_hidden,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


def mixture_of(model: Model) -> MixtralForCausalLM:
    """A mixture of experts in transformers' terms."""
    config = MixtralConfig(
        vocab_size=padded_vocab(model.vocab, 1),
        max_position_embeddings=model.max_positions,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        intermediate_size=model.moe_ffn_hidden,
        num_local_experts=model.experts,
        num_experts_per_tok=model.top_k,
        tie_word_embeddings=model.tied_embedding,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return MixtralForCausalLM(config)


def model_of(model: Model) -> PreTrainedModel:
    """The model in transformers' own code."""
    return mixture_of(model) if model.experts else GPT2LMHeadModel(config_of(model))


def main() -> None:
    peer = Peer()
    accelerator = Accelerator(cpu=True)
    module = model_of(peer.model).to(peer.dtype)
    model, optimizer = accelerator.prepare(module, peer.adamw(list(module.parameters())))

    def step(text: Tensor) -> float:
        total, parts = 0.0, peer.micro_batches(text)
        for i, part in enumerate(parts):
            synchronised = nullcontext() if i == len(parts) - 1 else accelerator.no_sync(model)
            with synchronised:
                # transformers shifts labels by itself unless it is given them shifted
                targets = part[:, 1:].contiguous()
                loss = model(part[:, :-1], shift_labels=targets, labels=targets).loss / len(parts)
                accelerator.backward(loss)
            total += loss.item()
        accelerator.clip_grad_norm_(model.parameters(), peer.job.train.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        return total

    peer.train(step, optimizer, reports=peer.rank == 0)
    accelerator.end_training()


if __name__ == "__main__":
    main()
