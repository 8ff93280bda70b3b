"""Step counters in an optimizer's groups: `group["k"]` follows the counter of the program, and may be written.

    before a call    group["k"], if the user has changed it  ->  the state of every parameter of the group
    after a call     the state of one of them                ->  group["k"]
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from meshc.optimizer.group_counts import number_of
from meshc.optimizer.optimizer import AnyOptimizer, members_of

if TYPE_CHECKING:
    from meshc.runtime.state.store import Store
    from meshc.runtime.state.stored_tensor import StoredTensor


class OptimizerCounts:
    """The step counters of one optimizer, whose state a store holds."""

    def __init__(self, store: Store, optimizer: AnyOptimizer) -> None:
        mine: dict[str, list[StoredTensor]] = defaultdict(list)
        for held in store.held.values():
            if held.fresh is not None and number_of(held.fresh) is not None:
                mine[held.of].append(held)
        self.rows: list[tuple[torch.optim.Optimizer, int, str, list[StoredTensor]]] = []
        places = [(one, position) for one in members_of(optimizer) for position in range(len(one.param_groups))]
        for member, position in places:
            by_name: dict[str, list[StoredTensor]] = defaultdict(list)
            for parameter in member.param_groups[position]["params"]:
                for held in mine.get(store.parameter_key(parameter) or "", ()):
                    assert held.fresh is not None
                    by_name[number_of(held.fresh) or ""].append(held)
            self.rows += [(member, position, name, helds) for name, helds in by_name.items()]
        self.seen = [float(helds[0].buffer) for *_, helds in self.rows]

    def read_changes(self) -> None:
        """Before a call: takes values that the user or a loader has written."""
        for index, (member, position, name, helds) in enumerate(self.rows):
            value = float(member.param_groups[position][name])  # loaders put other groups there
            if value != self.seen[index]:
                for held in helds:
                    held.buffer.fill_(value)
                self.seen[index] = value

    def write_back(self) -> None:
        """After a call: writes the counters into the groups. A rank whose pipeline stage has no parameter of a group leaves the group."""
        for index, (member, position, name, helds) in enumerate(self.rows):
            own = next((held for held in helds if not held.lags), None)
            group = member.param_groups[position]
            if own is not None:
                value = float(own.buffer)
                group[name] = int(value) if isinstance(group[name], int) else value
                self.seen[index] = value
