"""What the ranks of a probe report."""

from __future__ import annotations

from pydantic import Field

from trimaran.nouns.hardware.measured import AttentionTime, CollectiveTime, Contention, MatmulRate
from trimaran.nouns.noun import Noun
from trimaran.nouns.precision import ProbedRate
from trimaran.nouns.probed_model import PartTime


class ProbeResult(Noun):
    """Everything that rank 0 measured, alone and with the others; context is the median over ranks."""

    device_name: str
    mem_gib: float = Field(gt=0)
    multiprocessors: int = Field(ge=0)
    context_gib: float = Field(ge=0)
    mem_bandwidth_gb_s: float = Field(gt=0)
    op_overhead_us: float = Field(gt=0)
    experts_code_mib: dict[ProbedRate, float] = Field(default_factory=dict)
    matmul: tuple[MatmulRate, ...]
    eight_bit_tflops: float = Field(default=0.0, ge=0, description="best rate of 8-bit products; 0: it has none")
    attention: tuple[AttentionTime, ...]
    collectives: tuple[CollectiveTime, ...]
    contention: tuple[Contention, ...] = ()
    parts: tuple[PartTime, ...] = ()
