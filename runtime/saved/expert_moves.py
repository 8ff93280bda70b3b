"""Expert rebalancing of a saved program without a model: moves rows of weights and state by load between calls, and back at the end.

    begin      every expert is in its own place, by number, in the weights and in saved states
    between    by the tokens of each expert in the last call, rows of parameters and state move between ranks, and other experts are copied
    end        before a state is written experts return to their places

`meshc run --rebalance-every N` asks for it; a program can do it that was compiled with `expert_placement="movable"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from meshc.cost.expert_balance import LEAST, ExpertPlacement
from meshc.errors import StateError
from meshc.frontend.expert_placement import COPIES, SLOTS, WEIGHTS, is_slots
from meshc.frontend.train_step import ROUTED
from meshc.ir import layouts
from meshc.ir.keys import key_of
from meshc.plan.expert_group_counts import groups_of
from meshc.program.program import Port
from meshc.report.rebalance_report import RebalanceReport
from meshc.runtime.saved.loaded_program import LoadedProgram
from meshc.runtime.state.moved_experts import ExpertLayer, key_in, rebalance, rows_among
from meshc.runtime.state.stored_tensor import StoredTensor


class Placement:
    """The places of each layer's experts, equal on all ranks. Raises StateError for a program whose experts cannot move."""

    def __init__(self, loaded: LoadedProgram, path: str) -> None:
        self.loaded, program = loaded, loaded.general
        counts = {port.name.rpartition(".")[0]: port.shape[0] for port in program.inputs if port.kind == "buffer" and is_slots(port.name)}
        measured = {port.name.removeprefix(ROUTED) for port in program.outputs if port.kind == "metric"}
        counts = {layer: count for layer, count in counts.items() if layer in measured}
        if not counts:
            raise StateError(
                f"--rebalance-every: the experts of {path} stay where they are\n"
                "  what to do: compile a training step with "
                'options=meshc.Options(experts=meshc.Experts(placement="movable")), or leave it out'
            )
        self.layers = [self._layer(layer, count) for layer, count in counts.items()]
        if all(layer.groups == 1 for layer in self.layers):
            raise StateError(
                f"--rebalance-every: no axis of the mesh {program.mesh} splits the experts of {path}, so every rank has them all\n"
                "  what to do: leave it out, or compile with an axis called ep, or `AXIS: experts > batch` in the plan"
            )

    def _layer(self, path: str, count: int) -> ExpertLayer:
        loaded, program = self.loaded, self.loaded.general
        groups = groups_of(program.plan, program.axis_sizes, path)
        copies = key_in(path, "buffer", COPIES)
        spare = next((port.shape[1] for port in program.inputs if port.key == copies), 0)
        kept = [self._stored_tensor(port) for port in program.inputs if port.kind in ("parameter", "state")]
        rows = rows_among(kept, {key_in(path, "parameter", name) for name in WEIGHTS}, path, count)
        spread = ExpertPlacement(tuple(range(count)), (-1,) * (groups * spare))
        slots = loaded.buffers.get(key_in(path, "buffer", SLOTS))
        return ExpertLayer(path, groups, spread, spare, rows, slots, loaded.buffers.get(copies))

    def _stored_tensor(self, port: Port) -> StoredTensor:
        tile: Any = self.loaded.buffers.get(port.key)  # None: it is another stage's
        sharding = port.sharding or layouts.whole_sharding(port.shape)
        of = key_of("parameter", port.of) if port.kind == "state" else ""
        return StoredTensor(port.key, port.name, port.shape, port.dtype, sharding, tile, tile, tile, (), True, self.loaded.transfers, of=of)

    def by_load(self, found: Mapping[str, Tensor]) -> RebalanceReport:
        """Moves experts by the tokens that a call has counted, which every rank has whole. All ranks call it."""
        loads = {one.path: [float(load) for load in found[key_of("metric", ROUTED + one.path)].tolist()] for one in self.layers}
        return rebalance(self.layers, loads, LEAST, self._move)

    def home(self) -> None:
        """Moves every expert back to its own place."""
        for layer in self.layers:
            now = layer.spread
            if list(now.slots) != sorted(now.slots):
                self._move(layer, ExpertPlacement(tuple(sorted(now.slots)), (-1,) * len(now.copies)))

    def _move(self, layer: ExpertLayer, wanted: ExpertPlacement) -> None:
        with self.loaded.executor.failure_guard(self.loaded.step, "move experts"):
            layer.move(wanted)
