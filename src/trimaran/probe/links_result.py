"""What a probe of the links between nodes reports, and what of it a cluster's file says."""

from __future__ import annotations

import statistics

from pydantic import Field

from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.noun import Noun


class PairOfNodes(Noun):
    """Two nodes, by number, and the link between them: of all ranks of a node together."""

    first: int = Field(ge=0)
    second: int = Field(ge=0)
    latency_us: float = Field(ge=0)
    bandwidth_gbps: float = Field(gt=0)


class LinksResult(Noun):
    """All pairs of neighbours of a ring through the nodes."""

    nodes: int = Field(gt=1)
    ranks_per_node: int = Field(gt=0)
    pairs: tuple[PairOfNodes, ...] = Field(min_length=1)

    def joined(self, node: Cluster) -> Cluster:
        """The cluster of so many nodes as the one that was measured, joined by the median of the links."""
        slowest = min(self.pairs, key=lambda pair: pair.bandwidth_gbps)
        inter = Link(
            bandwidth_gbps=float(f"{statistics.median(pair.bandwidth_gbps for pair in self.pairs):.4g}"),
            latency_us=float(f"{statistics.median(pair.latency_us for pair in self.pairs):.4g}"),
        )
        said = (
            f"links of {len(self.pairs)} pairs of {self.nodes} nodes, {self.ranks_per_node} ranks each; the slowest, "
            f"nodes {slowest.first} and {slowest.second}: {slowest.bandwidth_gbps:.4g} Gbit/s"
        )
        return node.model_copy(update={"nodes": self.nodes, "inter": inter, "source": f"{node.source}; {said}"})
