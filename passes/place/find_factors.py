"""Find factors: dims of the global view as factors (`factorize.py`), names of their classes for plans, and each input's batch dim.

    mm: f32[6, 40]      becomes      mm: f32[batch 6, ffn 40]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from meshc.cost.flops import is_product
from meshc.errors import PlanError
from meshc.ir import op_name, records, value_of
from meshc.ir.graph import placeholders as entering
from meshc.ir.keys import key_of, kind_of, name_of
from meshc.optimizer.spec import GRADIENT, SUM
from meshc.passes.depth.counts import counts_of
from meshc.passes.depth.view import view_of
from meshc.passes.phases.compilation_phase import phase_fields
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.factors import Factors, Instance, Value
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import JoinedInputs
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.passes.place.batch import BATCH, find_batch, refuse_numbers_of_rows, refuse_other_joint
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
# `<module path>.<dim>` of the first parameter that has it. A name may cover several classes (each layer has its own heads); the user's
# `names=` take precedence.


TOKENS = 2
"""The token dim of a cache [rows, heads, tokens, head]."""


def name_factors(
    graph: Graph,
    factors: Factors,
    inputs: Sequence[Port],
    names: Mapping[str, Sequence[str | None]] | None = None,
    caches: Collection[str] = (),
    joined: JoinedInputs | None = None,
) -> FactorNames:
    """Names for every class. `caches`: the inputs that are keys and values of earlier tokens. `joined`: the dims along which inputs were
    joined from parts.

    Raises PlanError for a user's name that fits no input or has the wrong number of dims.
    """
    found = FactorNames()
    placeholders = dict(zip((port.key for port in inputs), entering(graph), strict=True))
    _user_names(found, factors, inputs, placeholders, names or {})
    found.batch = find_batch(factors, inputs, placeholders, names or {}, joined)
    _by_role(found, factors, "experts", "experts")
    _attention(found, factors, inputs, placeholders)
    _inputs(found, factors, inputs, placeholders)
    _name_stacked_experts(found, factors, [placeholders[port.key] for port in inputs if port.kind == "parameter"])
    _by_role(found, factors, "vocabulary", "vocab")
    _by_role(found, factors, "hidden", "hidden")
    _feed_forward(found, factors, [placeholders[port.key] for port in inputs if port.kind == "input"])
    _features(found, factors)
    for port in inputs:
        if port.kind == "parameter":
            for dim, classes in enumerate(factors.dims[(placeholders[port.key], 0)]):
                for position, factor in enumerate(classes):
                    suffix = f".{position}" if len(classes) > 1 else ""
                    if factor not in found.of:
                        found.name_factor(factor, f"{port.name}.{dim}{suffix}")
                if not classes:
                    found.ones.add(f"{port.name}.{dim}")
        elif port.kind == "input" and port.name in caches and len(port.shape) == 4:
            for factor in factors.dims[(placeholders[port.key], 0)][TOKENS]:
                if factor not in found.of:
                    found.name_factor(factor, "seq")
    found.sums = _sums(graph)
    _joined_steps(found, factors)
    count = 0
    for factor in sorted(factors.size):
        if factor not in found.of:
            found.name_factor(factor, f"f{count}")
            count += 1
    return found


def _joined_steps(found: FactorNames, factors: Factors) -> None:
    """Names the dim along which a loop over the sequence concatenates its results."""
    lengths = {factors.size[factor] for factor, name in found.of.items() if name == "seq"}
    for instance in _forward(factors):
        if op_name(instance.node) not in ("aten.cat", "aten.stack"):
            continue
        (made,), count = records(instance.node), len(instance.operands)
        for dim, row in enumerate(instance.results[0]):
            one = instance.factor[row[0]] if len(row) == 1 else None
            if count in lengths and made.shape[dim] == count and one is not None and one not in found.of:
                found.name_factor(one, "seq")


def _sums(graph: Graph) -> dict[Node, frozenset[str]]:
    """Gradients that autograd adds up -> the modules whose operators computed the summands."""
    found: dict[Node, frozenset[str]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or op_name(node) != "aten.add.Tensor" or len(node.all_input_nodes) < 2:
            continue
        record = records(node)[0]
        if record.phase == "backward" and not record.source.module:
            parts = [value_of(part)[0] for part in node.all_input_nodes]
            found[node] = frozenset().union(*(found.get(part) or {records(part)[0].source.module} for part in parts))
    return found


def _user_names(
    found: FactorNames,
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
                    found.name_factor(factor, label)
                if not classes:
                    found.ones.add(label)


def _inputs(found: FactorNames, factors: Factors, inputs: Sequence[Port], placeholders: Mapping[str, Node]) -> None:
    """Names an input's batch; of the other first two dims seq is one, for integers of two dims and floats of three."""
    tied = factors.tied()
    convolved = {one.factor[token] for one in factors.instances.values() if one.node.target not in CROPS for token in one.tied}
    for port in inputs:
        if port.kind != "input" or not port.shape:
            continue
        dims = factors.dims[(placeholders[port.key], 0)]
        first, classes = found.batch.of(port.name, dims)
        labels = [] if first is None else [(BATCH, classes)]
        if any(tied.get(factor, set()) & convolved for factor in dims[-1]):
            pass  # channels before what a convolution runs over
        elif len(dims) == 2 and not port.dtype.is_floating_point or len(dims) == 3 and port.dtype.is_floating_point:
            place = 0 if first else 1
            if not first or found.batch.ordered & {*dims[place]}:  # beside a leading batch dim the usual case
                labels.append(("seq", dims[place]))
        for label, classes in labels:
            if classes and not (len(classes) > 1 and label == "seq"):
                for factor in classes:
                    found.name_factor(factor, label)
            elif not classes:
                found.ones.add(label)
    _space(found, factors, tied)
    # a sequence that is in no input (image patches): the dim of attention's queries
    if "seq" not in found.of.values():
        for instance in _forward(factors):
            for factor in _classes(instance, "queries"):
                found.name_factor(factor, "seq")
                found.also[factor].add("seq")


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
                names = (found.of[known[0]], *sorted(found.also[known[0]])) if known else _usual(dims, space, dim)
                for factor in members:
                    if factor not in found.of:
                        found.name_factor(factor, *names)


def _usual(dims: Sequence[Sequence[object]], space: list[int], dim: int) -> tuple[str, ...]:
    """The usual name of an image's dim by its position, from the end."""
    alone = space == [-1] and (len(dims) == 3 or dims[-2] == ())
    return ("length", "seq") if alone else (("depth", "height", "width")[dim],)


def _forward(factors: Factors) -> Iterator[Instance]:
    return (instance for node, instance in factors.instances.items() if records(node)[0].phase == "forward")


def _classes(instance: Instance, role: str) -> tuple[int, ...]:
    """The classes of the letters that an operator's rule gives this role, major to minor."""
    letters = [letter for letter, found in instance.rule.roles.items() if found == role]
    return tuple(instance.factor[token] for token in instance.size if token[0] in letters)


def _has(instance: Instance, role: str) -> bool:
    return role in instance.rule.roles.values()


def _attention(found: FactorNames, factors: Factors, inputs: Sequence[Port], placeholders: Mapping[str, Node]) -> None:
    spans: list[tuple[Instance, Instance]] = []
    for instance in _forward(factors):
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
    rows = [(port.name, factors.dims[(placeholders[port.key], 0)]) for port in inputs if port.kind == "input" and port.shape]
    batch = {factor for name, dims in rows for factor in found.batch.of(name, dims)[1]}
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
    for instance in _forward(factors):
        for factor in _classes(instance, role):
            if factor not in found.of:
                found.name_factor(factor, name)


def _name_stacked_experts(found: FactorNames, factors: Factors, parameters: Sequence[Node]) -> None:
    """Names `experts` the first dim of stacked weights [experts, .., ..] that products batch over, if another product, a router's, produces
    it: a mixture written so that every expert gets all tokens."""
    stacks = {classes[0] for node in parameters if len(dims := factors.dims[(node, 0)]) == 3 for classes in dims[:1] if len(classes) == 1}
    multiplied = {factor for instance in _forward(factors) for factor in _classes(instance, "multiplies")}
    made = {factor for product in _products(factors) for factor in product.out}
    for factor in sorted(stacks & multiplied & made):
        if factor not in found.of:
            found.name_factor(factor, "experts")


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
        for instance in _forward(factors)
        if _has(instance, "makes")
    ]


def _feed_forward(found: FactorNames, factors: Factors, inputs: Sequence[Node]) -> None:
    """Names `ffn` the classes that one product with a parameter produces and another one contracts, unless an input has them: residual
    dims.
    The widest come first, and one whose products all have a named class already is skipped. In 1024-4096-1024-4096-1024 the two of 4096 are
    ffn, so that each pair of products meets in one sum; splitting the 1024 between them as well would only move more. Between convolutions
    they are called channels, with ffn as a second name."""
    products = _products(factors)
    made = {factor for product in products for factor in product.out}
    summed = {factor for product in products for factor in product.into}
    vocabularies = {factors.size[factor] for factor, name in found.of.items() if name == "vocab"}
    for factor in sorted(made - summed):
        if factor not in found.of and factors.size[factor] in vocabularies:
            found.name_factor(factor, "vocab")  # the head of a model that is called without labels
    outside = {factor for node in inputs for row in factors.dims[(node, 0)] for factor in row}
    splittable = {factor for factor, names in found.also.items() if names & {"heads", "vocab"}}
    for factor in sorted((made & summed) - outside, key=lambda f: (-factors.size[f], f)):
        if factor in found.of:
            continue
        own = [product for product in products if factor in (*product.into, *product.out)]
        if all(splittable & {*product.into, *product.out} for product in own):
            continue
        if any(product.space for product in own):
            found.name_factor(factor, "channels", "ffn")
        else:
            found.name_factor(factor, "ffn")
        splittable.add(factor)


def _features(found: FactorNames, factors: Factors) -> None:
    """`features` is a second name of all classes that products contract or produce, except batch and sequence; the region `products` has
    all of them."""
    found.products = {node for node in factors.instances if is_product(node)}
    for product in _products(factors):
        for factor in (*product.into, *product.out):
            if found.of.get(factor) not in ("batch", "seq"):
                found.also[factor].add("features")
