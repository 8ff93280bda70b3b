"""Names: what a plan may call the factor classes of a graph.

batch and seq come from the dims of the inputs, height, width, depth and length from what windows run over, vocab from embeddings of inputs
and from `take`, heads (kv_heads, group) and head from attention, hidden from what is normalised or embedded, ffn from a pair of matrix
products, anything else is `<module path>.<dim>` of the first parameter that has it. A name may cover several classes (each layer has its
own heads); `names=` given by the user win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from meshc.cost.flops import COUNTS
from meshc.errors import PlanError
from meshc.ir import op_name, operands, records, value_of
from meshc.passes.phases.factors import Factors, Instance
from meshc.passes.phases.names import Names
from meshc.program.program import Port

aten = torch.ops.aten
meshc = torch.ops.meshc
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
NORMS = (aten.native_layer_norm.default,)


def name_factors(
    graph: Graph, factors: Factors, inputs: Sequence[Port], names: Mapping[str, Sequence[str | None]] | None = None
) -> Names:
    """Names for every class. Raises PlanError for a user's name that fits no input or has the wrong number of dims."""
    found = Names()
    placeholders = dict(zip((port.key for port in inputs), graph.find_nodes(op="placeholder"), strict=True))
    _user_names(found, factors, inputs, placeholders, names or {})
    _attention(found, factors, [placeholders[port.key] for port in inputs if port.kind == "input"])
    _inputs(found, factors, inputs, placeholders)
    _vocabulary(found, graph, factors)
    _hidden(found, graph, factors)
    _feed_forward(found, factors, [placeholders[port.key] for port in inputs if port.kind == "input"])
    _features(found, factors)
    for port in inputs:
        if port.kind == "parameter":
            for dim, classes in enumerate(factors.dims[(placeholders[port.key], 0)]):
                for position, factor in enumerate(classes):
                    suffix = f".{position}" if len(classes) > 1 else ""
                    if factor not in found.of:
                        found.set(factor, f"{port.name}.{dim}{suffix}")
                if not classes:
                    found.ones.add(f"{port.name}.{dim}")
    count = 0
    for factor in sorted(factors.size):
        if factor not in found.of:
            found.set(factor, f"f{count}")
            count += 1
    return found


def _user_names(
    found: Names,
    factors: Factors,
    inputs: Sequence[Port],
    placeholders: Mapping[str, Node],
    names: Mapping[str, Sequence[str | None]],
) -> None:
    known = {port.name: port for port in inputs if port.kind == "input"}
    for name, dims in names.items():
        if name not in known:
            raise PlanError(f"names={{{name!r}: ...}} fits no input; the inputs are {', '.join(known)}")
        port = known[name]
        if len(dims) != len(port.shape):
            raise PlanError(f"names={{{name!r}: {tuple(dims)}}} has {len(dims)} names, but {name} has shape {list(port.shape)}")
        for label, classes in zip(dims, factors.dims[(placeholders[port.key], 0)], strict=True):
            if label:
                for factor in classes:
                    found.set(factor, label)
                if not classes:
                    found.ones.add(label)


def _inputs(found: Names, factors: Factors, inputs: Sequence[Port], placeholders: Mapping[str, Node]) -> None:
    """The first dim of an input is batch; the second is seq for integers of two dims and floats of three."""
    tied = factors.tied()
    for port in inputs:
        if port.kind != "input" or not port.shape:
            continue
        dims = factors.dims[(placeholders[port.key], 0)]
        labels = ["batch"]
        if any(factor in tied for factor in dims[-1]):
            pass  # channels before what a convolution runs over
        elif len(dims) == 2 and not port.dtype.is_floating_point or len(dims) == 3 and port.dtype.is_floating_point:
            labels.append("seq")
        for label, classes in zip(labels, dims, strict=False):
            if classes and not (len(classes) > 1 and label == "seq"):
                for factor in classes:
                    found.set(factor, label)
            elif not classes:
                found.ones.add(label)
    _space(found, factors, tied)
    # a sequence that no input shows (image patches) is what attention's queries run over
    if "seq" not in found.of.values():
        for node in found.attention:
            instance = factors.instances.get(node)
            if instance is not None and node.target is meshc.attention.default:
                for token in instance.operands[0][2]:
                    found.set(instance.factor[token], "seq")
                    found.also[instance.factor[token]].add("seq")


def _space(found: Names, factors: Factors, tied: Mapping[int, set[int]]) -> None:
    """Dims that windows tie have one name: what one of them is called already, else what is usual for its place in an image."""
    for instance in factors.instances.values():
        for dims in (*instance.operands, *instance.results):
            space = [dim - len(dims) for dim, row in enumerate(dims) if row and row[0] in instance.tied]
            for dim in space:
                members = sorted(tied[instance.factor[dims[dim][0]]])
                known = [factor for factor in members if factor in found.of]
                if not known and instance.kind == "layout":
                    continue  # a crop beside a convolution: that one says what it is
                alone = space == [-1] and (len(dims) == 3 or dims[-2] == ())
                usual = ("length", "seq") if alone else (("depth", "height", "width")[dim],)
                names = (found.of[known[0]], *sorted(found.also[known[0]])) if known else usual
                for factor in members:
                    if factor not in found.of:
                        found.set(factor, *names)


def _attention(found: Names, factors: Factors, inputs: Sequence[Node]) -> None:
    spans: list[tuple[Instance, Instance]] = []
    for node, instance in factors.instances.items():
        if node.target is meshc.attention.default:
            found.attention.add(node)
            _heads(found, instance, 1)
            for token in instance.operands[0][3]:
                found.set(instance.factor[token], "head")
        elif node.target is meshc.attention_backward.default:
            found.attention.add(node)
        elif node.target is aten._softmax.default:
            span = _written_out(node)
            if span is not None:
                found.attention |= span[0]
                spans.append((factors.instances[span[1]], factors.instances[span[2]]))
    numbers = {n.meta.get("seq_nr") for n in found.attention if n.target is not meshc.attention.default} - {None}
    for node in factors.instances:
        if record_phase(node) == "backward" and node.meta.get("seq_nr") in numbers:
            found.attention.add(node)
    batch = {factor for node in inputs for classes in factors.dims[(node, 0)][:1] for factor in classes}
    for scores, mix in spans:
        shared = {scores.factor[t] for t in scores.operands[0][0]} & {mix.factor[t] for t in mix.operands[0][0]}
        for factor in sorted(shared - batch):
            found.set(factor, "heads")
        for token in scores.operands[0][2]:
            found.set(scores.factor[token], "head")


def record_phase(node: Node) -> str:
    return records(node)[0].phase


def _heads(found: Names, instance: Instance, dim: int) -> None:
    tokens = instance.operands[0][dim]
    keys = [instance.factor[token] for token in tokens]
    if not keys:
        found.ones.add("heads")
    elif len(keys) == 1:
        found.set(keys[0], "heads")
    else:
        found.set(keys[0], "kv_heads", "heads")
        for factor in keys[1:]:
            found.set(factor, "group", "heads")


def _written_out(softmax: Node) -> tuple[set[Node], Node, Node] | None:
    """The region of an attention written as matmul, softmax, matmul: (its nodes, the first product, the second)."""
    before = _walk(softmax, forward=False)
    after = _walk(softmax, forward=True)
    if before is None or after is None:
        return None
    return before[0] | after[0], before[1], after[1]


def _walk(start: Node, forward: bool, limit: int = 14) -> tuple[set[Node], Node] | None:
    seen = {start}
    edge = [start]
    for _ in range(limit):
        following: list[Node] = []
        for node in edge:
            for other in node.users if forward else [value_of(x)[0] for x in operands(node)]:
                if other.op != "call_function" or other in seen or record_phase(other) != "forward":
                    continue
                seen.add(other)
                if other.target is aten.bmm.default:
                    return seen, other
                following.append(other)
        edge = following
    return None


def _vocabulary(found: Names, graph: Graph, factors: Factors) -> None:
    for node, instance in factors.instances.items():
        if node.target is meshc.take.default:
            for token in instance.operands[0][-1]:
                found.set(instance.factor[token], "vocab")
        elif node.target is aten.embedding.default and _from_input(node.args[1]):  # type: ignore[arg-type]
            for token in instance.operands[0][0]:
                found.set(instance.factor[token], "vocab")


def _from_input(node: Node) -> bool:
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _hidden(found: Names, graph: Graph, factors: Factors) -> None:
    for node, instance in factors.instances.items():
        if node.target is aten.embedding.default:
            tokens = instance.operands[0][1]
        elif node.target in NORMS:
            tokens = instance.operands[0][-1]
        elif node.target is aten.mean.dim and record_phase(node) == "forward" and node.args[1] in ([-1], (-1,)):
            tokens = instance.operands[0][-1]  # a norm written out
        else:
            continue
        for token in tokens:
            if instance.factor[token] not in found.of:
                found.set(instance.factor[token], "hidden")


@dataclass(frozen=True)
class Product:
    """A matrix product or convolution of the forward phase: the classes that it sums over, and those that it makes of its weight."""

    node: Node
    into: tuple[int, ...]
    out: tuple[int, ...]


def _products(factors: Factors) -> list[Product]:
    found = []
    for node, instance in factors.instances.items():
        if record_phase(node) != "forward":
            continue
        if node.target in MATMULS:
            into, out = instance.operands[-2][-1], instance.operands[-1][-1]
        elif node.target in (meshc.grouped_mm.default, meshc.routed_mm.default):
            into, out = instance.operands[0][-1], instance.operands[1][-1]
        elif node.target is aten.convolution.default:
            into, out = instance.operands[0][1], instance.results[0][1]
        else:
            continue
        if into != out:  # a depthwise convolution makes no width of another
            found.append(Product(node, tuple(instance.factor[t] for t in into), tuple(instance.factor[t] for t in out)))
    return found


def _feed_forward(found: Names, factors: Factors, inputs: Sequence[Node]) -> None:
    """Classes that one product with a parameter makes and another one sums over, unless an input has them: layers add to those.

    The widest come first, and one whose products all have a named class already goes without. In 1024-4096-1024-4096-1024 the two of
    4096 are ffn, so that each pair of products meets in one sum; splitting the 1024 between them as well would only move more. Between
    convolutions they are called channels, and answer to ffn.
    """
    products = _products(factors)
    made = {factor for product in products for factor in product.out}
    summed = {factor for product in products for factor in product.into}
    vocabularies = {factors.size[factor] for factor, name in found.of.items() if name == "vocab"}
    for factor in sorted(made - summed):
        if factor not in found.of and factors.size[factor] in vocabularies:
            found.set(factor, "vocab")  # the head of a model that is called without labels
    outside = {factor for node in inputs for row in factors.dims[(node, 0)] for factor in row}
    splittable = {factor for factor, names in found.also.items() if names & {"heads", "vocab"}}
    for factor in sorted((made & summed) - outside, key=lambda f: (-factors.size[f], f)):
        if factor in found.of:
            continue
        own = [product for product in products if factor in (*product.into, *product.out)]
        if all(splittable & {*product.into, *product.out} for product in own):
            continue
        if any(product.node.target is aten.convolution.default for product in own):
            found.set(factor, "channels", "ffn")
        else:
            found.set(factor, "ffn")
        splittable.add(factor)


def _features(found: Names, factors: Factors) -> None:
    """What products sum over and make answers to `features`, but for the batch and the sequence; the region `products` has them all."""
    found.products = {node for node in factors.instances if op_name(node) in COUNTS}
    for product in _products(factors):
        for factor in (*product.into, *product.out):
            if found.of.get(factor) not in ("batch", "seq"):
                found.also[factor].add("features")
