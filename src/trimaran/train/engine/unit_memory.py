"""Memory of units that have it only while they are worked with.

On a CPU layers of one kind and size take turns at two places that are kept. If each took memory and gave it back, a
heap would fill what one layer left with activations, and find no room for the next: ZeRO 3 held more than ZeRO 2.
Any other unit takes memory and gives it back, and so does each on a GPU, whose allocator keeps large blocks. What is as
large by chance, as an embedding or the experts of a layer, has a place apart: it may be worked with beside the layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.train.comm.device_kind import on_gpu

# While one unit is worked with, the next is gathered, or the last is summed.
PLACES = 2


class UnitMemory:
    """A tensor for each of the `units`, a kind and a length, of which those that take turns lie in the same place."""

    def __init__(self, units: Sequence[tuple[str, int]], dtype: torch.dtype, device: torch.device) -> None:
        counts, places = Counter(units), defaultdict[tuple[str, int], list[Tensor]](list)
        taking_turns = {unit for unit, count in counts.items() if count > PLACES and not on_gpu(device)}
        tensors = []
        for unit in units:
            alike = places[unit]
            taken_before = unit in taking_turns and len(alike) >= PLACES
            place = alike[-PLACES] if taken_before else torch.empty(unit[1], dtype=dtype, device=device)
            alike.append(place)
            tensors.append(place[:])
        self.tensors = tuple(tensors)
        self._lasting = {place.untyped_storage()._cdata for unit in taking_turns for place in places[unit]}
        # which tensor has what a storage holds
        self._holders: dict[int, Tensor] = {}
        for tensor in tensors:
            self._resize(tensor, 0)

    def holder(self, tensor: Tensor) -> Tensor | None:
        """The tensor that now has the memory of `tensor`: itself, one that it takes turns with, or none."""
        return self._holders.get(tensor.untyped_storage()._cdata)

    def take(self, tensor: Tensor) -> bool:
        """Give a tensor its memory; whether it had none. Raises RuntimeError where another has it."""
        holder = self.holder(tensor)
        if holder is tensor:
            return False
        if holder is not None:
            raise RuntimeError("two units that take turns at a place are worked with at once")
        self._resize(tensor, tensor.numel() * tensor.element_size())
        self._holders[tensor.untyped_storage()._cdata] = tensor
        return True

    def give_back(self, tensor: Tensor) -> None:
        """Free a tensor's memory, if it has any; it and its views keep their shapes."""
        if self.holder(tensor) is tensor:
            del self._holders[tensor.untyped_storage()._cdata]
            self._resize(tensor, 0)

    def _resize(self, tensor: Tensor, to_bytes: int) -> None:
        if tensor.untyped_storage()._cdata not in self._lasting:
            tensor.untyped_storage().resize_(to_bytes)
