"""Configurations of published models of Hugging Face, as far as they make time or memory, by family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Config = dict[str, Any]


def sizes(layers: int, hidden: int, heads: int, ffn: int, vocab: int, **more: object) -> Config:
    named = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return named | {"intermediate_size": ffn, "vocab_size": vocab} | more


SMALL = sizes(2, 128, 4, 256, 256)


def theirs(config: Config, device: str = "meta") -> torch.nn.Module:
    """Hugging Face's own model of a config; on the device `meta` its weights have shapes and no memory."""
    # these take seconds, and other tests need none of them
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    stated = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **stated), attn_implementation="eager",
            experts_implementation="eager",
        )  # fmt: skip


# Published config.json files, as far as they state sizes and traits.
PUBLISHED: dict[str, Config] = {
    "gpt2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "bloom-7b1": {"model_type": "bloom", "n_layer": 30, "hidden_size": 4096, "n_head": 32, "vocab_size": 250880},
    "gpt-neox-20b": sizes(44, 6144, 64, 24576, 50432, model_type="gpt_neox", rotary_pct=0.25),
    "Llama-3.1-8B": sizes(32, 4096, 32, 14336, 128256, model_type="llama", num_key_value_heads=8),
    "Llama-3.1-70B": sizes(80, 8192, 64, 28672, 128256, model_type="llama", num_key_value_heads=8),
    "Llama-3.1-405B": sizes(126, 16384, 128, 53248, 128256, model_type="llama", num_key_value_heads=8),
    "llama with biases": sizes(2, 64, 4, 128, 256, model_type="llama", attention_bias=True),
    "Mistral-7B-v0.1": sizes(
        32, 4096, 32, 14336, 32000, model_type="mistral", num_key_value_heads=8, sliding_window=4096
    ),
    "Qwen2.5-7B": sizes(
        28, 3584, 28, 18944, 152064, model_type="qwen2", num_key_value_heads=4, sliding_window=131072,
        use_sliding_window=False, max_window_layers=28,
    ),
    # NVIDIA/NeMo at 8cfedd7, nemo/collections/llm/gpt/model/nemotron.py, lines 120 to 147
    "Nemotron-4-15B": sizes(32, 6144, 48, 24576, 256000, model_type="nemotron", num_key_value_heads=8),
    "Nemotron-4-340B": sizes(96, 18432, 96, 73728, 256000, model_type="nemotron", num_key_value_heads=8),
    "Arcee as Transformers has it by itself": sizes(32, 2560, 32, 18432, 32000, model_type="arcee"),
    "Qwen3-8B": sizes(36, 4096, 32, 12288, 151936, model_type="qwen3", num_key_value_heads=8, head_dim=128),
    "Qwen3-0.6B": sizes(
        28, 1024, 16, 3072, 151936, model_type="qwen3", num_key_value_heads=8, head_dim=128, tie_word_embeddings=True
    ),
    **{
        f"Qwen3-{size}": sizes(
            layers, hidden, heads, ffn, 151936, model_type="qwen3", num_key_value_heads=8, head_dim=128,
            tie_word_embeddings=hidden < 4096,
        )
        for size, layers, hidden, heads, ffn in (
            ("1.7B", 28, 2048, 16, 6144), ("4B", 36, 2560, 32, 9728), ("14B", 40, 5120, 40, 17408),
            ("32B", 64, 5120, 64, 25600),
        )
    },
    **{
        f"Llama-3.2-{size}": sizes(
            layers, hidden, heads, 8192, 128256, model_type="llama", num_key_value_heads=8, tie_word_embeddings=True,
        )
        for size, layers, hidden, heads in (("1B", 16, 2048, 32), ("3B", 28, 3072, 24))
    },
    "OLMo-2-1124-7B": sizes(32, 4096, 32, 11008, 100352, model_type="olmo2"),
    "OLMo-2-0325-32B": sizes(64, 5120, 40, 27648, 100352, model_type="olmo2", num_key_value_heads=8),
    "Phi-3-mini-4k": sizes(32, 3072, 32, 8192, 32064, model_type="phi3", sliding_window=2047),
    "Phi-4-mini": sizes(
        32, 3072, 24, 8192, 200064, model_type="phi3", num_key_value_heads=8, partial_rotary_factor=0.75,
        tie_word_embeddings=True,
    ),
    "gemma-2-9b": sizes(
        42, 3584, 16, 14336, 256000, model_type="gemma2", num_key_value_heads=8, head_dim=256, sliding_window=4096
    ),
    "gemma-2-27b": sizes(
        46, 4608, 32, 36864, 256000, model_type="gemma2", num_key_value_heads=16, head_dim=128,
        query_pre_attn_scalar=144,
    ),
    "gemma-7b": sizes(
        28, 3072, 16, 24576, 256000, model_type="gemma", num_key_value_heads=16, head_dim=256, hidden_act="gelu"
    ),
    "gemma-3-1b": sizes(
        26, 1152, 4, 6912, 262144, model_type="gemma3_text", num_key_value_heads=1, head_dim=256, sliding_window=512,
    ),
    "gemma-3-27b": sizes(
        62, 5376, 32, 21504, 262208, model_type="gemma3_text", num_key_value_heads=16, head_dim=128,
        query_pre_attn_scalar=168, sliding_window=1024, rope_scaling={"factor": 8.0, "rope_type": "linear"},
    ),
    "starcoder2-3b": sizes(
        30, 3072, 24, 12288, 49152, model_type="starcoder2", num_key_value_heads=2, sliding_window=4096
    ),
    "granite-3.1-8b": sizes(
        40, 4096, 32, 12800, 49155, model_type="granite", num_key_value_heads=8, tie_word_embeddings=True,
        attention_multiplier=0.0078125, embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22,
    ),
    "glm-4-9b": sizes(40, 4096, 32, 13696, 151552, model_type="glm", num_key_value_heads=2, attention_bias=True),
    "GLM-4-32B-0414": sizes(
        61, 6144, 48, 23040, 151552, model_type="glm4", num_key_value_heads=2, head_dim=128, attention_bias=False
    ),
    "SmolLM3-3B": sizes(36, 2048, 16, 11008, 128256, model_type="smollm3", num_key_value_heads=4),
    "Olmo-3-7B": sizes(32, 4096, 32, 11008, 100278, model_type="olmo3", num_key_value_heads=32),
    "Seed-OSS-36B": sizes(64, 5120, 80, 27648, 155136, model_type="seed_oss", num_key_value_heads=8, head_dim=128),
    "ERNIE-4.5-0.3B": sizes(18, 1024, 16, 3072, 103424, model_type="ernie4_5", num_key_value_heads=2, head_dim=128),
}  # fmt: skip


def yarn(factor: float, **more: float) -> Config:
    stated = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}
    return {"rope_scaling": stated | more}


LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
PUBLISHED_MIXTURES: dict[str, Config] = {
    "Qwen1.5-MoE-A2.7B": sizes(
        24, 2048, 16, 5632, 151936, model_type="qwen2_moe", num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, use_sliding_window=False,
    ),
    "Qwen2-57B-A14B": sizes(
        28, 3584, 28, 18944, 151936, model_type="qwen2_moe", num_key_value_heads=4, num_experts=64,
        num_experts_per_tok=8, moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
    ),
    "OLMoE-1B-7B": sizes(16, 2048, 16, 1024, 50304, model_type="olmoe", num_experts=64, num_experts_per_tok=8),
    "granite-3.0-3b-a800m": sizes(
        32, 1536, 24, 512, 49155, model_type="granitemoe", num_key_value_heads=8, num_local_experts=40,
        num_experts_per_tok=8, tie_word_embeddings=True, attention_multiplier=0.015625,
    ),
    "GLM-4.5": sizes(
        92, 5120, 96, 12288, 151552, model_type="glm4_moe", num_key_value_heads=8, head_dim=128, n_routed_experts=160,
        moe_intermediate_size=1536, first_k_dense_replace=3, use_qk_norm=True, attention_bias=True,
        routed_scaling_factor=2.5,
    ),
    "dots.llm1": sizes(
        62, 4096, 32, 10944, 152064, model_type="dots1", num_key_value_heads=32, head_dim=128, n_routed_experts=128,
        num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=2.5,
    ),
    "MiniMax-M2": sizes(
        62, 3072, 48, 1536, 200064, model_type="minimax_m2", num_key_value_heads=8, head_dim=128, rotary_dim=64,
        num_local_experts=256, num_experts_per_tok=8,
    ),
    "Llama-4-Scout": sizes(
        48, 5120, 40, 8192, 202048, model_type="llama4_text", num_key_value_heads=8, head_dim=128,
        intermediate_size_mlp=16384, num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1,
        rope_theta=500_000.0,
        # between wavelengths that are kept and those that are stretched it blends none
        rope_scaling={
            "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Llama-4-Maverick": sizes(
        48, 5120, 40, 8192, 202048, model_type="llama4_text", num_key_value_heads=8, head_dim=128,
        intermediate_size_mlp=16384, num_local_experts=128, num_experts_per_tok=1, interleave_moe_layer_step=2,
        use_qk_norm=False,
    ),
    "Qwen3 with every third layer of experts": sizes(
        6, 256, 4, 512, 1024, model_type="qwen3_moe", num_key_value_heads=2, head_dim=64, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=3,
    ),
    "mixtral-8x7b": sizes(
        32, 4096, 32, 14336, 32000, model_type="mixtral", num_key_value_heads=8, num_local_experts=8,
        num_experts_per_tok=2, sliding_window=None,
    ),
    "qwen3-30b-a3b": sizes(
        48, 2048, 32, 6144, 151936, model_type="qwen3_moe", num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
        norm_topk_prob=True,
    ),
    "qwen3-235b-a22b": sizes(
        94, 4096, 64, 12288, 151936, model_type="qwen3_moe", num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=1536, decoder_sparse_step=1, mlp_only_layers=[],
        norm_topk_prob=True,
    ),
    "gpt-oss-20b": sizes(
        24, 2880, 64, 2880, 201088, model_type="gpt_oss", num_key_value_heads=8, head_dim=64, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128, **yarn(32.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
    ),
    "gpt-oss-120b": sizes(
        36, 2880, 64, 2880, 201088, model_type="gpt_oss", num_key_value_heads=8, head_dim=64, num_local_experts=128,
        num_experts_per_tok=4, sliding_window=128, **yarn(32.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
    ),
    "deepseek-v2": sizes(
        60, 5120, 128, 12288, 102400, model_type="deepseek_v2", n_group=8, topk_group=3,
        topk_method="group_limited_greedy", n_routed_experts=160, num_experts_per_tok=6,
        moe_intermediate_size=1536, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=False,
        routed_scaling_factor=16.0, **LATENT,
        **yarn(40, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-v2-lite": sizes(
        27, 2048, 16, 10944, 102400, model_type="deepseek_v2", n_group=1, topk_group=1, topk_method="greedy",
        n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2,
        first_k_dense_replace=1, norm_topk_prob=False, routed_scaling_factor=1.0, **{**LATENT, "q_lora_rank": None},
        **yarn(40, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-v3": sizes(
        61, 7168, 128, 18432, 129280, model_type="deepseek_v3", n_group=8, topk_group=4, n_routed_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=3,
        norm_topk_prob=True, routed_scaling_factor=2.5, **LATENT,
        **yarn(40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    ),
    "kimi-k2": sizes(
        61, 7168, 64, 18432, 163840, model_type="deepseek_v3", n_group=1, topk_group=1, n_routed_experts=384,
        num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=2.827, **LATENT,
        **yarn(32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    ),
}  # fmt: skip
