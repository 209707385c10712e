"""The sums over copies that a layout chose."""

from __future__ import annotations

from trimaran.layout.compression import FORMATS
from trimaran.layout.layout import Layout
from trimaran.train.engine.copy_sums import CompressedSums, CopySums
from trimaran.train.engine.flat_weights import FlatWeights
from trimaran.train.engine.low_rank_sums import LowRankSums


def chosen_sums(layout: Layout, flat: FlatWeights) -> CopySums:
    """Exact ones, in a narrow format, or by factors."""
    if layout.compression == "none":
        return CopySums()
    sent_as = FORMATS.get(layout.compression)
    return LowRankSums(flat) if sent_as is None else CompressedSums(flat, sent_as)
