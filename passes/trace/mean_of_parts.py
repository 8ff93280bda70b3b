"""Graph of one microbatch for steps that average over microbatches: input batch dims, scaled loss, marked sums, random draws as tiles.

    loss, grad_w                                                        the model on the whole batch
  becomes
    l = mul(loss, 1/M);  loss = sum_of_parts(l)                         the model on one microbatch; the tangent is 1/M too
    grad = sum_of_parts(grad_w)                                         partial (sum: mb), so that accumulation is its reduction
    dropout(h, seed_step, 0, 0.1, [8, 32], [2, 32], [0, 0])             a microbatch's draws are a tile of the whole batch's

Batch dims of inputs are found from the factors of the whole batch's forward graph. Assumes that the batch is the outermost factor of
every dim that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from meshc.errors import CompileError
from meshc.ir import record, records
from meshc.ir.functions import Function
from meshc.ir.graph import call, output_of, placeholders, set_results
from meshc.ir.keys import is_a
from meshc.ir.mesh import DATA_ROLES, role
from meshc.ir.schemas import call_number, place_of
from meshc.ir.sharding import Part
from meshc.ops import sum_of_parts as _parts  # noqa: F401 - registers meshc::sum_of_parts
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced_model import Joint
from meshc.program.microbatch_split import MicrobatchSplit, offsets
from meshc.program.program import Port

aten = torch.ops.aten
meshc = torch.ops.meshc


def means(request: Request) -> bool:
    """Whether the step is the mean of its microbatches, rather than the step of the whole batch."""
    return request.batch_mix == "mean_of_parts" and request.count > 1


def whole_forward(request: Request) -> Request:
    """The request of the graph from which batch dims are found: the whole batch, forward only."""
    return replace(
        request, grad=False, train=False, optimizer=None, microbatches=1, batch_mix="refuse", inputs="global", joined=None,
    )  # fmt: skip


def find_parts(whole: PlacedModel, request: Request) -> MicrobatchSplit:
    """The batch dims by which `request` cuts its inputs, from factors of its forward graph. Raises CompileError if it cannot be cut."""
    classes = _batch_classes(whole)
    _check_divides(_batch_size(whole, classes), request)
    dims = tuple(
        _carrying(port, whole.factors.dims[node, 0], set(classes))
        for port, node in zip(whole.joint.inputs, placeholders(whole.graph), strict=True)
        if port.kind == "input"
    )
    draws = _draws(whole.graph)
    for _, node in draws:
        if any(factor in classes for row in whole.factors.dims[node, 0] for factor in row[1:]):
            place = records(node)[0].source
            raise _unordered_error(f"the random call at {place} draws with the batch inside a dim, not at its beginning")
    return MicrobatchSplit(request.count, dims, {number: tuple(_shape(node, 0)) for number, node in draws})


def _batch_classes(whole: PlacedModel) -> dict[int, str]:
    """Factor classes of the batch -> an input that has it; no parameter has one."""
    dims = {key: whole.factors.dims[node, 0] for key, node in whole.joint.placeholders().items()}
    learned = {factor for key, rows in dims.items() if is_a(key, "parameter") for row in rows for factor in row}
    found: dict[int, str] = {}
    for port in whole.joint.inputs:
        if port.kind == "input" and port.shape:
            rows = whole.names.batch.of(port.name, dims[port.key])[1]
            if rows and rows[0] not in learned:
                found.setdefault(rows[0], port.name)
    return found


def _batch_size(whole: PlacedModel, classes: dict[int, str]) -> int:
    sizes = {whole.factors.size[factor]: name for factor, name in classes.items()}
    if len(sizes) > 1:
        raise CompileError(
            "microbatches are rows of the batch, and the inputs do not say how long it is: "
            + ", ".join(f"{name} begins with {size}" for size, name in sizes.items())
            + '\n  what to do: name the first dim of what carries no batch, for instance names={"weight": ("classes",)}'
        )
    if not sizes:
        raise CompileError(
            "microbatches are rows of the batch, but no input has one\n"
            '  what to do: name its dim, for instance names={"x": ("batch", None)}, or microbatches=1'
        )
    return next(iter(sizes))


def _check_divides(size: int, request: Request) -> None:
    ranks = prod(axis.size for axis in request.mesh.axes if role(axis.name) in DATA_ROLES) if request.inputs == "local" else 1
    count = request.count
    if size % (ranks * count):
        rows = f"each rank's part of the batch has {size // ranks} rows" if ranks > 1 else f"the batch has {size} rows"
        raise CompileError(
            f'{rows}, which {count} microbatches do not divide: with batch_mix="mean_of_parts" all microbatches are of one size\n'
            f"  what to do: a batch that divides by {count}, or another number of microbatches"
        )


def _carrying(port: Port, rows: tuple[tuple[int, ...], ...], classes: set[int]) -> int | None:
    """The batch dim of an input."""
    found = [dim for dim, row in enumerate(rows) if classes & set(row)]
    if len(found) > 1:
        raise _unordered_error(f"the input {port.name} of shape {list(port.shape)} carries the batch in dims {found}")
    if found and rows[found[0]][0] not in classes:
        raise _unordered_error(f"dim {found[0]} of the input {port.name} has the batch inside, not at its beginning")
    return found[0] if found else None


def _unordered_error(fault: str) -> CompileError:
    return CompileError(
        f"{fault}, so a microbatch is not a range of its rows\n  what to do: put the batch first (batch_first=True), or microbatches=1"
    )


# ---------------------------------------------------------------------------------------------------------- the graph of one microbatch


def number_draws(graph: Graph, parts: MicrobatchSplit) -> None:
    """Gives random calls of the first microbatch the numbers and global shapes of the whole batch. Raises CompileError if the model draws
    otherwise."""
    draws = _draws(graph)
    alike = {number for number, _ in draws} == parts.draws.keys()
    for number, node in draws:
        part = _shape(node, 1)
        whole = parts.draws.get(number, ())
        if not alike or offsets(whole, part, parts.count, 0) is None:
            raise CompileError(
                f"the random call at {records(node)[0].source} draws {part} for a microbatch and {list(whole)} for the whole batch: "
                "the model draws otherwise for a batch of another size\n  what to do: microbatches=1, or draw outside the model"
            )
        at = place_of(node, "global_shape")
        node.args = (*node.args[:at], list(whole), *node.args[at + 1 :])


def _draws(graph: Graph) -> list[tuple[int, Node]]:
    """Random calls with their numbers; a forward call and its backward have one number."""
    return [(number, node) for node in graph.nodes if (number := call_number(node)) is not None]


def _shape(node: Node, which: int) -> list[int]:
    shape: Any = node.args[place_of(node, "global_shape") + which]
    return [int(size) for size in shape]


def mark_sums(joint: Joint, count: int) -> None:
    """Scales the loss and metrics to their share of the mean, and marks them and all gradients as sums over microbatches."""
    _refuse_metrics([port for port in joint.outputs if port.kind == "metric"])
    graph, made = joint.graph, dict[Node, Node]()
    results = [(port.kind, node) for port, node in zip(joint.outputs, joint.results(), strict=True)]

    def like(x: Node, target: Function, *rest: float) -> Node:
        with graph.inserting_before(output_of(graph)):
            return call(graph, record(x), target, x, *rest)

    for kind, node in results:
        if kind in ("output", "gradient", "metric") and node not in made:
            share = node if kind == "gradient" else like(node, aten.mul.Tensor, 1.0 / count)
            made[node] = like(share, meshc.sum_of_parts.default)
    set_results(graph, (made[node] if kind in ("output", "gradient", "metric") else node for kind, node in results))


def _refuse_metrics(ports: Sequence[Port]) -> None:
    strange = [port for port in ports if port.shape or not port.dtype.is_floating_point]
    if strange:
        faults = [f"{port.name} is {str(port.dtype).removeprefix('torch.')} {list(port.shape)}" for port in strange]
        raise CompileError(
            f'with batch_mix="mean_of_parts" a metric is the mean of what each microbatch gives, so it is one floating-point number: '
            f"{', '.join(faults)}\n  what to do: return its mean, metric.float().mean(), or microbatches=1"
        )


def cut_inputs(inputs: Sequence[Port], parts: MicrobatchSplit) -> tuple[tuple[Port, ...], dict[str, int]]:
    """The ports of inputs for the whole batch, and, by key, the dim that microbatches cut."""
    dims = iter(parts.dims)
    cut = {port.key: dim for port in inputs if port.kind == "input" and (dim := next(dims)) is not None}
    return tuple(_whole_port(port, cut[port.key], parts.count) if port.key in cut else port for port in inputs), cut


def _whole_port(port: Port, dim: int, count: int) -> Port:
    """The whole batch's port, from that of one microbatch."""
    shape = tuple(size * count if d == dim else size for d, size in enumerate(port.shape))
    assert port.sharding is not None
    rows = [list(row) for row in port.sharding.dims]
    first = rows[dim][0] if rows[dim] else Part("batch", 1)
    rows[dim][:1] = [replace(first, size=first.size * count)]
    return replace(port, shape=shape, sharding=replace(port.sharding, dims=tuple(map(tuple, rows))))
