"""Stages with their compute compiled by Inductor: maximal regions between collectives, each one compiled function.

A node's level counts the collectives behind it. All nodes of a level form one region, then the collectives that they feed start, and the
next region waits for those that it reads. Updates in place, what depends on the microbatch's number and products whose memory
is kept stay outside, as plain calls.

Gathers of stored parameters would all be of level 0, and the whole model in memory at once. So they come in windows of some bytes: what
stands after a window's first gather is of a later level than what stands before it, and its gathers start before the region that reads
the window before.

    level 0:  gathers of windows 0 and 1      level 1:  the region that reads window 0, gathers of window 2      level 2:  window 1's ...
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from meshc import ops
from meshc.check.guards import is_guarded
from meshc.ir import local_bytes, record, spmd
from meshc.program.accumulate import is_added
from meshc.program.bundle import bundle
from meshc.program.packing import in_place, stays
from meshc.program.program import Origin, Stage
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run import codegen


def _outside(node: Node, known: Mapping[Node, int], varying: set[Node], origin: Origin | None) -> bool:
    if origin is not None and is_guarded(node.target):
        return True
    if any(operand in varying and operand.target in spmd.INTEGERS.values() for operand in node.all_input_nodes):
        return True
    target = node.target
    return stays(node) or (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable)


WINDOW = 128 * 1024 * 1024
"""Bytes of parameters gathered together at most: about what FSDP gathers for a block of a large model."""

WINDOWS = 8
"""There are at least about so many in a stage, or a small model would be whole for as long as it runs."""


def levels(stage: Stage, known: Mapping[Node, int], window: int | None = None) -> dict[Node, int]:
    """Region number of each node; nodes that stay outside, and collectives, stand between two regions."""
    varying = _varying(stage, known)
    stored = _stored(stage)
    if window is None:
        gathered = sum(local_bytes(record(node)) for node in stored if node.target is spmd.all_gather)
        window = min(WINDOW, gathered // WINDOWS)
    found: dict[Node, int] = {}
    window_bytes, floor, floor_before = 0, 0, 0
    for node in stage.graph.nodes:
        if node.op == "placeholder" or node in known or node in varying:
            found[node] = 0
            continue
        between = [operand for operand in node.all_input_nodes if _between(operand, known, varying, stage.origin)]
        after = [found[operand] + (operand in between) for operand in node.all_input_nodes]
        if node in stored:
            found[node] = max([0, floor_before - 1, *after])
            if node.target is not spmd.all_gather:
                continue
            size = local_bytes(record(node))
            if window_bytes + size > window:
                floor_before, floor, window_bytes = floor, max(found.values()) + 1, 0
            window_bytes += size
            found[node] = max(floor_before - 1, found[node])
            continue
        found[node] = max([floor, *after])
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            found[node] = max(found.values())
    return found


def _stored(stage: Stage) -> set[Node]:
    """Parameters, what is made of them alone, and their gathers."""
    keys = zip(stage.graph.find_nodes(op="placeholder"), stage.inputs, strict=True)
    found = {node for node, key in keys if key.startswith("parameter:")}
    for node in stage.graph.nodes:
        operands = node.all_input_nodes if node.op == "call_function" else []
        if operands and all(operand in found and operand.target is not spmd.all_gather for operand in operands):
            found.add(node)
    return found


def _varying(stage: Stage, known: Mapping[Node, int]) -> set[Node]:
    """Integers that depend on the microbatch."""
    calls = stage.graph.find_nodes
    return {node for target in spmd.INTEGERS.values() for node in calls(op="call_function", target=target) if node not in known}


def _between(node: Node, known: Mapping[Node, int], varying: set[Node], origin: Origin | None) -> bool:
    return node.op == "call_function" and (spmd.is_collective(node.target) or _outside(node, known, varying, origin))


def compile_regions(
    stage: Stage,
    groups: Groups,
    coordinates: Mapping[str, int],
    device: torch.device,
    here: Callable[[str], None] | None = None,
) -> Callable[..., list[Any]]:
    """The same function as `codegen.generate` gives, its regions compiled at their first call."""
    stage, level = _bundled(stage, groups.sizes, levels(stage, codegen.integers(stage, coordinates)))
    known = codegen.integers(stage, coordinates)
    varying = _varying(stage, known)
    overwrites: list[Node] = []
    (output,) = stage.graph.find_nodes(op="output")
    added = {value for key, value in zip(stage.outputs, output.args[0], strict=True) if is_added(key)}
    own: list[Node] = []
    outer = Graph()
    env: dict[Node, Node] = {}
    for node in stage.graph.find_nodes(op="placeholder"):
        env[node] = outer.placeholder(node.name)
    for node in stage.graph.nodes:
        if node in varying:
            env[node] = outer.call_function(node.target, torch.fx.node.map_arg(node.args, lambda n: known[n] if n in known else env[n]))
    for number in range(max(level.values(), default=0) + 1):
        inside = [n for n in stage.graph.nodes if n.op == "call_function" and level[n] == number and n not in known and n not in varying]
        region = [n for n in inside if not spmd.is_collective(n.target) and not _outside(n, known, varying, stage.origin)]
        if region:
            own += _add_region(outer, env, region, known, device, added)
        for node in inside:
            if node not in region:
                env[node] = outer.create_node(
                    "call_function",
                    node.target if spmd.is_collective(node.target) else codegen.function_of(node, device, stage.origin),
                    torch.fx.node.map_arg(node.args, lambda n: known[n] if n in known else env[n]),
                    torch.fx.node.map_arg(node.kwargs, lambda n: env[n]),
                    node.name,
                )
                if in_place(node):
                    overwrites.append(env[node])
    outer.output(torch.fx.node.map_arg(output.args[0], lambda n: env[n]))
    return codegen.generate(replace(stage, graph=outer), groups, coordinates, device, here, overwrites, own)


def _bundled(stage: Stage, sizes: Mapping[str, int], level: Mapping[Node, int]) -> tuple[Stage, dict[Node, int]]:
    """A copy in which parameters that start to be gathered together, and gradients to be reduced, are one message; and its levels."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(stage.graph, copies))
    stage = replace(stage, graph=graph)
    found = {copies[node]: number for node, number in level.items() if node in copies}
    for sent, member in bundle(stage, sizes, found, WINDOW).items():
        found[sent] = found[member]
        if sent.target is spmd.all_gather:
            for node in _new_behind(sent, found):
                found[node] = found[sent]
    for node in graph.nodes:
        if node.op == "call_function" and node not in found:
            found[node] = max(found[operand] + spmd.is_collective(operand.target) for operand in node.all_input_nodes)
    return stage, found


def _new_behind(node: Node, found: Mapping[Node, int]) -> list[Node]:
    """What prepares a bundle, made with it."""
    new = [operand for operand in node.all_input_nodes if operand not in found]
    return [*new, *(other for operand in new for other in _new_behind(operand, found))]


def _add_region(
    outer: Graph, env: dict[Node, Node], region: list[Node], known: Mapping[Node, int], device: torch.device, added: Collection[Node]
) -> list[Node]:
    """A call of a compiled region, whose results go to `env`. Returned: those that have memory of their own."""
    members = set(region)
    inner = Graph()
    box = inner.placeholder("inputs")
    box.meta["steal_arg"] = True  # by which torch knows that it may empty the list
    copies: dict[Node, Node] = {}
    inputs: list[Node] = []
    for node in region:
        for operand in node.all_input_nodes:
            if operand not in members and operand not in known and operand not in copies:
                copies[operand] = inner.call_function(operator.getitem, (box, len(inputs)))
                inputs.append(operand)
    for node in region:
        kwargs = {key: codegen._moved(key, value, device) for key, value in node.kwargs.items()}
        copies[node] = inner.call_function(
            node.target,  # type: ignore[arg-type]
            torch.fx.node.map_arg(node.args, lambda n: known[n] if n in known else copies[n]),
            torch.fx.node.map_arg(kwargs, lambda n: copies[n]),
        )
    results = [n for n in region if any(user not in members for user in n.users) and not _is_tuple(n)]
    inner.output(tuple(copies[n] for n in results))
    own = [index for index, node in enumerate(results) if node in added or any(map(in_place, node.users))]
    made = _Region(GraphModule(torch.nn.Module(), inner), own)
    call = outer.create_node("call_function", made, ([env[n] for n in inputs],), name=region[0].name)  # by which a failure is named
    for index, node in enumerate(results):
        env[node] = outer.call_function(operator.getitem, (call, index))
    return [env[results[index]] for index in own]


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta.get("meshc"), tuple)


class _Region:
    """A region, compiled for the first inputs that it sees. The results numbered in `own` have memory of their own.

    module  takes one list
    """

    boxed = True

    def __init__(self, module: GraphModule, own: Sequence[int]) -> None:
        self.module = module
        self.own = own
        self.compiled: Callable[[list[Any]], Any] | None = None
        self.copied: list[int] = []
        """Those that Inductor makes in the memory of an input or of another result."""
        self.__name__ = "region"

    def __call__(self, inputs: list[Any]) -> Any:
        """Takes the inputs out of the list, so that each is gone after its last use."""
        if self.compiled is not None:
            results = self.compiled(inputs)
        else:
            with _cached():
                self.compiled = torch._inductor.compile(self.module, [list(inputs)])  # type: ignore[list-item]  # it takes lists too
            places = [_place(x) for x in inputs if isinstance(x, torch.Tensor)]
            results = self.compiled(inputs)
            self.copied = [index for index in self.own if _is_shared(index, places, results)]
        if self.copied:
            results = [x.clone() if index in self.copied else x for index, x in enumerate(results)]
        return results


@contextmanager
def _cached() -> Iterator[None]:
    """In it Inductor keeps what it compiles on disk, and finds what an earlier process has kept: for that torch asks for a tracing context
    that could hold symbolic sizes. Torch's key knows operators by name, so meshc's, whose code may change, are in the key's tag."""
    config = torch.compiler.config
    tag = f"{config.cache_key_tag} meshc {_version_of_operators()}"
    context = TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))
    with config.patch(cache_key_tag=tag), tracing(context):  # type: ignore[attr-defined]  # torch adds it when it is imported
        yield


@cache
def _version_of_operators() -> str:
    files = sorted(file for folder in ops.__path__ for file in Path(folder).iterdir() if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _place(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_shared(index: int, places: Sequence[int], results: Sequence[torch.Tensor]) -> bool:
    others = [_place(x) for number, x in enumerate(results) if number != index and isinstance(x, torch.Tensor)]
    return _place(results[index]) in (*places, *others)
