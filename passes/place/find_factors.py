"""Find factors: dims of the global view as factors (`factorize.py`), names of their classes for plans, and each input's batch dim.

    mm: f32[6, 40]      becomes      mm: f32[batch 6, ffn 40]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch.fx import Graph, Node

from meshc.cost.flops import is_product
from meshc.errors import PlanError
from meshc.ir import op_name, record, records, value_of
from meshc.ir.graph import placeholders as entering
from meshc.ir.keys import key_of, kind_of, name_of
from meshc.optimizer.spec import GRADIENT, SUM
from meshc.passes.depth.blocks import counts_of
from meshc.passes.depth.copies import view_of
from meshc.passes.phases.compilation_phase import phase_fields
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.factors import Factors, Instance, Value
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import JoinedInputs
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.passes.place.batch import BATCH, Labels, Rows, find_batch, forward_instances, refuse_numbers_of_rows, refuse_other_joint
from meshc.passes.place.factorize import factorize
from meshc.passes.place.written_out import written_out
from meshc.program.program import Port
from meshc.rules.slices import OPERATORS as CROPS


def find_factors(traced: TracedModel) -> PlacedModel:
    joint = traced.operators()
    factors = factorize(joint.graph, shared_factor_pairs(joint), counts_of(joint, traced.depth))
    ask = traced.request
    names = name_factors(joint.graph, factors, joint.inputs, ask.names, traced.model.output_tree.caches(), ask.joined)
    refuse_other_joint(ask, names.batch)
    refuse_numbers_of_rows(ask, factors, names.batch)
    view = view_of(joint, traced.depth)
    return PlacedModel(
        **phase_fields(traced.with_notes(*factors.dropped)), traced=traced, joint=joint, view=view, factors=factors, names=names
    )


# Pairs of values that share factors: a gradient and its parameter, a value before and after a step.


def shared_factor_pairs(joint: Joint) -> list[tuple[Value, Value]]:
    """Pairs of a gradient, accumulated sum, new value or tangent with the value that it belongs to."""
    inputs = joint.placeholders()
    results = {port.key: value_of(node) for port, node in zip(joint.outputs, joint.results(), strict=True)}
    pairs = []
    for key, value in results.items():
        kind, name = kind_of(key), name_of(key)
        other = inputs.get(key_of("parameter", name) if kind == "gradient" and ":" not in name else name if kind == "gradient" else key)
        if other is not None:
            pairs.append((value, (other, 0)))
        tangent = inputs.get(key_of("tangent", name))
        if kind == "output" and tangent is not None:
            pairs.append((value, (tangent, 0)))
    sums = [port for port in joint.inputs if port.kind == "state" and port.name in (f"{port.of}/{GRADIENT}", f"{port.of}/{SUM}")]
    return pairs + [((inputs[port.key], 0), (inputs[key_of("parameter", port.of)], 0)) for port in sums]


# Names of factor classes for plans, from inputs, the roles of letters in rules, and products.
#
# batch and seq come from the dims of the inputs (`batch.py`), height, width, depth and length from the dims of windows. Others come from
# the roles of letters in rules (`ROLES` in `rules/rule.py`): experts, vocab, heads (kv_heads, group), head and hidden have their roles'
# names; experts come also from stacks of weights, ffn from classes that one product produces and another contracts. Any other class is
# `<module path>.<dim>` of the first parameter that has it. `features` is a second name of all classes that products contract or produce,
# except batch and sequence. A name may cover several classes (each layer has its own heads); the user's `names=` take precedence.


TOKENS = 2
"""The token dim of a cache [rows, heads, tokens, head]."""


def name_factors(
    graph: Graph,
    factors: Factors,
    inputs: Sequence[Port],
    names: Labels | None = None,
    caches: Collection[str] = (),
    joined: JoinedInputs | None = None,
) -> FactorNames:
    """Names for every class. `caches`: the inputs that are keys and values of earlier tokens. `joined`: the dims along which inputs were
    joined from parts.

    Raises PlanError for a user's name that fits no input or has the wrong number of dims.
    """
    found = FactorNames()
    rows = {port.key: factors.dims[node, 0] for port, node in zip(inputs, entering(graph), strict=True)}
    _user_names(found, inputs, rows, names or {})
    found.batch = find_batch(factors, inputs, rows, names or {}, joined)
    _by_role(found, factors, "experts", "experts")
    _attention(found, factors, inputs, rows)
    _inputs(found, factors, inputs, rows)
    products = _products(factors)
    _name_stacked_experts(found, factors, products, [rows[port.key] for port in inputs if port.kind == "parameter"])
    _by_role(found, factors, "vocabulary", "vocab")
    _by_role(found, factors, "hidden", "hidden")
    _feed_forward(found, factors, products, {factor for port in inputs if port.kind == "input" for factor in chain(*rows[port.key])})
    found.products = {node for node in factors.instances if is_product(node)}
    for factor in (factor for product in products for factor in (*product.into, *product.out)):
        if found.of.get(factor) not in ("batch", "seq"):
            found.also[factor].add("features")
    for port in inputs:
        if port.kind == "parameter":
            for dim, classes in enumerate(rows[port.key]):
                for position, factor in enumerate(classes):
                    _name_unnamed(found, [factor], f"{port.name}.{dim}{f'.{position}' if len(classes) > 1 else ''}")
                if not classes:
                    found.ones.add(f"{port.name}.{dim}")
        elif port.kind == "input" and port.name in caches and len(port.shape) == 4:
            _name_unnamed(found, rows[port.key][TOKENS], "seq")
    found.sums = _sums(graph)
    _joined_steps(found, factors)
    for count, factor in enumerate(sorted(factors.size.keys() - found.of.keys())):
        found.name_factor(factor, f"f{count}")
    return found


def _name_unnamed(found: FactorNames, classes: Iterable[int], *names: str) -> None:
    """Names those of the classes that have no name."""
    for factor in classes:
        if factor not in found.of:
            found.name_factor(factor, *names)


def _joined_steps(found: FactorNames, factors: Factors) -> None:
    """Names the dim along which a loop over the sequence concatenates its results."""
    lengths = {factors.size[factor] for factor, name in found.of.items() if name == "seq"}
    for instance in forward_instances(factors):
        if op_name(instance.node) in ("aten.cat", "aten.stack") and (count := len(instance.operands)) in lengths:
            for size, row in zip(record(instance.node).shape, instance.results[0], strict=True):
                if size == count and len(row) == 1:
                    _name_unnamed(found, [instance.factor[row[0]]], "seq")


def _sums(graph: Graph) -> dict[Node, frozenset[str]]:
    """Gradients that autograd adds up -> the modules whose operators computed the summands."""
    found: dict[Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or op_name(node) != "aten.add.Tensor" or len(node.all_input_nodes) < 2:
            continue
        made = record(node)
        if made.phase == "backward" and not made.source.module:
            parts = [value_of(part)[0] for part in node.all_input_nodes]
            found[node] = frozenset().union(*(found.get(part) or {records(part)[0].source.module} for part in parts))
    return found


def _user_names(found: FactorNames, inputs: Sequence[Port], rows: Rows, names: Labels) -> None:
    known = {port.name: port for port in inputs if port.kind == "input"}
    for name, dims in names.items():
        if name not in known:
            raise PlanError(f"names={{{name!r}: ...}} fits no input; the inputs are {', '.join(known)}")
        port = known[name]
        if len(dims) != len(port.shape):
            raise PlanError(f"names={{{name!r}: {tuple(dims)}}} has {len(dims)} names, but {name} has shape {list(port.shape)}")
        for label, classes in zip(dims, rows[port.key], strict=True):
            if label:
                for factor in classes:
                    found.name_factor(factor, label)
                if not classes:
                    found.ones.add(label)


def _inputs(found: FactorNames, factors: Factors, inputs: Sequence[Port], rows: Rows) -> None:
    """Names an input's batch; of the other first two dims seq is one, for integers of two dims and floats of three."""
    tied = factors.tied()
    convolved = {one.factor[token] for one in factors.instances.values() if one.node.target not in CROPS for token in one.tied}
    for port in inputs:
        if port.kind != "input" or not port.shape:
            continue
        dims = rows[port.key]
        first, classes = found.batch.of(port.name, dims)
        labels = [] if first is None else [(BATCH, classes)]
        channels = any(tied.get(factor, set()) & convolved for factor in dims[-1])  # before what a convolution runs over
        if not channels and len(dims) == (3 if port.dtype.is_floating_point else 2):
            place = 0 if first else 1
            if not first or found.batch.ordered & {*dims[place]}:  # beside a leading batch dim the usual case
                labels.append(("seq", dims[place]))
        for label, classes in labels:
            if not classes:
                found.ones.add(label)
            for factor in classes if label == BATCH or len(classes) == 1 else ():
                found.name_factor(factor, label)
    _space(found, factors, tied)
    # a sequence that is in no input (image patches): the dim of attention's queries
    if "seq" not in found.of.values():
        for instance in forward_instances(factors):
            for factor in _classes(instance, "queries"):
                found.name_factor(factor, "seq", "seq")  # beside another name, too


def _space(found: FactorNames, factors: Factors, tied: Mapping[int, set[int]]) -> None:
    """Dims that windows tie get one name: an existing one, otherwise the usual one for the position in an image."""
    for instance in factors.instances.values():
        for dims in (*instance.operands, *instance.results):
            space = [dim - len(dims) for dim, row in enumerate(dims) if row and row[0] in instance.tied]
            for dim in space:
                members = sorted(tied[instance.factor[dims[dim][0]]])
                known = [factor for factor in members if factor in found.of]
                if not known and instance.node.target in CROPS:
                    continue  # a shift by some positions tells nothing, a convolution does
                if known:
                    names: tuple[str, ...] = (found.of[known[0]], *sorted(found.also[known[0]]))
                elif space == [-1] and (len(dims) == 3 or dims[-2] == ()):
                    names = ("length", "seq")
                else:
                    names = (("depth", "height", "width")[dim],)
                _name_unnamed(found, members, *names)


def _classes(instance: Instance, role: str) -> tuple[int, ...]:
    """The classes of the letters that an operator's rule gives this role, major to minor."""
    letters = [letter for letter, found in instance.rule.roles.items() if found == role]
    return tuple(instance.factor[token] for token in instance.size if token[0] in letters)


def _has(instance: Instance, role: str) -> bool:
    return role in instance.rule.roles.values()


def _attention(found: FactorNames, factors: Factors, inputs: Sequence[Port], rows: Rows) -> None:
    spans: list[tuple[Instance, Instance]] = []
    for instance in forward_instances(factors):
        if _has(instance, "heads"):
            _heads(found, _classes(instance, "heads"))
            for factor in _classes(instance, "head"):
                found.name_factor(factor, "head")
        elif _has(instance, "weighs"):
            span = written_out(instance, factors)
            if span is not None:
                found.attention |= span[0]
                spans.append(span[1:])
    numbers = {node.meta.get("seq_nr") for node in found.attention}
    whole = {node for node, instance in factors.instances.items() if _has(instance, "heads")}
    numbers |= {node.meta.get("seq_nr") for node in whole if records(node)[0].phase == "backward"}
    found.attention |= whole
    for node in factors.instances:
        if records(node)[0].phase == "backward" and node.meta.get("seq_nr") in numbers - {None}:
            found.attention.add(node)
    entering_ports = [port for port in inputs if port.kind == "input" and port.shape]
    batch = {factor for port in entering_ports for factor in found.batch.of(port.name, rows[port.key])[1]}
    for scores, mix in spans:
        shared = {*_classes(scores, "multiplies")} & {*_classes(mix, "multiplies")}
        for factor in sorted(shared - batch):
            found.name_factor(factor, "heads")
        for factor in _classes(scores, "contracts"):
            found.name_factor(factor, "head")


def _heads(found: FactorNames, classes: Sequence[int]) -> None:
    if not classes:
        found.ones.add("heads")
    elif len(classes) == 1:
        found.name_factor(classes[0], "heads")
    else:
        found.name_factor(classes[0], "kv_heads", "heads")
        for factor in classes[1:]:
            found.name_factor(factor, "group", "heads")


def _by_role(found: FactorNames, factors: Factors, role: str, name: str) -> None:
    """Names the classes of letters with this role in the rules, unless they have a name."""
    for instance in forward_instances(factors):
        _name_unnamed(found, _classes(instance, role), name)


def _name_stacked_experts(
    found: FactorNames, factors: Factors, products: Sequence[ProductFactors], parameters: Sequence[Sequence[tuple[int, ...]]]
) -> None:
    """Names `experts` the first dim of stacked weights [experts, .., ..] that products batch over, if another product, a router's, produces
    it: a mixture written so that every expert gets all tokens."""
    stacks = {dims[0][0] for dims in parameters if len(dims) == 3 and len(dims[0]) == 1}
    multiplied = {factor for instance in forward_instances(factors) for factor in _classes(instance, "multiplies")}
    made = {factor for product in products for factor in product.out}
    _name_unnamed(found, sorted(stacks & multiplied & made), "experts")


@dataclass(frozen=True)
class ProductFactors:
    """A forward product: the classes `into` that it contracts, and `out` that come from its weight. `space`: it has windows."""

    into: tuple[int, ...]
    out: tuple[int, ...]
    space: bool


def _products(factors: Factors) -> list[ProductFactors]:
    return [
        ProductFactors(
            _classes(instance, "contracts"), _classes(instance, "makes"), bool(instance.rule.windows) and not _has(instance, "experts")
        )
        for instance in forward_instances(factors)
        if _has(instance, "makes")
    ]


def _feed_forward(found: FactorNames, factors: Factors, products: Sequence[ProductFactors], outside: Collection[int]) -> None:
    """Names `ffn` the classes that one product with a parameter produces and another one contracts, but for `outside`, those that an input
    has: residual dims.
    The widest come first, and one whose products all have a named class already is skipped. In 1024-4096-1024-4096-1024 the two of 4096 are
    ffn, so that each pair of products meets in one sum; splitting the 1024 between them as well would only move more. Between convolutions
    they are called channels, with ffn as a second name."""
    made = {factor for product in products for factor in product.out}
    summed = {factor for product in products for factor in product.into}
    vocabularies = {factors.size[factor] for factor, name in found.of.items() if name == "vocab"}
    heads = [factor for factor in sorted(made - summed) if factors.size[factor] in vocabularies]
    _name_unnamed(found, heads, "vocab")  # of a model that is called without labels
    splittable = {factor for factor, names in found.also.items() if names & {"heads", "vocab"}}
    for factor in sorted((made & summed).difference(outside, found.of), key=lambda f: (-factors.size[f], f)):
        own = [product for product in products if factor in (*product.into, *product.out)]
        if not all(splittable & {*product.into, *product.out} for product in own):
            found.name_factor(factor, *(("channels", "ffn") if any(product.space for product in own) else ("ffn",)))
            splittable.add(factor)
