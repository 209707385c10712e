"""Router and dispatcher: how a mixture chooses the experts of a token, and how tokens travel to them and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from trimaran.nouns.noun import Noun

DispatcherName = Literal["allgather", "alltoall", "deepep", "hybridep"]


@dataclass(frozen=True)
class Dispatcher:
    """What one way of dispatching sends, moves, waits for and holds.

    `merges`: a token travels once to each node and once to each rank that has experts of it, else once for each of its
    experts; with `gathers` every rank is sent all tokens of the group instead. `passes` are those over the copies of
    tokens that permute them, at the dispatch and again at the combine; `sorts` further ones where a rank has several
    experts. Where the host waits for the counts of tokens that arrive, the device waits for the operators that it then
    launches, so many as are `waited` for until a long one. When experts' results come back so many copies of what
    experts are given are `held` beside those results, `held_sorted` further ones where a rank has several experts, and
    `held_arriving` times the tokens that arrived before they were copied. `inside` and `across` are the shares of a
    link that its kernels reach; 0: those of collectives.
    """

    name: DispatcherName
    gathers: bool = False
    merges: bool = False
    passes: float = 2.0
    sorts: float = 0.0
    waited: float = 0.0
    held: float = 0.0
    held_sorted: float = 0.0
    held_arriving: float = 0.0
    inside: float = 0.0
    across: float = 0.0


# Megatron-Core, megatron/core/transformer/moe/token_dispatcher.py at d98e8a6: MoEAllGatherTokenDispatcher (line 233),
# MoEAlltoAllTokenDispatcher (line 375; permute at 671, sorts chunks by expert behind the exchange), _DeepepManager
# (line 1225; permutes what arrived, lines 1424 to 1468) and _HybridEPManager (line 1001), which permutes as it sends.
# DeepEP's own measurements, docs/legacy.md and README.md at 0297fc8, are of logical bytes, the rank's own among them:
# 7/8 of 153 GB/s on H800's NVLink of 200, of 726 on B200's of 900; 3/4 of 58 and of 61 GB/s and 7/8 of 51 on cards of
# 50.
# The host waits for counts (lines 594 to 616: before the exchange; of DeepEP and HybridEP: within it) and then launches
# the exchange of tokens and weights, or the maps and the permutation of what came and the experts' first product.
# What is held is what Python still refers to in moe_layer.py, custom_forward (lines 658 to 696) and
# routed_experts_compute (536 to 570): the permuted copies that are sent, what came of them before it is sorted, and
# those that come back.
_NVLINK, _RDMA = 0.70, 0.90
DISPATCHERS: Mapping[DispatcherName, Dispatcher] = {
    dispatcher.name: dispatcher
    for dispatcher in (
        Dispatcher("allgather", gathers=True, waited=9.0, held_arriving=2.0),
        Dispatcher("alltoall", sorts=2.0, waited=3.0, held=2.0, held_sorted=1.0),
        Dispatcher("deepep", merges=True, waited=20.0, held_arriving=2.0, inside=_NVLINK, across=_RDMA),
        Dispatcher("hybridep", merges=True, waited=8.0, passes=0.0, inside=_NVLINK, across=_RDMA),
    )
}

RouterScores = Literal["softmax", "sigmoid"]


class Router(Noun):
    """A router that scores all experts of a layer and sends a token to the top_k best.

    Unstated it is Mixtral's and Qwen3's: a softmax over all experts, the chosen weights scaled to sum up to 1. In a
    model with groups of experts a token goes to those of its best groups alone, a group's score being the sum of its
    `group_best` best (DeepSeek-V2, arXiv 2405.04434, section 2.2.2; V3, arXiv 2412.19437, section 2.1.2).
    """

    scores: RouterScores = "softmax"
    normalised: bool = Field(default=True, description="a token's weights are divided by their sum")
    scale: float = Field(default=1.0, gt=0, description="a token's weights are multiplied by it")
    group_best: int = Field(
        default=1, ge=1, le=1_000_000, description="experts of a group whose scores add up to the group's"
    )
    bias: bool = Field(
        default=False,
        description="each expert has a bias that counts in the choice alone, and is moved against its load",
    )

    def check_groups(self, experts: int, groups: int, chosen: int, top_k: int) -> None:
        """Raise ValueError, one line, where a token's top_k experts cannot be of so many `chosen` groups of experts."""
        if not groups and not chosen:
            return
        if not 0 < chosen <= groups:
            raise ValueError(
                f"top_groups {chosen} is not one of 1 to expert_groups {groups}: state both, or leave both out"
            )
        if experts % groups:
            raise ValueError(f"experts {experts} is not a multiple of expert_groups {groups}: groups are of one size")
        each = experts // groups
        if top_k > chosen * each:
            raise ValueError(
                f"top_k {top_k} is more than the {each} experts of each of top_groups {chosen}: raise top_groups"
            )
        if self.group_best > each:
            raise ValueError(
                f"router.group_best {self.group_best} is more than the {each} experts of each of expert_groups "
                f"{groups}: lower it"
            )
