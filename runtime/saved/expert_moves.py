"""Expert rebalancing of a saved program without a model: moves rows of weights and state by load between calls, and back at the end.

    begin      every expert is in its own place, by number, in the weights and in saved states
    between    by the tokens of each expert in the last call, rows of parameters and state move between ranks, and other experts are copied
    end        before a state is written experts return to their places

`meshc run --rebalance-every N` asks for it; a program can do it that was compiled with `expert_placement="movable"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshc.cost.expert_balance import LEAST, ExpertPlacement
from meshc.errors import StateError
from meshc.frontend.expert_placement import COPIES, SLOTS, WEIGHTS, is_slots
from meshc.frontend.train_step import ROUTED
from meshc.ir import layouts
from meshc.ir.keys import key_of
from meshc.ir.sharding import Sharding
from meshc.plan.expert_group_counts import groups_of
from meshc.program.program import PlainProgram, Port
from meshc.report.rebalance_report import RebalanceReport, plan_layer_move
from meshc.runtime.comm import reorder
from meshc.runtime.saved.loaded_program import LoadedProgram
from meshc.runtime.state.stored_tensor import inverse


class Placement:
    """The places of each layer's experts, equal on all ranks. Raises StateError for a program whose experts cannot move."""

    def __init__(self, loaded: LoadedProgram, path: str) -> None:
        self.loaded, program = loaded, loaded.general
        layers = {port.name.rpartition(".")[0]: port.shape[0] for port in program.inputs if port.kind == "buffer" and is_slots(port.name)}
        measured = {port.name.removeprefix(ROUTED) for port in program.outputs if port.kind == "metric"}
        layers = {layer: count for layer, count in layers.items() if layer in measured}
        if not layers:
            raise StateError(
                f"--rebalance-every: the experts of {path} stay where they are\n"
                "  what to do: compile a training step with "
                'options=meshc.Options(experts=meshc.Experts(placement="movable")), or leave it out'
            )
        self.groups = {layer: groups_of(program.plan, program.axis_sizes, layer) for layer in layers}
        if all(count == 1 for count in self.groups.values()):
            raise StateError(
                f"--rebalance-every: no axis of the mesh {program.mesh} splits the experts of {path}, so every rank has them all\n"
                "  what to do: leave it out, or compile with an axis called ep, or `AXIS: experts > batch` in the plan"
            )
        self.rows = {layer: _rows(program, layer, count) for layer, count in layers.items()}
        copies = {port.key: port.shape[1] for port in program.inputs if port.name.endswith(COPIES)}
        self.spare = {layer: copies.get(_key(layer, COPIES), 0) for layer in layers}
        """Places for copies on a rank, by layer."""
        self.spread = {
            layer: ExpertPlacement(tuple(range(count)), (-1,) * (self.groups[layer] * self.spare[layer])) for layer, count in layers.items()
        }

    def by_load(self, found: Mapping[str, Tensor]) -> RebalanceReport:
        """Moves experts by the tokens that a call has counted, which every rank has whole. All ranks call it."""
        loads = {layer: [float(load) for load in found[key_of("metric", ROUTED + layer)].tolist()] for layer in self.spread}
        layers = [
            plan_layer_move(
                layer, loads[layer], now, self.groups[layer], LEAST, self.spare[layer],
                lambda wanted, layer=layer: self._most_bytes(layer, wanted),  # type: ignore[misc]
            )
            for layer, now in self.spread.items()
        ]  # fmt: skip
        for one in layers:
            if one.changed:
                self._move(one.path, one.spread)
        return RebalanceReport(tuple(layers))

    def home(self) -> None:
        """Moves every expert back to its own place."""
        for layer, spread in self.spread.items():
            if list(spread.slots) != sorted(spread.slots):
                self._move(layer, ExpertPlacement(tuple(sorted(spread.slots)), (-1,) * len(spread.copies)))

    def _most_bytes(self, layer: str, wanted: Sequence[int]) -> int:
        mesh, source = self.loaded.general.mesh, self._source(layer, wanted)
        return sum(reorder.received_bytes(_lies(port), mesh, source, port.dtype.itemsize) for port in self.rows[layer])

    def _source(self, layer: str, wanted: Sequence[int]) -> list[int]:
        """For each slot, the present slot of the expert that moves there."""
        return [self.spread[layer].slots[expert] for expert in inverse(wanted)]

    def _move(self, layer: str, wanted: ExpertPlacement) -> None:
        loaded, source = self.loaded, self._source(layer, wanted.slots)
        with loaded.executor.failure_guard(loaded.step, "move experts"), torch.no_grad():
            for port in self.rows[layer] if source != sorted(source) else ():
                tile = loaded.buffers.get(port.key)
                if tile is not None:  # else it is another stage's
                    tile.copy_(loaded.transfers.permute_rows(tile, _lies(port), source))
            for name, values in ((SLOTS, wanted.slots), (COPIES, wanted.copies)):
                buffer = loaded.buffers.get(_key(layer, name))
                if buffer is not None:
                    buffer.flatten()[: len(values)] = torch.tensor(values, dtype=torch.int64)
        self.spread[layer] = wanted


def _key(layer: str, name: str) -> str:
    return key_of("buffer", f"{layer}.{name}".lstrip("."))


def _rows(program: PlainProgram, layer: str, experts: int) -> list[Port]:
    """The ports with a row for each expert of a layer: parameters and their state. Raises StateError for state that mixes experts."""
    names = {f"{layer}.{name}".lstrip(".") for name in WEIGHTS}
    of = {"parameter": lambda port: port.name, "state": lambda port: port.of}
    found = [port for port in program.inputs if port.kind in of and of[port.kind](port) in names]
    mixed = [port for port in found if port.shape[:1] not in ((experts,), (), (1,))]
    if mixed:
        raise StateError(
            f"--rebalance-every: {mixed[0].name} is of shape {list(mixed[0].shape)}, and experts of {layer} cannot be moved with "
            f"state that has no row for each of {experts}\n  what to do: leave it out, or compile with another optimizer for the experts"
        )
    return [port for port in found if port.shape[:1] == (experts,)]


def _lies(port: Port) -> Sharding:
    return port.sharding or layouts.whole_sharding(port.shape)
