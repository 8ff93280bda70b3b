"""Offload against recompute: values of forward to keep on the host until backward reads them, within a host budget.

    h100   layer 0's values are read again in 300 ms, and are there and back in 4    one or two of each layer hide behind its computing
           of the last layer's                                                       copies would be waited for: they stay
    cpu    the rank makes copies itself                                              they take what they take

What copies take is in one scale with recomputing (`trade.py`). While a layer runs so many bytes can leave as its link moves meanwhile:
copies of these count for little, and no more of the layer goes, nor more of all than the host has room for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Final

from torch.fx import Graph, Node

from meshc.cost.devices import Device
from meshc.cost.links import copy_seconds
from meshc.cost.roofline import seconds
from meshc.ir import is_tensor, local_bytes, record
from meshc.passes.memory.host_copies import has_known_size, roots_of, start_seconds
from meshc.passes.memory.policies import layer_of
from meshc.passes.memory.recomputable import Recomputable
from meshc.passes.memory.trade import KeptValues, Trade

HIDDEN: Final = 0.02
"""The share of their seconds that hidden copies count for: kernels of the device have a little less of its memory meanwhile."""
HIDES: Final = 0.6
"""How much of a layer's seconds in forward can hide copies: these come one after another, and not evenly."""
TURNS: Final = 12
"""In which other values are looked for, in the place of those that were too many."""


class HostTrade:
    """Of the values that `can` has. `room`: bytes of the host; `fixed`: what stays as it is; `takes`: seconds of recomputing values."""

    def __init__(
        self, graph: Graph, can: Recomputable, takes: Mapping[Node, float], device: Device, room: int, fixed: Collection[Node] = ()
    ) -> None:
        self.can, self.takes, self.room = can, takes, room
        home = roots_of(can.forward)
        may = [
            node for node in can.forward
            if home.get(node) is node and is_tensor(node) and has_known_size(record(node)) and node not in can.learned and node not in fixed
            and not any(user.op == "output" for user in node.users)
        ]  # fmt: skip
        self.seconds = {node: 2 * copy_seconds(local_bytes(record(node)), device) for node in may}
        self.hides: defaultdict[str, float] | None = None
        if device.host is not None:
            waits = _idle_seconds(can, start_seconds(graph, device))
            self.seconds = {node: takes for node, takes in self.seconds.items() if waits.get(node, 0.0) >= takes}
            self.hides = defaultdict(float)
            for node in can.forward:
                self.hides[layer_of(node)] += HIDES * seconds(node, device)

    @property
    def least(self) -> int:
        """The fewest bytes that are kept on the device, if the host has room."""
        return Trade(self.can, self.takes, copies=self.seconds).keep_least.bytes

    def within(self, most: int) -> tuple[KeptValues, float]:
        """As `Trade.within`."""
        may, share = dict(self.seconds), 1.0 if self.hides is None else HIDDEN
        for _ in range(TURNS):
            copies = {node: share * takes for node, takes in may.items()}
            found = Trade(self.can, self.takes, copies=copies).within(most)
            over = self._excess_values(found[0])
            if not over:
                return found
            may = {node: takes for node, takes in may.items() if node not in over}
        return Trade(self.can, self.takes).within(most)

    def _excess_values(self, kept: KeptValues) -> set[Node]:
        """Of what would go, what the host has no room for or a layer does not hide, first what takes least to be recomputed for
        the seconds of its copies."""
        room, left = self.room, dict(self.hides or {})
        over: set[Node] = set()
        there = [node for node in self.can.forward if node in kept.there]
        for node in sorted(there, key=lambda node: -self.takes.get(node, 0.0) / self.seconds[node]):
            layer, takes, size = layer_of(node), self.seconds[node] / 2, local_bytes(record(node))
            if size > room or (self.hides is not None and takes > left[layer]):
                over.add(node)
                continue
            room -= size
            if self.hides is not None:
                left[layer] -= takes
        return over


def _idle_seconds(can: Recomputable, at: Mapping[Node, float]) -> dict[Node, float]:
    """Seconds between the last reader of a value in forward and the first in backward, of which it may be one that recomputes another."""
    first: dict[Node, float] = {}
    last: dict[Node, float] = {}
    late = set(can.backward)
    for node in reversed(can.forward):
        for user in node.users:
            if user in late:
                first[node] = min(first.get(node, at[user]), at[user])
            elif user in at:
                last[node] = max(last.get(node, at[user]), at[user])
                if user in can.operands and user in first:
                    first[node] = min(first.get(node, first[user]), first[user])
    return {node: start - last.get(node, at[node]) for node, start in first.items()}
