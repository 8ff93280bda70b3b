"""Sink side of a minimum cut, by scipy's maximum flow (Ford and Fulkerson, 1956)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from meshc.lazy_module import LazyModule

if TYPE_CHECKING:
    from scipy import sparse
    from scipy.sparse import csgraph
else:
    sparse, csgraph = LazyModule("scipy.sparse"), LazyModule("scipy.sparse.csgraph")


def behind_the_cut(capacities: Mapping[tuple[int, int], int], count: int, source: int = 0, sink: int = 1) -> set[int]:
    """Nodes (0 to `count` - 1) on the sink side of the minimum cut closest to the sink: those with a path to the sink in the residual
    network of a maximum flow. Each of `capacities`, by (node, node), is below 2**31, and so is the sum of the finite ones."""
    rows, columns = zip(*capacities, strict=True)
    capacity = sparse.csr_matrix((np.fromiter(capacities.values(), np.int32), (rows, columns)), (count, count))
    left = capacity.astype(np.int64) - csgraph.maximum_flow(capacity, source, sink).flow
    behind = sparse.csr_matrix(left.T)
    found, work = {sink}, [sink]
    while work:
        at = work.pop()
        row = slice(behind.indptr[at], behind.indptr[at + 1])
        for other in behind.indices[row][behind.data[row] > 0].tolist():
            if other not in found:
                found.add(other)
                work.append(other)
    return found
