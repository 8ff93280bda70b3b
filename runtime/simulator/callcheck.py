"""Translation validation of passes over torch calls: the graph after each pass against the one before, on seeded values.

    capture      h = tag_activation_checkpoint(body, x, w)          its results and writes, in double precision, are the truth
    autocast     its casts, in double, where none loses anything; on the mesh's own device also in the graph's precision
    inline       h = gelu(linear(x, w))
    raise        y = dropout(h, 0.1, seed_step=s, call=0)           draws as the reference does for torch's own call

Each precision misses faults that the other finds: in double the graphs agree to the last digits, whatever is cast; in the graph's own
precision the casts themselves are compared, if the compiling machine has the kernels of the region's device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.node import map_aggregate

from meshc.errors import VerifyError
from meshc.frontend.capture import SEED_STEP, TorchGraph
from meshc.frontend.double_copy import WIDER, double_by_default
from meshc.frontend.reference_random import ReferenceRandom
from meshc.ir import trees
from meshc.ir.graph import placeholders
from meshc.private import FakeTensor
from meshc.runtime.simulator.tensor_error import FLOOR, error

Value = Callable[..., Any]
SEED: Final = 7
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
DOUBLE: Final = {**WIDER, torch.float16: torch.float64, torch.bfloat16: torch.float64}
METHODS: Final = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble"}
TOLERANCE: Final = {True: 1e-9, False: 1e-2}
"""Allowed error in double precision (True), and in the graph's own, which may be bfloat16 (False)."""


@dataclass(frozen=True)
class Outcome:
    """given  tensors that the graph returns;  left  its inputs and attributes after the run, which it may write into, by id"""

    given: list[Tensor]
    left: dict[int, Tensor]


@dataclass
class CallCheck:
    """One per compilation; `check` is called after each pass that has changed the graph.

    values  value of each fake tensor of the graph, in its own dtype, by id, since passes may rename it
    held    keeps the fake tensors alive, and with them their ids
    truth   outcome of the first graph, by precision (double or not)
    """

    values: dict[int, Tensor] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)
    truth: dict[bool, Outcome] = field(default_factory=dict)

    def check(self, name: str, model: TorchGraph, device: str) -> None:
        """Raises VerifyError if the graph after the pass `name` has another outcome. `device`: device type of the mesh."""
        precisions = tuple(self.truth) or ((True, False) if _casts_here(model.module, device) else (True,))
        for double in precisions:
            found = _run_graph(model, double, self._value)
            truth = self.truth.setdefault(double, found)
            if len(found.given) != len(truth.given):
                raise VerifyError(
                    f"the pass {name} changed how many tensors the model gives: {len(truth.given)} before, {len(found.given)} after"
                )
            for number, (value, wanted) in enumerate(zip(found.given, truth.given, strict=True)):
                _compare(name, f"tensor {number} of what the model gives", value, wanted, double)
            for key, value in found.left.items():
                if key in truth.left:
                    _compare(name, "a tensor that the model writes into", value, truth.left[key], double)

    def _value(self, fake: object, positive: bool = False) -> object:
        """The value of an input or an attribute, as `draw_values` makes it."""
        if isinstance(fake, torch.SymInt):
            return _size(fake)
        if not isinstance(fake, FakeTensor):
            return fake
        if id(fake) not in self.values:
            self.held.append(fake)
            self.values[id(fake)] = _random_value(fake, len(self.values), positive)
        return self.values[id(fake)]


def _compare(name: str, what: str, value: Tensor, wanted: Tensor, double: bool) -> None:
    if value.dtype != wanted.dtype:
        raise VerifyError(f"the pass {name} changed a dtype: {what} was {wanted.dtype} and is {value.dtype}")
    wrong = error(value, wanted, FLOOR)
    if not wrong <= TOLERANCE[double]:
        raise VerifyError(f"the pass {name} changed the program's meaning: {what} is off by {wrong:.3g} (allowed {TOLERANCE[double]:.0e})")


def _size(extent: object) -> Any:
    """The size in the captured example."""
    return extent.node.hint if isinstance(extent, torch.SymInt) else extent


def _random_value(fake: Tensor, number: int, positive: bool) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + number)
    return draw_values([_size(extent) for extent in fake.shape], fake.dtype, generator, positive)


def draw_values(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, positive: bool) -> Tensor:
    """Values of an input. `positive`: without negative entries, as for a running variance."""
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2 + 0.05
        return (drawn.abs() if positive else drawn).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _casts_here(module: GraphModule, device: str) -> bool:
    """Whether a graph has regions of autocast, all for the CPU, as the mesh is."""
    bodies = [body for body in module.modules() if isinstance(body, GraphModule)]
    regions = [node for body in bodies for node in body.graph.find_nodes(op="call_function", target=ENTER)]
    return bool(regions) and device == "cpu" and all(node.args[0] == "cpu" for node in regions)


def _run_graph(model: TorchGraph, double: bool, value: Value) -> Outcome:
    """Runs the graph on copies of its values; returns its results, and the copies after the run."""
    copies: dict[int, Tensor] = {}

    def fresh(fake: object, positive: bool = False) -> object:
        held = value(fake, positive)
        if not isinstance(held, Tensor):
            return held
        if id(held) not in copies:
            copies[id(held)] = held.to(DOUBLE.get(held.dtype, held.dtype)).clone() if double else held.clone()
        return copies[id(held)]

    given = [fresh(node.meta.get("example_value", node.meta.get("val"))) for node in placeholders(model.module.graph)]
    with torch.no_grad(), double_by_default(double):
        result = _Calls(_copy_with_values(model.module, double, fresh), ReferenceRandom(SEED)).run(*given)
    return Outcome([leaf for leaf in trees.leaves(result) if isinstance(leaf, Tensor)], copies)


def _copy_with_values(module: GraphModule, double: bool, fresh: Value) -> GraphModule:
    """A copy with values for its attributes, nested bodies included. `double`: its dtypes in double precision, and without autocast."""
    held: dict[str, Any] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        found = operator.attrgetter(name)(module)
        if isinstance(found, GraphModule):
            held[name] = _copy_with_values(found, double, fresh)
        else:
            held[name] = torch.tensor([SEED, 0]) if name == SEED_STEP else fresh(found, not isinstance(found, nn.Parameter))
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes if double else ():
        node.args, node.kwargs = map_aggregate(node.args, _wider), map_aggregate(node.kwargs, _wider)
        if node.op == "call_method":
            node.target = METHODS.get(node.target, node.target)
        elif node.target in (ENTER, EXIT):
            node.op, node.target, node.args = "call_function", _nothing, ()
    return GraphModule(held, graph)


def _wider(argument: Any) -> Any:
    return DOUBLE.get(argument, argument) if isinstance(argument, torch.dtype) else argument


def _nothing() -> None:
    """Replaces a region's beginning or end."""


class _Calls(Interpreter):
    """Runs a graph of torch's calls, with the reference's random draws."""

    def __init__(self, module: GraphModule, random: ReferenceRandom) -> None:
        super().__init__(module)
        self.random = random

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is CHECKPOINT:
            return _Calls(args[0], self.random).run(*args[1:])
        if isinstance(target, torch._ops.HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        with self.random:
            return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        with self.random:
            return super().call_method(target, args, kwargs)
