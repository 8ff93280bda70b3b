"""Cache inputs and outputs of a session: which output is the same buffer as which input, and the local tensors known of inputs.

    cache_0_0, an input  [1, 2, 64, 16]     cache_0_0, an output: the same buffer, where the program writes a token to it in place

There is one call per token, so the local tensor of a buffer is remembered until another buffer comes in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshc.program.program import Port


class CachePorts:
    """names: names of the ports that are parts of a cache.

    same    for each output the index of the input with its name and sharding; None if there is none
    beside  indices of outputs that are no part of a cache
    """

    def __init__(self, inputs: Sequence[Port], results: Sequence[Port], names: Collection[str]) -> None:
        places = {port.name: place for place, port in enumerate(inputs) if port.name in names}
        found = [places.get(port.name) for port in results]
        alike = [place is not None and inputs[place].sharding == port.sharding for place, port in zip(found, results, strict=True)]
        self.same = [place if fits else None for place, fits in zip(found, alike, strict=True)]
        self.beside = [at for at, port in enumerate(results) if port.name not in names]
        self._pairs = [(at, place) for at, place in enumerate(self.same) if place is not None]
        self._may_stand = len(self._pairs) + len(self.beside) == len(results) and bool(self._pairs)
        self._as_taken: list[weakref.ref[DTensor] | None] = [None] * len(inputs)

    def stand(self, leaves: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
        """Whether there are caches, and every cache output is the tensor that was passed as its input."""
        return self._may_stand and all([leaves[at] is tensors[place] for at, place in self._pairs])

    def as_taken(self, place: int, tensor: Tensor) -> Tensor | None:
        """The local tensor of an input that `note` has seen; None for another tensor."""
        known = self._as_taken[place]
        return tensor._local_tensor if known is not None and known() is tensor and isinstance(tensor, DTensor) else None

    def note(self, place: int, tensor: Tensor, taken: Tensor) -> None:
        """Remembers `tensor` if the program takes its own local tensor."""
        if isinstance(tensor, DTensor) and taken is tensor._local_tensor:
            self._as_taken[place] = weakref.ref(tensor)
