"""Chunked: which operators of a step run in chunks of their tokens, and in how many."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Chunked:
    """
    count     of chunks
    product   the head's, of the global view
    tokens    factors of its rows, major to minor; one of them is cut into chunks
    features  factors that it has of its weight
    nodes     the product, what forward makes of it, and what backward makes of that until it has the gradients of the product's operands
    """

    count: int
    product: Node
    tokens: tuple[int, ...]
    features: frozenset[int]
    nodes: frozenset[Node]
