"""Python function of a stage: one line per node; collectives start at their node and are waited for at the first use.

    v7 = f7(v5, v6)                # aten.mm
    v8 = all_reduce(v7, g8, 'sum') # starts
    v9 = f9(v1)                    # runs meanwhile
    v8 = v8.wait()
    v10 = f10(v8, v9); del v8, v9
    a11(env, v10); del v10         # part:g, a gradient of one microbatch: into sum:g

Integers that depend on the rank's coordinates are computed once, at load. The function is built from a checked graph; no text of a
program is executed.
"""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import ProcessGroup
from torch.fx import Node
from torch.fx.node import Argument

from meshc.check.guards import guard_function
from meshc.check.operators import error_at_line
from meshc.errors import MeshcError, StateError
from meshc.ir import is_getitem, record, runs_on_host, spmd
from meshc.ir.functions import Function
from meshc.ir.graph import last_reads, output_of, placeholders, values_freed_after
from meshc.ir.keys import is_a
from meshc.ir.schemas import in_place_form
from meshc.ir.sharing import OVER_OPERAND, sharing_of
from meshc.lazy_module import LazyModule
from meshc.ops.implementations import direct
from meshc.private import OpOverload
from meshc.program.accumulate import ACCUMULATES, is_added, whole_of
from meshc.program.in_flight import earlier_waits
from meshc.program.packing import is_alone, pieces
from meshc.program.program import Origin, Stage
from meshc.runtime.comm import collectives, halo_exchange, host, rows
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run.stage_memory import StageMemory

if TYPE_CHECKING:
    from meshc.runtime.run import inductor
else:
    inductor = LazyModule("meshc.runtime.run.inductor")

RunStage = Callable[..., list[torch.Tensor]]
"""`run(inputs, mb, env, done)` -> outputs; an output that starts early is returned as a collective in flight."""


def integers(stage: Stage, coordinates: Mapping[str, int]) -> dict[Node, int]:
    """Values of the integer nodes that do not depend on the microbatch."""
    found: dict[Node, int] = {}
    for node in stage.graph.nodes:
        if node.op != "call_function" or node.target not in spmd.INTEGERS.values():
            continue
        if node.target is spmd.coordinate:
            if node.args[0] in coordinates:
                found[node] = coordinates[node.args[0]]
        elif all(operand in found for operand in node.all_input_nodes):
            found[node] = node.target(*torch.fx.node.map_arg(node.args, lambda n: found[n]))
    return found


def starter(node: Node, groups: Groups, overwrites: bool) -> Callable[..., collectives.CollectiveWork]:
    """A function that starts the node's collective on its operands. overwrites: an all-reduce may write over its operand."""
    group = groups.group(node.args[1])  # type: ignore[arg-type]
    name = node.target.__name__  # type: ignore[union-attr]
    rest = node.args[2:]
    if name == "all_reduce":
        how = rest[0]
        if overwrites:
            return lambda x: collectives.all_reduce(x, group, how, out=x if x.is_contiguous() else None)  # type: ignore[arg-type]
        return lambda x: collectives.all_reduce(x, group, how)  # type: ignore[arg-type]
    if name == "broadcast":
        return lambda x: collectives.broadcast(x.contiguous(), group, rest[0])  # type: ignore[arg-type]
    if name == "all_gather":
        return lambda x: collectives.gather_dim(x, rest[0], group)  # type: ignore[arg-type]
    if name == "reduce_scatter":
        return lambda x: collectives.scatter_dim(x, rest[0], group, rest[1])  # type: ignore[arg-type]
    if name == "ring_shift":
        return lambda x: collectives.ring_shift(x, rest[0], group)  # type: ignore[arg-type]
    if node.target in spmd.OF_ORDER:
        home = node.target is spmd.from_zigzag
        return lambda x: collectives.exchange_halves(x, rest[0], group, home)  # type: ignore[arg-type]
    if node.target in spmd.OF_ROWS:
        each = node.args[3]
        assert isinstance(each, int)
        return partial(rows.gather if node.target is spmd.gather_rows else rows.scatter, each=each, group=group)
    if name in ("halo", "halo_sum"):
        return _halo(node, [groups.sizes[axis] for axis in node.args[1]], group)  # type: ignore[union-attr, index]
    return lambda x: collectives.all_to_all_dims(x, rest[0], rest[1], group)  # type: ignore[arg-type]


def _halo(node: Node, counts: list[int], group: ProcessGroup | None) -> Callable[[torch.Tensor], collectives.CollectiveWork]:
    dim, size, window, *fill = node.args[2:]
    exchange = halo_exchange.HaloExchange(size, window, counts, group)  # type: ignore[arg-type]
    if node.target is spmd.halo:
        return lambda x: exchange.windows(x, dim, fill[0])  # type: ignore[arg-type]
    return lambda x: exchange.tiles(x, dim)  # type: ignore[arg-type]


def function_of(node: Node, device: torch.device, origin: Origin | None = None, memory: torch.Tensor | None = None) -> Function:
    """The function that a node other than a collective calls; with its guard, if the stage was read from a text (`origin`). `memory`:
    where the result is written."""
    if node.target is torch.ops.aten.mm.default and memory is not None:

        def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, y, out=memory)

        return product
    over = OVER_OPERAND in sharing_of(node) and isinstance(node.target, OpOverload)
    function = direct(in_place_form(node.target) if over else node.target, device)
    return function if origin is None else guard_function(node.target, function)


class FunctionSource:
    """Lines of the generated function, and the objects bound to their names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, object] = {}
        self.makes: list[str] = []
        """For each line the name of the value that it computes; empty if it calls no operator."""

    def label(self, name: str = "") -> None:
        """Lines added since the last call compute the value `name`."""
        self.makes += [name] * (len(self.lines) - len(self.makes))

    def bind(self, value: object, prefix: str) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def literal(self, value: object, env: Mapping[Node, str]) -> str:
        if isinstance(value, Node):
            return env[value]
        if isinstance(value, list):
            return "[" + ", ".join(self.literal(item, env) for item in value) + "]"
        if isinstance(value, tuple):
            return "(" + "".join(self.literal(item, env) + ", " for item in value) + ")"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self.bind(value, "c")

    def function(self, arguments: str) -> RunStage:
        text = f"def run({arguments}):\n" + "".join(f"    {line}\n" for line in self.lines)
        made: dict[str, RunStage] = {}
        exec(compile(text, "<meshc stage>", "exec"), dict(self.names), made)  # made above from a checked graph, with numbered names only
        return made["run"]


class StageWriter:
    """Writes a stage's function for this rank, line by line: `run(inputs, mb, env, done)` -> outputs. `here(name)` is called before each
    collective starts (for failures).

    Outputs that are summed over microbatches are not returned: each is added to its sum in `env` as soon as it is computed, and `done`
    is called with the key of the sum. Inputs that are collectives in flight are waited for at their first use, such outputs not at all.
    `overwrites`: all-reduces that may write over their operand, `own`: values that have memory of their own; both in addition to those
    that the graph shows. `before`: for a node that starts, the earlier ones that are waited for first; None: as the graph says.
    """

    def __init__(
        self,
        stage: Stage,
        groups: Groups,
        coordinates: Mapping[str, int],
        device: torch.device,
        here: Callable[[str], None] | None = None,
        overwrites: Collection[Node] = (),
        own: Collection[Node] = (),
        before: Mapping[Node, Sequence[Node]] | None = None,
    ) -> None:
        self.overwrites, self.own = set(overwrites), set(own)
        self.graph, self.groups, self.device, self.here = stage.graph, groups, device, here
        self.origin, self.name = stage.origin, stage.name
        self.known = integers(stage, coordinates)
        self.source = FunctionSource()
        self.env: dict[Node, str] = {}
        self.flying: set[Node] = set()
        self.awaited = earlier_waits(stage.graph.nodes) if before is None else before
        self.pieces = pieces(stage.graph)
        self.lasting = StageMemory(stage.graph, device)
        self.memory: dict[Node, str] = {}
        """Names of memory shared by the operands of a `cat`, by the `cat`."""
        self.kept: set[Node] = set()
        """Those of `memory` that live between calls."""
        output = output_of(stage.graph)
        given = list(stage.results().items())
        self.inputs = stage.inputs
        self.leaving = {value for key, value in given if is_a(key, "early")}
        self.returned = [value for key, value in given if not is_added(key)]
        self.added: dict[Node, list[str]] = defaultdict(list)
        """Values that are added to sums, with their keys."""
        for key, value in given:
            if is_added(key):
                self.added[value].append(key)
        self.last = last_reads(node for node in stage.graph.nodes if node is not output)
        """The last reader of each value; a sum that the value is added to does not count."""
        self.last |= {value: output for value in self.returned if isinstance(value, Node)}
        self.dying = values_freed_after(self.last)

    def function(self) -> RunStage:
        lines = self.source.lines
        entered = placeholders(self.graph)
        for position, node in enumerate(entered):
            self.env[node] = f"v{position}"
        self.flying |= {node for node, key in zip(entered, self.inputs, strict=True) if is_a(key, "early")}
        if entered:
            lines.append(", ".join(self.env[node] for node in entered) + ", = inputs; inputs.clear()")
        for number, node in enumerate(self.graph.nodes):
            if node.op == "placeholder":
                self._add(node)
                continue
            if node in self.known:
                self.env[node] = repr(self.known[node])
                continue
            if node.op == "output":
                for value in node.all_input_nodes:  # collectives that nothing here has waited for
                    if value not in self.leaving:
                        self._wait_for(value)
                lines.append("return " + self.source.literal(self.returned, self.env))
                break
            for operand in node.all_input_nodes:
                self._wait_for(operand)
            self.source.label()
            self._line(node, f"w{number}")
            self.source.label("" if spmd.is_collective(node.target) or spmd.is_host_copy(node.target) else node.name)
            if node not in self.flying:
                self._add(node)
            self._forget([*self.dying.pop(node, []), *([] if node in self.last else [node])])
        run = self.source.function("inputs, mb=0, env=None, done=None")
        return run if self.origin is None else _with_error_lines(run, self.origin, self.source.makes)

    def _wait_for(self, value: Node) -> None:
        if value in self.flying:
            self.source.lines.append(f"{self.env[value]} = {self.env[value]}.wait()")
            self.flying.discard(value)
            self._add(value)

    def _wait_for_earlier(self, node: Node) -> None:
        """Waits for the collectives that must finish before this one starts, which bounds the bytes in flight."""
        for earlier in self.awaited.get(node, ()):
            self._wait_for(earlier)

    def _add(self, node: Node) -> None:
        """Adds the value to the sums over microbatches that it is a part of, if any."""
        keys = self.added.get(node, ())
        shared = len(keys) > 1 or node in self.last or not (node in self.own or is_alone(node))
        for key in keys:
            self.source.lines.append(f"{self.source.bind(Accumulator(key, shared), 'a')}(env, {self.env[node]}, done)")

    def _line(self, node: Node, name: str) -> None:
        if node in self.pieces:
            if node.args[0] not in self.pieces:  # else the node is the reshape of a piece, which is flat already
                self._make_inside(node, name)
            return
        self.env[node] = self.memory.get(node, name)
        if node in self.memory:
            return
        if node.target is spmd.coordinate:
            self.source.lines.append(f"{name} = mb")
        elif spmd.is_collective(node.target):
            self._wait_for_earlier(node)
            start = self.source.bind(starter(node, self.groups, node in self.overwrites or OVER_OPERAND in sharing_of(node)), "g")
            if self.here is not None:
                note = self.source.bind(self.here, "h")
                label = self.source.bind(f"{node.target.__name__}({', '.join(node.args[1])})", "c")  # type: ignore[union-attr, arg-type]
                self.source.lines.append(f"{note}({label})")
            self.source.lines.append(f"{name} = {start}({', '.join(self.env[one] for one in node.all_input_nodes)})")
            self.flying.add(node)
        elif spmd.is_host_copy(node.target):
            self._wait_for_earlier(node)
            start = self.source.bind(host.starter(node, self.device, self.name), "g")
            self.source.lines.append(f"{name} = {start}({', '.join(self.env[one] for one in node.all_input_nodes)})")
            self.flying.add(node)
        elif getattr(node.target, "boxed", False):  # the callee empties its list, so that operands read here last are freed meanwhile
            self.source.lines.append(f"box = {self.source.literal(node.args[0], self.env)}")
            self._forget(self.dying.pop(node, []))
            self.source.lines.append(f"{name} = {self.source.bind(function_of(node, self.device, self.origin), 'f')}(box)")
        else:
            self.source.lines.append(f"{name} = {self._call(node)}")

    def _call(self, node: Node) -> str:
        device = self.device
        if runs_on_host(node) and device.type != "cpu":
            self.source.lines.append(f"{self.source.bind(host.settle, 'h')}({self.source.bind(device, 'c')})")
            device = torch.device("cpu")
        arguments = [self.source.literal(argument, self.env) for argument in node.args]
        arguments += [f"{key}={self.source.literal(device_argument(key, value, device), self.env)}" for key, value in node.kwargs.items()]
        function = function_of(node, device, self.origin, self.lasting.of(node))
        if runs_on_host(node) and not is_getitem(node):
            function = host.observe_operator(node, self.name, function)
        return f"{self.source.bind(function, 'f')}({', '.join(arguments)})"

    def _make_inside(self, node: Node, name: str) -> None:
        """Computes a value into its place in the memory of the `cat` that joins it with others."""
        piece, made = self.pieces[node], record(node)
        if piece.whole not in self.memory:
            kept = self.lasting.of(piece.whole)
            if kept is None:
                allocate = partial(torch.empty, record(piece.whole).shape, dtype=made.dtype, device=self.device)
                self.memory[piece.whole] = name
                self.source.lines.append(f"{name} = {self.source.bind(allocate, 'f')}()")
            else:  # each call may use the same memory; fresh pages cost more than what is written to them
                self.memory[piece.whole] = self.source.bind(kept, "b")
                self.kept.add(piece.whole)
        place = self.source.bind(partial(_view_piece, start=piece.start, shape=made.shape), "f") + f"({self.memory[piece.whole]})"
        self.source.lines.append(f"{place}.copy_({self._call(node)})")

    def _forget(self, values: Collection[Node]) -> None:
        alive = (self.known, self.flying, self.pieces, self.kept)
        dead = [self.env[value] for value in values if value in self.env and not any(value in some for some in alive)]
        if dead:
            self.source.lines.append("del " + ", ".join(dict.fromkeys(dead)))


def generate(*stage: Any) -> RunStage:
    """A stage's function, of `StageWriter`'s arguments."""
    return StageWriter(*stage).function()


MAKERS: Final[Mapping[str, Callable[..., RunStage]]] = {"eager": generate, "inductor": lambda *stage: inductor.compile_regions(*stage)}
"""From the name of a backend to the function that makes a stage executable on this rank. Another backend is a file beside `inductor.py` and
an entry here. Its name is listed in `BACKENDS` of `meshc/program/program.py`, and what the compiler does for it, which the program's text
then shows, in `passes/lower/group_regions.py`."""


def maker(backend: str) -> Callable[..., RunStage]:
    """The function that makes a stage executable. Raises StateError for an unknown backend."""
    if backend not in MAKERS:
        raise StateError(f"the program is for the backend {backend!r}, which this runtime does not know")
    return MAKERS[backend]


def _with_error_lines(run: RunStage, origin: Origin, makes: Sequence[str]) -> RunStage:
    """`run`, with errors of operators that name the line of the program's text."""

    def run_of_text(*args: object, **kwargs: object) -> list[torch.Tensor]:
        try:
            return run(*args, **kwargs)
        except MeshcError:
            raise
        except Exception as error:
            lines = [number for frame, number in traceback.walk_tb(error.__traceback__) if frame.f_code is run.__code__]
            name = makes[lines[0] - 2] if lines and lines[0] - 2 < len(makes) else ""  # the function's own first line is 1
            if not name:
                raise
            raise error_at_line(origin, name, error) from error

    return run_of_text


def _view_piece(memory: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return memory[start : start + math.prod(shape)].view(shape)


def device_argument(key: str, value: Argument, device: torch.device) -> Argument:
    """A keyword argument for this device: constants are traced for the CPU, and created on the device that runs."""
    return device if key == "device" and value is not None else value


# In-place accumulation of the parts of microbatches into the value of the whole step.


class Accumulator:
    """Combines the parts under one key in place. The first part becomes the whole; it is cloned if it is `shared` with another value or
    is a view of a larger storage.

    done  called with the key of the whole, after the part was added
    """

    __slots__ = ("_combine", "_shared", "_whole")

    def __init__(self, key: str, shared: bool) -> None:
        found = whole_of(key)
        assert found is not None
        self._combine, self._whole, self._shared = ACCUMULATES[found[0]], found[1], shared

    def __call__(self, env: MutableMapping[str, torch.Tensor], part: torch.Tensor, done: Callable[[str], None] | None = None) -> None:
        whole = env.get(self._whole)
        if whole is not None:
            self._combine(whole, part, out=whole)
        elif self._shared or (part._base is not None and part._base.numel() != part.numel()):
            env[self._whole] = part.clone()
        else:
            env[self._whole] = part
        if done is not None:
            done(self._whole)
