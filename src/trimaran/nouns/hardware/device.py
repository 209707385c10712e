"""Device: one rank's worth of hardware, as a datasheet or a probe states it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from trimaran.nouns.noun import Noun
from trimaran.nouns.precision import PRECISIONS, PrecisionName, Rate
from trimaran.nouns.spoken.noted import Noted


class Device(Noun):
    """One rank's worth of hardware: a GPU, or a slot of a CPU node with its cores.

    `peak_tflops` and `mem_bandwidth_gb_s` (1e9 bytes/s) are datasheet or, where a probe wrote
    them, measured ceilings. A precision that the device lacks is left out of `peak_tflops`.
    """

    name: str = ""
    kind: Literal["gpu", "cpu"]
    peak_tflops: dict[Rate, float]
    mem_gib: float = Field(gt=0, le=1e6)
    mem_bandwidth_gb_s: float = Field(gt=0, le=1e9)
    matmul_share: float = Field(
        default=0.0, ge=0, le=1, description="best 16-bit matmul rate measured over peak; 0: none"
    )
    narrow_share: float = Field(
        default=0.0, ge=0, le=1, description="best 8-bit matmul rate measured over its peak; 0: as `matmul_share`"
    )
    transposes_fp8: bool = Field(
        default=False, description="fp8 products take their operands in one order alone, so some are kept in both"
    )
    sustained_share: float = Field(
        default=0.95, gt=0, le=1, description="what hours of training keep up of that rate: power and clocks"
    )
    flash_share: float = Field(
        default=0.0, ge=0, le=1, description="rate of flash attention's kernels over peak, as published; 0: none"
    )
    cudnn_share: float = Field(
        default=0.0, ge=0, le=1, description="the same of cuDNN's flash attention; 0: as `flash_share`"
    )
    usual_stack: str = Field(default="", description="the stack that a plan assumes where nobody names one")
    context_gib: float = Field(default=0.0, ge=0, description="runtime context: CUDA, or the process itself")
    multiprocessors: int = Field(default=0, ge=0, description="SMs of a GPU, for wave quantization")
    host_link_gb_s: float = Field(
        default=0.0, ge=0, le=1e6, description="one direction of the link between device and host; 0: not stated"
    )
    host_mem_gb_s: float = Field(
        default=0.0, ge=0, le=1e6, description="bandwidth of the host's memory, a device's share of it; 0: not stated"
    )
    cores: int = Field(default=0, ge=0, description="CPU cores that one slot computes with")
    kubernetes_resource: str = Field(
        default="", description="as which a device plugin of Kubernetes counts it, as nvidia.com/gpu; empty: not stated"
    )
    # sky/utils/gpu_names.py of skypilot-org/skypilot, commit 7e595970a806
    skypilot_name: str = Field(default="", description="SkyPilot's name of it, as H100; empty: not stated")
    noted: tuple[Noted, ...] = Field(
        default=(), description="devices as which measured rows are read whose column hardware has these words"
    )
    clock_ghz: float = Field(default=0.0, ge=0)
    op_overhead_us: float = Field(default=0.0, ge=0, description="measured cost of one small operator; 0: prior")
    experts_code_mib: dict[Rate, float] = Field(
        default_factory=dict,
        description="CPU: memory that code takes which is generated for products of one shape of experts' matrices",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for precision, tflops in self.peak_tflops.items():
            if not 0 < tflops < 1e6:
                raise ValueError(f"peak_tflops.{precision} {tflops} is not between 0 and 1e6 TFLOP/s")
        for precision, mib in self.experts_code_mib.items():
            if not 0 <= mib < 1e6:
                raise ValueError(f"experts_code_mib.{precision} {mib} is not between 0 and 1e6 MiB")
        if not self.peak_tflops:
            raise ValueError("peak_tflops is empty: state at least one precision")
        return self

    def attention_share(self, kernel: str) -> float:
        """The published rate of flash attention over peak, by whose kernel it is (Stack.flash_kernel); 0: none."""
        return (self.cudnn_share if kernel == "cudnn" else 0.0) or self.flash_share

    def attention_sustained(self, kernel: str) -> float:
        """What hours of training keep up of that rate.

        cuDNN's is published at a fixed clock below the highest (arXiv 2407.08608, section 4) and draws less power than
        the best product, so a power limit does not lower it: Qwen3 at 131,072 tokens, most of whose time is
        attention's, reaches it.
        """
        return 1.0 if kernel == "cudnn" and self.cudnn_share else self.sustained_share

    def peak(self, precision: PrecisionName) -> float | None:
        """Peak TFLOP/s of matrix products in `precision`, or None where the device has none.

        A CPU makes fp16 products in fp32 (trimaran.train.model.product).
        """
        if precision == "fp16" and self.kind == "cpu":
            return self.peak_tflops.get("fp16", self.peak_tflops.get("fp32"))
        return self.peak_tflops.get(PRECISIONS[precision].rate)
