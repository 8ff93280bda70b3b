"""Expert rebalancing between ranks: permutes rows of parameters and optimizer state, and updates the buffer of expert slots.

    meshc_slots  [0 1 2 3]  ->  [0 2 1 3]         experts 1 and 2 swap slots, and so ranks, if each rank has two slots
    gate_up_proj, its exp_avg, its exp_avg_sq ..  rows 1 and 2 are sent; nothing else moves

    meshc_copies [[-1] [-1]]  ->  [[-1] [0]]      the second rank has a copy of the expert in slot 0; nothing is sent for it

The user's DTensors keep experts in the model's order. Once experts have moved these are copies, as of any storage that torch's placements
cannot describe, and have memory of their own only from `sync` to the next step (`StoredTensor.release_copy`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshc.cost.expert_balance import ExpertPlacement
from meshc.errors import StateError
from meshc.frontend.expert_placement import COPIES, SLOTS, copies_per_rank, slots_of, weights_of
from meshc.ir import layouts
from meshc.ir.keys import Kind, key_of
from meshc.report.rebalance_report import RebalanceReport, plan_layer_move
from meshc.runtime.comm import reorder
from meshc.runtime.comm.stage_transfers import StageTransfers
from meshc.runtime.state import ownership
from meshc.runtime.state.stored_tensor import StoredTensor, inverse

if TYPE_CHECKING:
    from meshc.runtime.state.store import Store


@dataclass
class ExpertLayer:
    """The experts at a module's path, which are split among `groups` groups of ranks: of a model's store, or of a saved program.

    spread         present slots of experts, and of their copies
    spare          places of each group that may be used for copies
    rows           the stored tensors with a row per expert; `buffer` is None where other ranks have it
    slots, copies  tables of the slots, as the program reads them; None: on other ranks, or there is none
    """

    path: str
    groups: int
    spread: ExpertPlacement
    spare: int
    rows: Sequence[StoredTensor]
    slots: Tensor | None
    copies: Tensor | None

    def received_bytes(self, wanted: Sequence[int]) -> int:
        """Bytes that the rank with the most is sent, if the experts move to the slots `wanted`."""
        source = self._source(wanted)
        return sum(reorder.received_bytes(held.sharding, held.home.mesh, source, held.dtype.itemsize) for held in self.rows)

    def move(self, wanted: ExpertPlacement) -> None:
        """Moves expert i to slot wanted.slots[i], and sets its copies to wanted.copies. All ranks call this, in the same order, between two
        calls."""
        source = self._source(wanted.slots)
        with torch.no_grad():
            for held in self.rows if source != sorted(source) else ():
                if held.buffer is not None:
                    held.buffer.copy_(held.home.permute_rows(held.buffer, held.sharding, source))
                    _record_slots(held, wanted.slots)
            for table, values in ((self.slots, wanted.slots), (self.copies, wanted.copies)):
                if table is not None:
                    table.flatten()[: len(values)] = torch.tensor(values, dtype=torch.int64)
        self.spread = wanted

    def _source(self, wanted: Sequence[int]) -> list[int]:
        """For each slot of `wanted` the present slot of its expert."""
        return [self.spread.slots[expert] for expert in inverse(wanted)]


def rebalance(
    layers: Sequence[ExpertLayer], loads: Mapping[str, Sequence[float]], least: float, move: Callable[[ExpertLayer, ExpertPlacement], None]
) -> RebalanceReport:
    """Moves experts, by `move`, where `loads` by path say so (`plan_layer_move`). All layers are looked at before any moves."""
    plans = [plan_layer_move(one.path, loads[one.path], one.spread, one.groups, least, one.spare, one.received_bytes) for one in layers]
    for layer, plan in zip(layers, plans, strict=True):
        if plan.changed:
            move(layer, plan.spread)
    return RebalanceReport(tuple(plans))


def key_in(path: str, kind: Kind, name: str) -> str:
    """The key of a layer's parameter or buffer."""
    return key_of(kind, f"{path}.{name}".lstrip("."))


def rows_among(stored: Iterable[StoredTensor], weights: Collection[str], path: str, experts: int) -> list[StoredTensor]:
    """Those of stored tensors that have a row for each expert: parameters with the keys `weights`, and their state. Raises StateError for
    state that mixes experts."""
    found = [held for held in stored if held.key in weights or held.of in weights]
    mixed = [held for held in found if held.shape[:1] not in ((experts,), (), (1,))]
    if mixed:
        raise StateError(
            f"{mixed[0].name} is of shape {list(mixed[0].shape)}, and experts of {path} cannot be moved with state that has no row for "
            f"each of the {experts}\n  what to do: compile with another optimizer for the experts, or leave them where they are (without "
            "rebalance, or --rebalance-every)"
        )
    return [held for held in found if held.shape[:1] == (experts,)]


def layer_of(store: Store, path: str, groups: int, spare: int = 0) -> ExpertLayer:
    """The layer of experts at a path of the store's model."""
    module = store.model.get_submodule(path)
    slots, copies = store.buffer(key_in(path, "buffer", SLOTS)), None
    spread = ExpertPlacement(tuple(map(int, slots.tolist())))
    if copies_per_rank(module):
        copies = store.buffer(key_in(path, "buffer", COPIES))
        spread = replace(spread, copies=tuple(map(int, copies[:groups].flatten().tolist())))
    weights = {held.key for name in weights_of(module) if (held := store.find(key_in(path, "parameter", name))) is not None}
    rows = rows_among(store.held.values(), weights, path, len(spread.slots))
    return ExpertLayer(path, groups, spread, spare, rows, slots, copies)


def move(store: Store, layer: ExpertLayer, wanted: ExpertPlacement) -> None:
    """`ExpertLayer.move` in a store, whose live tensors show experts in the model's order."""
    layer.move(wanted)
    ownership.own_copies(store.model.get_submodule(layer.path), store)
    store.moves += 1
    store.invalidate_checks()


def reorder_new_state(parameter: StoredTensor, state: StoredTensor) -> None:
    """Permutes new state, which is in the model's order, like its parameter, if the experts of that have been moved."""
    if parameter.slots is not None and state.shape[:1] == parameter.shape[:1]:
        with torch.no_grad():
            state.buffer.copy_(state.home.permute_rows(state.buffer, state.sharding, inverse(parameter.slots)))
        _record_slots(state, parameter.slots)


def _record_slots(held: StoredTensor, slots: Sequence[int]) -> None:
    """Records that rows have moved: the live tensor shares the buffer only if that is in the model's order again."""
    held.slots = None if list(slots) == sorted(slots) else list(slots)
    if not isinstance(held.live, DTensor) or (isinstance(held.home, StageTransfers) and not held.home.member):
        return  # nobody sees it, or nothing of it is stored here
    held.shared = held.slots is None and layouts.shares_memory(held.sharding, held.home.mesh)
    held.stale = held.slots is not None
    if held.slots is not None:
        held.release_copy()
    else:
        chunk = held.as_chunk()
        held.show(chunk if held.shared else chunk.to(held.local.device, copy=True))


def experts_of(model: nn.Module) -> list[str]:
    """Paths of the modules whose experts may be moved."""
    return [path for path, module in model.named_modules() if slots_of(module) is not None]
