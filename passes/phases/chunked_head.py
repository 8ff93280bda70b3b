"""Operators of a step's head and loss that run in chunks of their tokens, and the number of chunks."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class ChunkedHead:
    """
    count     number of chunks
    product   the head's matrix product, in the global view
    tokens    factors of the product's rows, major to minor; one of them is cut into chunks
    features  factors that the product has from its weight
    nodes     the product, forward operators that depend on it, and backward ones up to the gradients of the product's operands
    """

    count: int
    product: Node
    tokens: tuple[int, ...]
    features: frozenset[int]
    nodes: frozenset[Node]
