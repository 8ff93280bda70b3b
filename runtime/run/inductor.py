"""Stages with regions compiled by Inductor: each region is one compiled function, all other nodes are plain calls.

    with region(0):
        mm = aten.mm(x, w)                          box = [x, w]; v0 = region(box)
        relu = aten.relu(mm)                becomes v1 = all_reduce(v0[0], g, 'sum'); ...
    all_reduce_ = all_reduce(relu, ["tp"], "sum")

The program says which nodes are in a region (`meshc/passes/lower/group_regions.py`). The results of a region, and which of them have memory
of their own, follow from their readers. Equal regions of a stage on inputs of equal form, as of equal layers, are compiled once.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from meshc import ops
from meshc.check.guards import is_guarded
from meshc.ir import KEY, is_getitem, record, runs_on_host, set_record, spmd
from meshc.ir.graph import placeholders, results_of
from meshc.ir.regions import blocks, is_number
from meshc.ir.sharing import OVER_OPERAND, sharing_of
from meshc.private import FakeTensor, FakeTensorMode, TracingContext, tracing
from meshc.program.accumulate import is_added
from meshc.program.in_flight import earlier_waits
from meshc.program.program import Stage
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run import codegen
from meshc.runtime.run.stage_memory import StageMemory
from meshc.runtime.state.stored_tensor import memory_of

Given = torch.Tensor | int
"""An input of a region; integers are offsets in the microbatch."""
Compiled: TypeAlias = Callable[[list[Given]], list[torch.Tensor]]
Key = tuple[object, ...]
"""The calls of a region, and the form of its inputs."""


def compile_regions(
    stage: Stage,
    groups: Groups,
    coordinates: Mapping[str, int],
    device: torch.device,
    here: Callable[[str], None] | None = None,
) -> codegen.RunStage:
    """The same function as `codegen.StageWriter` makes, with its regions compiled at their first call."""
    known = codegen.integers(stage, coordinates)
    added = {value for key, value in stage.results().items() if is_added(key)}
    overwrites: list[Node] = []
    own: list[Node] = []
    known_regions: dict[Key, Compiled] = {}
    lasting = StageMemory(stage.graph, device)
    outer = Graph()
    env: dict[Node, Node] = {node: outer.placeholder(node.name) for node in placeholders(stage.graph)}
    for node, entered in env.items():
        set_record(entered, record(node))
    for compiled, nodes in _compilation_units(stage, known):
        if compiled:
            own += _add_region(outer, env, nodes, known, device, added, known_regions)
            continue
        for node in nodes:
            side = torch.device("cpu") if runs_on_host(node) else device
            env[node] = outer.create_node(
                "call_function",
                node.target if _is_rank_operator(node) else codegen.function_of(node, side, stage.origin, lasting.of(node)),
                torch.fx.node.map_arg(node.args, lambda n: known[n] if n in known else env[n]),
                torch.fx.node.map_arg(node.kwargs, lambda n: env[n]),
                node.name,
            )
            if spmd.is_host_copy(node.target) or runs_on_host(node):
                env[node].meta[KEY] = node.meta[KEY]
            if OVER_OPERAND in sharing_of(node):
                overwrites.append(env[node])
    outer.output(torch.fx.node.map_arg(results_of(stage.graph), lambda n: env[n]))
    before = {env[node]: [env[earlier] for earlier in several] for node, several in earlier_waits(stage.graph.nodes).items()}
    return codegen.StageWriter(replace(stage, graph=outer), groups, coordinates, device, here, overwrites, own, before).function()


def _is_rank_operator(node: Node) -> bool:
    """Whether the node is a collective, a copy to the host or back, or an integer of the rank's coordinates."""
    return spmd.is_collective(node.target) or spmd.is_host_copy(node.target) or is_number(node)


def _compilation_units(stage: Stage, known: Mapping[Node, int]) -> Iterator[tuple[bool, list[Node]]]:
    """The stage's calls in order, in groups with a flag: compiled as one. In a program that was read from a text, a guarded operator is
    left out of regions and runs after its guard, which reads values."""
    calls = [node for node in stage.graph.nodes if node.op == "call_function" and node not in known]
    for number, nodes in blocks(calls):
        if number is None or stage.origin is None:
            yield number is not None, nodes
            continue
        for plain, members in groupby(nodes, lambda node: not is_guarded(_producer(node).target)):
            yield plain, list(members)


def _producer(node: Node) -> Node:
    return node.all_input_nodes[0] if is_getitem(node) else node


def _add_region(
    outer: Graph,
    env: dict[Node, Node],
    region: list[Node],
    known: Mapping[Node, int],
    device: torch.device,
    added: Collection[Node],
    compiled: dict[Key, Compiled],
) -> list[Node]:
    """Adds a call of a compiled region to `outer`, and its results to `env`. Returns the results that have memory of their own."""
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
        kwargs = {key: codegen.device_argument(key, value, device) for key, value in node.kwargs.items()}
        copies[node] = inner.call_function(
            node.target,  # type: ignore[arg-type]
            torch.fx.node.map_arg(node.args, lambda n: known[n] if n in known else copies[n]),
            torch.fx.node.map_arg(kwargs, lambda n: copies[n]),
        )
    results = [n for n in region if any(user not in members for user in n.users) and not _is_tuple(n)]
    inner.output(tuple(copies[n] for n in results))
    own = [index for index, node in enumerate(results) if node in added or any(OVER_OPERAND in sharing_of(user) for user in node.users)]
    made = _CompiledRegion(GraphModule(torch.nn.Module(), inner), own, compiled)
    call = outer.create_node("call_function", made, ([env[n] for n in inputs],), name=region[0].name)  # by which a failure is named
    for index, node in enumerate(results):
        env[node] = outer.call_function(operator.getitem, (call, index))
    return [env[results[index]] for index in own]


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta.get("meshc"), tuple)


ALIGNED: Final = 64
"""Bytes of alignment that Inductor's loads may assume."""


class _CompiledRegion:
    """A region, compiled at its first call for the form of those inputs. The results numbered in `own` have memory of their own.

    module  takes its inputs as one list
    known   compiled regions by key, to which this one is added
    """

    boxed = True

    def __init__(self, module: GraphModule, own: Sequence[int], known: dict[Key, Compiled]) -> None:
        self.module = module
        self.own = own
        self.known = known
        self.compiled: Compiled | None = None
        self.copied: list[int] = []
        """Indices of results that Inductor returns in the memory of an input or of another result."""
        self.__name__ = "region"

    def __call__(self, inputs: list[Given]) -> list[torch.Tensor]:
        """Empties the list of inputs, so that each is freed after its last use."""
        if self.compiled is not None:
            results = self.compiled(inputs)
        else:
            self.compiled = self._compile_once(inputs)
            places = [memory_of(x) for x in inputs if isinstance(x, torch.Tensor)]
            results = self.compiled(inputs)
            self.copied = [index for index in self.own if _is_shared(index, places, results)]
        if self.copied:
            results = [x.clone() if index in self.copied else x for index, x in enumerate(results)]
        return results


    def _compile_once(self, inputs: list[Given]) -> Compiled:
        """The compiled region, or an equal one compiled before. Names in a graph follow from its calls alone."""
        graph = self.module.graph
        key = (str(graph), *(node.target for node in graph.nodes), *_input_forms(inputs))
        if key not in self.known:
            with _disk_cache():
                self.known[key] = torch._inductor.compile(self.module, [list(inputs)])  # type: ignore[list-item]  # it takes lists too
        return self.known[key]


class _StaticSizes(FakeTensorMode):
    """Fake tensors with static sizes, whatever torch's default; integers stay symbolic."""

    def from_tensor(self, tensor: torch.Tensor, *, static_shapes: bool | None = None, **asked: Any) -> FakeTensor:
        return super().from_tensor(tensor, static_shapes=True, **asked)


@contextmanager
def _disk_cache() -> Iterator[None]:
    """A context in which Inductor uses its disk cache, for which torch needs a tracing context that could hold symbolic sizes. Torch's key
    has operators by name only, so a digest of the code of meshc's operators is put into the key's tag."""
    config = torch.compiler.config
    tag = f"{config.cache_key_tag} meshc {_version_of_operators()}"
    context = TracingContext(_StaticSizes(shape_env=ShapeEnv()))
    with config.patch(cache_key_tag=tag), tracing(context):  # type: ignore[attr-defined]  # torch adds it when it is imported
        yield


@cache
def _version_of_operators() -> str:
    files = sorted(file for folder in ops.__path__ for file in Path(folder).iterdir() if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _input_forms(inputs: Sequence[Given]) -> Iterator[object]:
    """What a compilation may depend on: all of each tensor but its values, and which tensors share a storage."""
    first: dict[int, int] = {}
    for number, x in enumerate(inputs):
        if not isinstance(x, torch.Tensor):
            yield x
            continue
        shared = first.setdefault(memory_of(x), number)
        aligned = x.data_ptr() % ALIGNED == 0
        yield type(x), x.dtype, x.device, tuple(x.shape), x.stride(), x.storage_offset(), x.requires_grad, aligned, shared


def _is_shared(index: int, places: Sequence[int], results: Sequence[torch.Tensor]) -> bool:
    others = [memory_of(x) for number, x in enumerate(results) if number != index and isinstance(x, torch.Tensor)]
    return memory_of(results[index]) in (*places, *others)
