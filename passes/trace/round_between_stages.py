"""Rounding between stages: what one stage of a pipeline hands to another in few bits, where a compress line of the plan says so.

    h = layers.1(x)                   h = layers.1(x)
    y = layers.2(h)       becomes     h_1 = meshc.between_stages(h, "e4m3", 1)      where layers.2 begins a stage
                                      y = layers.2(h_1)

In the trace of the model, ahead of its backward: the gradient that comes back over the boundary is rounded by itself, before it is added to
others. Each stage has its own of what it reads of stages before it. Behind the trace each such call becomes

    peak = meshc.block_scale(h);  q = meshc.quantize_blocks(h, peak, "e4m3")      of the stage that makes h, or backward its gradient
    h_1 = meshc.dequantize_blocks(q, peak, "e4m3", float32)                       of the stage that reads it

so that a cut sends q and peaks. What crosses is what depends on parameters and on the batch; integers, masks, positions and values of fewer
than two dims cross as they are. docs/compressed-gradients.md has the definition.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from meshc.errors import PlanError
from meshc.frontend.sources import module_calls, source_of
from meshc.ir import Record, record
from meshc.ir.formats import COMPRESSED, SIGN
from meshc.ir.functions import Function
from meshc.ir.graph import call
from meshc.ops import compress as _compress  # noqa: F401 - registers its operators
from meshc.passes.phases.traced_model import TracedModel
from meshc.plan.precision_lines import CompressLine

meshc = torch.ops.meshc
NUMBER: Final = "seq_nr"
"""Key of autograd's number of an operator, by which backward is placed."""
WRITES: Final = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)


def round_between_stages(traced: TracedModel) -> TracedModel:
    """Rounds what crosses the boundaries of stages in the torch-level graph, in place. Raises PlanError for a line that does not fit."""
    line = _line_of(traced)
    module = traced.model.module
    splits = traced.request.options.pipeline.splits or ()
    _take_items_early(module.graph)
    values = _LearnedValues(module)
    begins = [*_boundaries(module.graph, splits)]
    ends = [values.number[node] for node in begins[1:]] + [len(values.number)]
    rounded: list[Node] = []
    for stage, (node, end) in enumerate(zip(begins, ends, strict=True), 1):
        rounded += _cross(values, node, end, stage, line)
    if splits and not rounded:
        raise PlanError(
            f"{line.where}: nothing that depends on parameters and on the batch crosses a boundary of {', '.join(splits)}\n"
            "  what to do: leave the line out, or begin stages at modules further behind"
        )
    module.recompile()
    return traced


def _line_of(traced: TracedModel) -> CompressLine:
    """The one line about stages, if it fits the request."""
    line, *others = traced.plan.stage_compressions
    if others:
        raise PlanError(f"{line.where} and {others[0].where}: one line says how {line.axis} sends\n  what to do: keep one of them")
    if line.format == SIGN or line.parts is not None:
        raise PlanError(
            f"{line.where}: stages send values and their gradients, of which there are no parts, and no sign alone\n"
            f"  what to do: write `compress {line.axis}: fp8` or `compress {line.axis}: int8`"
        )
    if traced.mesh.pipeline_axis is None:
        raise PlanError(f"{line.where}: {line.axis} has one rank, and so no stages\n  what to do: leave the line out")
    if not traced.request.options.pipeline.splits:
        raise PlanError(
            f"{line.where}: what is rounded depends on where stages begin, and that is left to be chosen\n"
            "  what to do: name the modules at which stages begin, Options(pipeline=meshc.Pipelining(splits=[...]))"
        )
    return line


def _boundaries(graph: Graph, splits: Sequence[str]) -> Iterator[Node]:
    """The first call of each module at which a stage begins. Where one is not there, or their order is another, `cut_stages` says so."""
    calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    for name in splits:
        found = next((node for node in calls if _is_inside(node, name)), None)
        if found is not None:
            yield found


def _is_inside(node: Node, name: str) -> bool:
    paths = [path for _, path in module_calls(node)]
    return any(path == name or fnmatchcase(path, name) for path in paths)


def _take_items_early(graph: Graph) -> None:
    """Moves what is taken out of several results to where these are made, so that a boundary is crossed by tensors alone."""
    for node in list(graph.nodes):
        if isinstance(node.meta.get("example_value"), tuple | list):
            for user in list(node.users):
                if user.target is operator.getitem and user.args[0] is node:
                    node.append(user)


class _LearnedValues:
    """The values of a torch-level graph that depend on parameters and on the batch."""

    def __init__(self, module: GraphModule) -> None:
        self.graph, self.number = module.graph, {node: i for i, node in enumerate(module.graph.nodes)}
        learned, given = set[Node](), set[Node]()
        for node in module.graph.nodes:
            if node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), nn.Parameter):
                learned.add(node)
            elif node.op in ("get_attr", "placeholder"):
                given.add(node)
            else:
                read = node.all_input_nodes
                if any(one in learned for one in read):
                    learned.add(node)
                if not read or any(one in given for one in read):
                    given.add(node)
        self.active = {node for node in learned & given if node.op.startswith("call") and _crosses(node.meta.get("example_value"))}


def _crosses(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def _cross(values: _LearnedValues, begins: Node, end: int, stage: int, line: CompressLine) -> Iterator[Node]:
    """Rounds what is made before a stage and read in it. `end`: the number of the first call behind it."""
    at, crossing = values.number[begins], dict[Node, list[Node]]()
    for node in values.active:
        users = [user for user in node.users if at <= values.number.get(user, -1) < end]
        if users and values.number[node] < at:
            crossing[node] = users
    _refuse_shared_writes(values, crossing, at, line)
    for node in sorted(crossing, key=values.number.__getitem__):
        with values.graph.inserting_before(begins):
            made = values.graph.call_function(meshc.between_stages.default, (node, COMPRESSED[line.format], stage))
        made.meta.update(begins.meta | {"example_value": torch.empty_like(node.meta["example_value"])})
        for user in crossing[node]:
            user.replace_input_with(node, made)
        yield made


def _refuse_shared_writes(values: _LearnedValues, crossing: dict[Node, list[Node]], at: int, line: CompressLine) -> None:
    """Raises PlanError where a value is written in place behind a boundary that another view of its memory crosses, too."""
    memory: dict[int, list[Node]] = {}
    for node in crossing:
        memory.setdefault(node.meta["example_value"].untyped_storage()._cdata, []).append(node)
    for node in values.graph.nodes:
        written = node.args[0] if node.args and _writes(node) and values.number.get(node, -1) >= at else None
        shared = [] if not isinstance(written, Node) else [same for same in memory.values() if written in same and len(same) > 1]
        if shared:
            raise PlanError(
                f"{line.where}: {source_of(node)} writes in place to a value whose memory several values share that cross to the stage\n"
                "  what to do: write the sum without an assignment in place, or begin the stage at another module"
            )


def _writes(node: Node) -> bool:
    method = node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
    return method or node.target in WRITES


def write_roundings(traced: TracedModel) -> TracedModel:
    """Writes the calls between stages as roundings in the stage that sends, and their inverse in the stage that reads."""
    graph = traced.operators().graph
    writer = _RoundingWriter(graph)
    for node in list(graph.nodes):
        if node.target is meshc.between_stages.default:
            writer.write(node)
    return traced


@dataclass(frozen=True)
class _RoundedValue:
    """Values in few bits, and the peaks of their blocks."""

    values: Node
    peaks: Node


class _RoundingWriter:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._sent: dict[tuple[Node, str], _RoundedValue] = {}
        self._from: dict[int, int] = {}
        """By autograd's number of a call, that of what it rounds."""

    def write(self, node: Node) -> None:
        x, element, _ = node.args
        assert isinstance(x, Node) and isinstance(element, str)
        made = record(node)
        assert made.dtype is not None
        if any(type(size) is not int for size in made.shape):
            raise PlanError(
                f"what crosses to the stage at {made.source.module} has an open size, and blocks are counted in fixed ones\n"
                "  what to do: leave Options(dynamic=) out, or the compress line"
            )
        forward, number = made.phase == "forward", node.meta.get(NUMBER)
        maker = _number_of(x) if forward else number
        sent = self._sent.get((x, element)) if forward else None
        if sent is None:
            sent = self._send(x, element, replace(made, source=record(x).source) if forward else made, maker)
            self._sent[x, element] = sent
        if forward and number is not None and maker is not None:
            self._from[number] = maker
        with self.graph.inserting_before(node):
            back = call(self.graph, made, meshc.dequantize_blocks.default, sent.values, sent.peaks, element, made.dtype, *_tile(made.shape))
        _set_number(back, number if forward or number is None else self._from.get(number, number))
        node.replace_all_uses_with(back)
        self.graph.erase_node(node)

    def _send(self, x: Node, element: str, like: Record, number: int | None) -> _RoundedValue:
        tile = _tile(like.shape)

        def emit(after: Node, target: Function, *args: object) -> Node:
            result = target(*(torch.empty(record(one).shape, dtype=record(one).dtype, device="meta") if isinstance(one, Node) else one
                              for one in args))  # fmt: skip
            with self.graph.inserting_after(after):
                made = call(self.graph, replace(like, shape=tuple(result.shape), dtype=result.dtype), target, *args)  # type: ignore[arg-type]
            _set_number(made, number)
            return made

        peaks = emit(x, meshc.block_scale.default, x, *tile)
        return _RoundedValue(emit(peaks, meshc.quantize_blocks.default, x, peaks, element, *tile), peaks)


def _tile(shape: Sequence[int]) -> tuple[list[int], list[int], list[int], int]:
    return [*shape], [*shape], [0] * len(shape), 1


def _number_of(node: Node) -> int | None:
    """Autograd's number of a value, or of what it is made of."""
    while node.meta.get(NUMBER) is None and node.all_input_nodes:
        (node, *_) = node.all_input_nodes
    found: int | None = node.meta.get(NUMBER)
    return found


def _set_number(node: Node, number: int | None) -> None:
    if number is not None:
        node.meta[NUMBER] = number
