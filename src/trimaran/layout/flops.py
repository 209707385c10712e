"""TFLOPs, MFU and days: the calculators that the field's tables use, each by name.

B is the global batch, s the sequence, L layers, h hidden, V the vocabulary padded to 128 x TP, N parameters. Trimaran's
own figures are of `model_flops`, those of Megatron-Core since 2024 of `megatron_core`, which counts the half of the
scores that a causal mask keeps. The other five count recomputed work as useful work, so figures of the two kinds must
never be compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimaran.nouns.flops_formula import FlopsFormula
from trimaran.nouns.model import LayerKind, Model, padded_vocab
from trimaran.nouns.workload import Workload
from trimaran.operators.counts import (
    further_tokens_forward_operations,
    head_forward_operations,
    layers_forward_operations,
)

# What Trimaran's own figures count, MFU among them: so MFU is TFLOPs over the peak of the precision.
OWN_FORMULA: FlopsFormula = "model_flops"

# What each counts, for whoever lays its figure beside another's.
COUNTED: Mapping[FlopsFormula, str] = {
    "megatron_eq3_k4": "4 x forward, layers computed again among them",
    "megatron_eq3_k3": "3 x forward, scores in full",
    "bs_old_96BsLh2": "4 x forward without scores and head",
    "2kN_k4": "4 x forward of parameters alone",
    "2kN_k3": "3 x forward of parameters alone",
    "model_flops": "3 x forward, scores in full, nothing computed again",
    "megatron_core": "3 x forward, of the scores the half that a causal mask keeps, nothing computed again",
}

# BigScience's table of a 1.3B model computes with a round N, whatever the model's exact count is.
BIGSCIENCE_1B3_PARAMETERS = 1.3e9


def megatron_flops(model: Model, seq_len: int, sequences: float, tp: int, passes: int) -> float:
    """24 k B s L h^2 (1 + s/6h + V/(4 k L h)): Narayanan et al., arXiv 2104.04473, eq. (3).

    `passes` k is 4 with full recompute (giving their 96 and V/16Lh) and 3 without (72, V/12Lh
    as printed; the tables keep V/16Lh, and so does this function).
    """
    h, layers, s = model.hidden, model.layers, seq_len
    v = padded_vocab(model.vocab, tp)
    return 24.0 * passes * sequences * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))


def model_flops(model: Model, seq_len: int, sequences: float, tp: int = 1) -> float:
    """Operations that the model itself needs, forward and backward (3 x forward), none recomputed.

    Scores are counted in full, the convention of PaLM's MFU (arXiv 2204.02311, appendix B).
    """
    ends = head_forward_operations(model, seq_len, tp) + further_tokens_forward_operations(model, seq_len, tp)
    return 3.0 * sequences * (layers_forward_operations(model, seq_len) + ends)


def megatron_core_flops(model: Model, seq_len: int, sequences: float, tp: int = 1) -> float:
    """What Megatron-Core's num_floating_point_operations counts (megatron/training/training.py at d98e8a6, line 802).

    3 x forward: linear products, the half of the scores that a causal mask keeps whatever the window, the experts that
    a token meets, and of latent attention's norms a product each; no router. The vocabulary is padded.
    """
    h, s = float(model.hidden), float(seq_len)
    scores = model.heads * (model.head_dim + model.value_dim) * s / 2.0
    latent = model.latent_attention
    attention = h * (model.attention_hidden + 2 * model.kv_hidden) + model.context_hidden * h
    if latent is not None:
        attention = float(latent.parameters(model.hidden, model.heads))
    experts = model.moe_ffn_hidden * (model.top_k + model.shared_experts)
    mlp: dict[LayerKind, int] = {"dense": model.ffn_hidden, "experts": experts}
    layers = sum(
        count * (attention + scores + model.mlp_matrices * h * mlp[kind]) for kind, count in model.kinds.items()
    )
    further = attention + scores + model.mlp_matrices * h * mlp[model.main_kind] + model.joining_parameters
    logits = (1 + model.mtp_depth) * h * padded_vocab(model.vocab, tp)
    return 6.0 * sequences * s * (layers + model.mtp_depth * further + logits)


def iteration_flops(workload: Workload, tp: int, formula: FlopsFormula) -> float:
    """Operations of one iteration by `formula`, over all devices."""
    model, s, batch = workload.model, workload.seq_len, float(workload.global_batch)
    if formula == "megatron_eq3_k4":
        return megatron_flops(model, s, batch, tp, passes=4)
    if formula == "megatron_eq3_k3":
        return megatron_flops(model, s, batch, tp, passes=3)
    if formula == "bs_old_96BsLh2":
        return 96.0 * batch * s * model.layers * model.hidden**2
    if formula in ("2kN_k4", "2kN_k3"):
        return 2.0 * (4 if formula == "2kN_k4" else 3) * BIGSCIENCE_1B3_PARAMETERS * batch * s
    if formula == "megatron_core":
        return megatron_core_flops(model, s, batch, tp)
    return model_flops(model, s, batch, tp)


def tflops_per_device(workload: Workload, tp: int, devices: int, sec_per_it: float, formula: FlopsFormula) -> float:
    """TFLOP/s of one device by `formula`."""
    return iteration_flops(workload, tp, formula) / sec_per_it / devices / 1e12


def mfu(workload: Workload, tp: int, devices: int, sec_per_it: float, peak_tflops: float) -> float:
    """Model-FLOPs utilisation: model operations a second over the devices' peak (0 to 1)."""
    return tflops_per_device(workload, tp, devices, sec_per_it, OWN_FORMULA) / peak_tflops


def aggregate_pflops(tflops: float, devices: int) -> float:
    """The tables' "Est. Aggr. PetaFLOPs": TFLOPs x devices / 1000 (the Fugaku tables divide by 1024)."""
    return tflops * devices / 1000


def days_to_train(sec_per_it: float, iterations: float) -> float:
    """Days that `iterations` take."""
    return sec_per_it * iterations / 86400.0
