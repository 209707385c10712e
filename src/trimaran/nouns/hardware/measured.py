"""What a probe measured of a machine: products, attention, collectives, and slots that work at once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trimaran.nouns.noun import Noun
from trimaran.nouns.precision import ProbedRate


def four_digits(number: float) -> float:
    """Four significant digits: more would be noise, and files stay readable."""
    return float(f"{number:.4g}")


class MatmulRate(Noun):
    """One measured matrix product: M x K times K x N in `precision` ran at `tflops`."""

    precision: ProbedRate
    m: int = Field(gt=0)
    n: int = Field(gt=0)
    k: int = Field(gt=0)
    tflops: float = Field(gt=0)


class CollectiveTime(Noun):
    """One measured collective or send: `bytes` over `ranks` ranks took `time_us`."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
    ranks: int = Field(gt=1)
    bytes: int = Field(gt=0)
    time_us: float = Field(gt=0)


class AttentionTime(Noun):
    """One measured causal attention over `batch_heads` (batch x heads) sequences, in microseconds.

    The fused kernel that PyTorch chooses; `backward_us` is the backward alone.
    """

    precision: ProbedRate
    batch_heads: int = Field(gt=0)
    seq_len: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    forward_us: float = Field(gt=0)
    backward_us: float = Field(gt=0)


# Seconds between meetings: about those of ranks of TP on a CPU, and those from which on more make no difference. Of 4
# slots on 2 cores products took 2.5 times as long as one's between the former, 2.3 at 50 ms, 2.1 at 0.25 s and at 1 s.
OFTEN_S, SELDOM_S = 0.002, 0.25


class Contention(Noun):
    """How much longer a slot takes when `ranks` slots of its node work at once than when it works alone.

    1 means that the slots do not feel each other. Slots that outnumber the cores are in it too:
    two cores that four ranks share show about 2. So is that slots which meet again and again, as ranks
    do, wait for the slowest of them each time. `matmul` is for matrix products, `memory` for
    passes over large tensors, `passes` for those over activations, which a cache may hold, `overhead` for small
    operators; all between meetings of SELDOM_S. `often` is for matrix products between meetings of OFTEN_S, whose own
    time is not in it.
    """

    ranks: int = Field(gt=1)
    matmul: float = Field(gt=0)
    memory: float = Field(gt=0)
    passes: float | None = Field(default=None, gt=0, description="None, not measured: as `memory`")
    overhead: float = Field(gt=0)
    often: float | None = Field(default=None, gt=0, description="None, not measured: as `matmul`")

    @property
    def of_meetings(self) -> float:
        """How much longer anything takes between meetings of OFTEN_S than between those of SELDOM_S."""
        return 1.0 if self.often is None else max(1.0, self.often / self.matmul)

    @property
    def of_passes(self) -> float:
        """That of passes over activations."""
        return self.memory if self.passes is None else self.passes
