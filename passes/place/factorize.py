"""Factorize: the indivisible indices of the computation, as classes over the dims of every value.

    w: f32[2304, 768]      c: f32[96, 2304] = mm(x, w^T)      q: f32[8, 12, 4, 192]... = view, split
  becomes
    w: [3 * heads 12 * head 64, hidden 768]     c: [batch 8 * seq 12, 3 * heads * head]

Each operator's rule unifies the dims that share a letter; a view, an equal split, a concatenation of equal parts need cuts of dims. Cuts
of a dim are its suffix products; a set of them fits if each divides the next. Cuts are collected over the whole graph before any is
applied, the most needed win, and a relation that does not fit is dropped with its reason: its dims must be whole there. The result does not
depend on the order of the graph. (Sources: Shardy's factor-based rules and TOAST's named dims, arXiv 2508.15010; classes only name:
`propagate` decides at each operator.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torch.fx import Graph, Node

from meshc.ir import is_getitem, operands, records, value_of
from meshc.passes.phases.factors import Factors, Instance, Token, Value, value_record
from meshc.rules import rule_of
from meshc.rules.rule import ONE, Relation, Rule

Pairs = list[tuple[Token | None, Token | None]]
"""Pairs of tokens of a relation's two sides that are the same; None where a side has a number."""


class _SideElement(NamedTuple):
    """An element of a relation's side: a factor, and the operator's token for it; both None where the relation has a number."""

    token: Token | None
    factor: int | None
    size: int


class _Classes:
    """Union-find over numbers."""

    def __init__(self) -> None:
        self.parent: list[int] = []

    def new(self) -> int:
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def find(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)


class _Dims:
    """A class for each dim of each value, joined where dims are the same."""

    def __init__(self) -> None:
        self.classes = _Classes()
        self.of: dict[Value, list[int | None]] = {}
        self.size: dict[int, int] = {}

    def __call__(self, value: Value) -> list[int | None]:
        if value not in self.of:
            shape = value_record(value).shape
            self.of[value] = [None if size == 1 else self.classes.new() for size in shape]
            self.size |= {dim: size for dim, size in zip(self.of[value], shape, strict=True) if dim is not None}
        return self.of[value]

    def join(self, one: Value, other: Value) -> None:
        for a, b in zip(self(one), self(other), strict=True):
            if a is not None and b is not None:
                self.classes.join(a, b)


@dataclass
class _RuledOperator:
    """An operator's rule, the values it reads, the class of dims of each of its letters, and the demands of its relations."""

    node: Node
    rule: Rule
    values: list[Value]
    dims: dict[str, int]
    demands: list[Demand]

    def demand(self, dims: _Dims) -> None:
        """Fills `demands`, once all equal dims are joined."""
        for relation in self.rule.relations:
            inside, outside = (_side(names, self.dims, dims) for names in (relation.inside, relation.outside))
            self.demands.append(Demand(self.node, relation, inside, outside))


class _DimFactors:
    """The factors of each class of dims, by its cuts; factors that relations align are joined."""

    def __init__(self, dims: _Dims, cuts: Mapping[int, frozenset[int]]) -> None:
        self.classes = _Classes()
        self.size: dict[int, int] = {}
        self._dims, self._cuts = dims, cuts
        self._of: dict[int, list[int]] = {}

    def __call__(self, dim: int) -> list[int]:
        """The factors of a class of dims, major to minor."""
        root = self._dims.classes.find(dim)
        if root not in self._of:
            self._of[root] = []
            for size in _sizes(self._dims.size[dim], self._cuts.get(root, frozenset())):
                factor = self.classes.new()
                self.size[factor] = size
                self._of[root].append(factor)
        return self._of[root]

    def align(self, relation: Relation, dims: Mapping[str, int]) -> Pairs | None:
        """Joins the factors of a relation's two sides; returns the pairs of tokens, or None if the sides share no factors."""
        pairs = _align(_along(relation.inside, dims, self), _along(relation.outside, dims, self))
        if pairs is None:
            return None
        for inner, outer in pairs:
            if inner.factor is not None and outer.factor is not None:
                self.classes.join(inner.factor, outer.factor)
        return [(inner.token, outer.token) for inner, outer in pairs]


def factorize(graph: Graph, alike: Iterable[tuple[Value, Value]] = (), counts: Mapping[Node, int] | None = None) -> Factors:
    """Classes for every dim of every value of a global-view graph. `alike`: pairs of values that share factors, such as a gradient and its
    parameter. `counts`: the multiplicity of nodes that stand for several layers."""
    dims = _Dims()
    operators = [*_operators(graph, dims)]
    for one, other in alike:
        dims.join(one, other)
    for operator in operators:
        operator.demand(dims)
    dropped: list[str] = []
    factors = _DimFactors(dims, cut_dims([demand for operator in operators for demand in operator.demands], dropped, counts or {}))
    for demand, letters in [(demand, operator.dims) for operator in operators for demand in operator.demands if demand.active]:
        demand.pairs = factors.align(demand.relation, letters)
        if demand.pairs is None:
            dropped.append(f"{demand.node.name}: {demand.relation.inside} and {demand.relation.outside} do not share factors")

    found = Factors({}, {}, {}, dropped)
    for value, classes in dims.of.items():
        found.dims[value] = tuple(() if dim is None else tuple(map(factors.classes.find, factors(dim))) for dim in classes)
    for factor, size in factors.size.items():
        found.size[factors.classes.find(factor)] = size
    for operator in operators:
        alias, whole = _resolve_tokens(operator, factors)
        found.instances[operator.node] = _instance(operator, dims, factors, alias, whole)
    return found


def _operators(graph: Graph, dims: _Dims) -> Iterator[_RuledOperator]:
    """Every operator, in the order of the graph; joins the dims of its letters."""
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            dims((node, 0))
        if node.op != "call_function" or is_getitem(node):
            continue
        tensors = operands(node)
        values = [value_of(tensor) for tensor in tensors]
        rule = rule_of(node, tensors) or _unknown(node, tensors)
        known: dict[str, int] = {}
        for value, letters in [*zip(values, rule.operands, strict=True), *[((node, i), r) for i, r in enumerate(rule.results)]]:
            for letter, dim in zip(letters, dims(value), strict=True):
                if dim is None or letter == ONE:
                    continue
                if letter in known:
                    dims.classes.join(known[letter], dim)
                known[letter] = dim
        yield _RuledOperator(node, rule, values, known, [])


def _resolve_tokens(operator: _RuledOperator, factors: _DimFactors) -> tuple[dict[Token, Token], set[Token]]:
    """What an operator's relations imply for its tokens: aliases, and tokens that must be whole."""
    alias: dict[Token, Token] = {}
    whole: set[Token] = set()
    for demand in operator.demands:
        if demand.pairs is None:
            letters = [name for name in (*demand.relation.inside, *demand.relation.outside) if not name.startswith("#")]
            whole |= {(letter, k) for letter in letters for k in range(len(factors(operator.dims[letter])))}
            continue
        for inner, outer in demand.pairs:
            if inner is not None and outer is not None:
                alias[outer] = alias.get(inner, inner)
            else:
                whole.update(token for token in (inner, outer) if token is not None)
    return alias, whole


def _instance(operator: _RuledOperator, dims: _Dims, factors: _DimFactors, alias: Mapping[Token, Token], whole: set[Token]) -> Instance:
    node, rule = operator.node, operator.rule
    size: dict[Token, int] = {}
    factor: dict[Token, int] = {}
    whole = {alias.get(token, token) for token in whole}

    def tokens(letters: tuple[str, ...], classes: list[int | None]) -> tuple[tuple[Token, ...], ...]:
        found: list[tuple[Token, ...]] = []
        for letter, dim in zip(letters, classes, strict=True):
            row = []
            for position, own in enumerate(() if dim is None or letter == ONE else factors(dim)):
                token = alias.get((letter, position), (letter, position))
                size[token] = factors.size[own]
                factor.setdefault(token, factors.classes.find(own))
                if letter in rule.whole or (position and letter in rule.major):
                    whole.add(token)
                row.append(token)
            found.append(tuple(row))
        return tuple(found)

    ins = tuple(tokens(letters, dims.of[value]) for value, letters in zip(operator.values, rule.operands, strict=True))
    outs = tuple(tokens(letters, dims.of[(node, index)]) for index, letters in enumerate(rule.results))
    tied = _tied(rule, size, whole)
    letter_sums: tuple[dict[str, str], ...] = rule.sums or tuple({} for _ in outs)
    sums = tuple({t: how for letter, how in result.items() for t in size if t[0] == letter} for result in letter_sums)
    return Instance(node, rule, tuple(operator.values), ins, outs, sums, frozenset(whole), size, factor, rule.kind != "unknown", tied)


def _tied(rule: Rule, size: Mapping[Token, int], whole: set[Token]) -> dict[Token, Token]:
    """The tokens that windows tie, both ways. A letter of several factors, or whose partner is whole or of size 1, becomes whole."""
    tied: dict[Token, Token] = {}
    for one, (other, _) in rule.windows.items():
        tokens = [token for token in size if token[0] in (one, other)]
        if tokens in ([(one, 0), (other, 0)], [(other, 0), (one, 0)]) and not whole & set(tokens):
            tied.update({(one, 0): (other, 0), (other, 0): (one, 0)})
        else:
            whole.update(tokens)
    return tied


def _unknown(node: Node, tensors: list[Node]) -> Rule:
    """An operator without a rule: every dim of every operand and result must be whole."""
    read = [value_record(value_of(tensor)) for tensor in tensors]
    ins, outs = (
        tuple(tuple(f"{prefix}{k}.{dim}" for dim in range(len(each.shape))) for k, each in enumerate(values))
        for prefix, values in (("x", read), ("y", records(node)))
    )
    return Rule(ins, outs, ({},) * len(outs), frozenset(chain(*ins, *outs)), kind="unknown")


def _side(names: tuple[str, ...], own: Mapping[str, int], dims: _Dims) -> Side:
    return [(None, int(n[1:])) if n.startswith("#") else (dims.classes.find(own[n]), dims.size[own[n]]) for n in names]


def _sizes(size: int, cuts: frozenset[int]) -> list[int]:
    """Sizes of the factors of a dim, major to minor: `_sizes(2304, {64, 768}) == [3, 12, 64]`."""
    bounds = [size, *sorted(cuts, reverse=True), 1]
    return [a // b for a, b in zip(bounds, bounds[1:], strict=False)]


def _along(names: Iterable[str], dims: Mapping[str, int], factors: _DimFactors) -> Iterator[_SideElement]:
    """The elements of one side of a relation."""
    for name in names:
        if name.startswith("#"):
            yield _SideElement(None, None, int(name[1:]))
        else:
            yield from (_SideElement((name, k), factor, factors.size[factor]) for k, factor in enumerate(factors(dims[name])))


def _align(inside: Iterable[_SideElement], outside: Iterable[_SideElement]) -> list[tuple[_SideElement, _SideElement]] | None:
    """Pairs of equal size; a number may stand for several factors."""
    pairs: list[tuple[_SideElement, _SideElement]] = []
    inner, outer = ([known for known in side if known.size != 1] for side in (inside, outside))
    while inner or outer:
        if not inner or not outer:
            return None
        a, b = inner.pop(0), outer.pop(0)
        if a.size == b.size:
            pairs.append((a, b))
        elif a.token is None and a.size % b.size == 0:
            pairs.append((a._replace(size=b.size), b))
            inner.insert(0, a._replace(size=a.size // b.size))
        elif b.token is None and b.size % a.size == 0:
            pairs.append((a, b._replace(size=a.size)))
            outer.insert(0, b._replace(size=b.size // a.size))
        else:
            return None
    return pairs


# Cuts of dims into factors, solved over the relations of all operators.
#
#     [24] = [4, 6]     [24] = [2, 12]     [24] = [3, 8]     the dim is cut at 6 and at 12; 8 does not nest with 12: the last is dropped
#
# A cut of a dim is one of its suffix products. Cuts of a dim fit if each divides the next. A class of dims, which is a number, is cut as
# one. The time is near linear in relations, since cuts are propagated from each new relation alone, and undone if it does not fit.


Side = list[tuple[int | None, int]]
"""The dims along one side of a relation, major to minor: (class, or None for a letter that is only a number; size)."""


@dataclass
class Demand:
    """A relation's demand on the dims of its operator; `active`: whether its cuts fit; `pairs`: of its tokens, if it holds."""

    node: Node
    relation: Relation
    inside: Side
    outside: Side
    active: bool = True
    pairs: Pairs | None = None

    def required_cuts(self) -> dict[int, set[int]] | None:
        """The cuts of each class that the relation needs by itself; None if the two sides have no factors in common."""
        wanted = self.suffixes({})
        merged: dict[int, set[int]] = defaultdict(set)
        for side in (self.inside, self.outside):
            inner = _inner(side, wanted)
            if inner is None or not _chain(wanted):
                return None
            for dim, found in inner.items():
                merged[dim] |= found
        return merged

    def suffixes(self, cuts: dict[int, frozenset[int]]) -> set[int]:
        """Suffix products at which either side is cut, given the cuts of dims."""
        return _suffixes(self.inside, cuts) | _suffixes(self.outside, cuts)


def cut_dims(demands: list[Demand], dropped: list[str], counts: Mapping[Node, int]) -> dict[int, frozenset[int]]:
    """The cuts of each class of dims. Hard relations first, the most supported first; a soft one only joins if it adds no cut. `counts`:
    the multiplicity of operators that stand for several."""
    voters: dict[tuple[int, int], list[int]] = defaultdict(list)
    asked = [(demand, demand.required_cuts()) for demand in demands]
    for demand, cuts in asked:
        if cuts is None:
            demand.active = False
            dropped.append(f"{demand.node.name}: a reshape without common factors keeps its dims whole")
        elif not demand.relation.soft:
            for dim, found in cuts.items():
                for cut in found:
                    voters[dim, cut].append(counts.get(demand.node, 1))
    # a dim of one layer has the votes of that layer alone
    support = Counter({cut: len(standing) if min(standing) > 1 else sum(standing) for cut, standing in voters.items()})

    def weight(entry: tuple[Demand, dict[int, set[int]] | None]) -> tuple[object, ...]:
        """The support of the relation's least supported cut; ties are broken by cuts and sizes, so that the graph's order has no effect."""
        demand, cuts = entry
        found = sorted((support[dim, cut], cut) for dim, wanted in (cuts or {}).items() for cut in wanted)
        sides = [[size for _, size in side] for side in (demand.inside, demand.outside)]
        return found[0] if found else (1 << 30, 0), found, sides

    live = [demand for demand, _ in sorted((entry for entry in asked if entry[0].active), key=weight, reverse=True)]
    hard, soft = ([demand for demand in live if demand.relation.soft == wanted] for wanted in (False, True))
    known = _Cuts()
    for demand in hard:
        if not known.add(demand):
            demand.active = False
            dropped.append(f"{demand.node.name}: {demand.node.target} asks for factors that do not nest with those of other operators")
    for demand in soft:
        demand.active = False
    changed = True
    while changed:
        changed = False
        for demand in soft:
            if not demand.active and known.has(demand) and known.add(demand):
                demand.active = changed = True
    return known.cuts


class _Cuts:
    """The cuts of classes of dims under the relations added so far, propagated through all of them to the fixed point."""

    def __init__(self) -> None:
        self.cuts: dict[int, frozenset[int]] = {}
        self._touching: dict[int, list[Demand]] = defaultdict(list)

    def has(self, demand: Demand) -> bool:
        """Whether the cuts that a relation needs on its inside exist already."""
        inner = _inner(demand.inside, demand.suffixes({}))
        return inner is not None and all(found <= self.cuts.get(dim, frozenset()) for dim, found in inner.items())

    def add(self, demand: Demand) -> bool:
        """Adds a relation; False, without any change, if cuts stop nesting under it."""
        dims = {dim for dim, _ in (*demand.inside, *demand.outside) if dim is not None}
        for dim in dims:
            self._touching[dim].append(demand)
        before: dict[int, frozenset[int]] = {}
        if self._carry(demand, before):
            return True
        for dim in dims:
            self._touching[dim].pop()
        self.cuts.update(before)
        return False

    def _carry(self, last: Demand, before: dict[int, frozenset[int]]) -> bool:
        """Propagates cuts from a new relation; `before` receives the old cuts of each changed class."""
        work = [last]
        while work:
            demand = work.pop()
            wanted = demand.suffixes(self.cuts)
            if not _chain(wanted):
                return False
            for side in (demand.inside, demand.outside):
                inner = _inner(side, wanted)
                if inner is None:
                    return False
                for dim, found in inner.items():
                    had = self.cuts.get(dim, frozenset())
                    if found <= had:
                        continue
                    if not _chain(had | found):
                        return False
                    before.setdefault(dim, had)
                    self.cuts[dim] = had | found
                    work += self._touching[dim]
        return True


def _suffixes(side: Side, cuts: dict[int, frozenset[int]]) -> set[int]:
    """Suffix products at which one side of a relation is cut: between its dims, and inside them."""
    found, after = {1}, 1
    for dim, size in reversed(side):
        if dim is not None:
            found |= {after * cut for cut in cuts.get(dim, frozenset())}
        after *= size
        found.add(after)
    return found


def _inner(side: Side, wanted: set[int]) -> dict[int, set[int]] | None:
    """The cuts of each dim of a side at `wanted` suffix products; None if one falls across a dim."""
    found: dict[int, set[int]] = defaultdict(set)
    after = 1
    for dim, size in reversed(side):
        for cut in wanted:
            if after < cut < after * size:
                if dim is None or cut % after or size % (cut // after):
                    return None
                found[dim].add(cut // after)
        after *= size
    return found


def _chain(cuts: Iterable[int]) -> bool:
    ordered = sorted(cuts)
    return all(b % a == 0 for a, b in zip(ordered, ordered[1:], strict=False))
