"""Factorize: find the indivisible indices of the computation, as classes over the dims of every value.

    w: f32[2304, 768]      c: f32[96, 2304] = mm(x, w^T)      q: f32[8, 12, 4, 192]... = view, split
  becomes
    w: [3 * heads 12 * head 64, hidden 768]     c: [batch 8 * seq 12, 3 * heads * head]

Each operator's rule unifies the dims that share a letter; a view, an equal split, a concatenation of equal parts ask for the places where a
dim must be cut. Cuts of one dim are its suffix products; a set of them fits if each divides the next. They are collected over the whole
graph before any is applied, the ones asked for most often win, and a relation that does not fit is dropped with its reason: its dims must
be whole there. The result does not depend on the order of the graph. (Shardy's factor-based rules and TOAST's named dims, arXiv 2508.15010,
are the sources; classes only name: `propagate` decides at each operator.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from meshc.ir import is_getitem, operands, records, value_of
from meshc.passes.phases.factors import Factors, Instance, Token, Value
from meshc.passes.rules import rule_of
from meshc.passes.rules.rule import ONE, Relation, Rule

Piece = tuple[Token | None, int | None, int]


class _Union:
    def __init__(self) -> None:
        self.parent: list[int] = []

    def new(self) -> int:
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def find(self, item: int) -> int:
        while self.parent[item] != item:
            self.parent[item] = self.parent[self.parent[item]]
            item = self.parent[item]
        return item

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)


@dataclass
class _Solved:
    """A relation with its letters as dim classes (virtual letters as sizes)."""

    node: Node
    relation: Relation
    inside: list[tuple[int | None, int]]
    outside: list[tuple[int | None, int]]
    active: bool = True


class _Dims:
    """A class for each dim of each value, joined where dims are one."""

    def __init__(self) -> None:
        self.union = _Union()
        self.of: dict[Value, list[int | None]] = {}
        self.size: dict[int, int] = {}

    def __call__(self, value: Value) -> list[int | None]:
        if value not in self.of:
            shape = records(value[0])[value[1]].shape
            self.of[value] = [None if extent == 1 else self.union.new() for extent in shape]
            self.size.update((item, extent) for item, extent in zip(self.of[value], shape, strict=True) if item is not None)
        return self.of[value]

    def join(self, one: Value, other: Value) -> None:
        for a, b in zip(self(one), self(other), strict=True):
            if a is not None and b is not None:
                self.union.join(a, b)


@dataclass
class _Operator:
    """An operator's rule, the values it reads, and its letters as classes of dims."""

    node: Node
    rule: Rule
    values: list[Value]
    letters: dict[str, int]
    relations: list[_Solved]

    def solve(self, dims: _Dims) -> None:
        """Its relations, once all dims are joined that are one."""
        for relation in self.rule.relations:
            inside, outside = (_side(names, self.letters, dims.union, dims.size) for names in (relation.inside, relation.outside))
            self.relations.append(_Solved(self.node, relation, inside, outside))


class _Atoms:
    """A class for each piece that the cuts make of a class of dims; pieces that relations align are joined."""

    def __init__(self, dims: _Dims, cuts: Mapping[int, frozenset[int]]) -> None:
        self.union = _Union()
        self.size: dict[int, int] = {}
        self._dims, self._cuts = dims, cuts
        self._of: dict[int, list[int]] = {}

    def __call__(self, item: int) -> list[int]:
        """The pieces of a class of dims, major to minor."""
        root = self._dims.union.find(item)
        if root not in self._of:
            self._of[root] = []
            for extent in _extents(self._dims.size[item], self._cuts.get(root, frozenset())):
                piece = self.union.new()
                self.size[piece] = extent
                self._of[root].append(piece)
        return self._of[root]

    def align(self, solved: _Solved, letters: dict[str, int]) -> list[tuple[Token | None, Token | None]] | None:
        """The pieces of a relation's two sides, pair by pair, which are one from now on; None if the sides do not share factors."""
        inside, outside = (_tokens(names, letters, self, self.size) for names in (solved.relation.inside, solved.relation.outside))
        pairs = _align(inside, outside)
        if pairs is None:
            return None
        for (_, a, _), (_, b, _) in pairs:
            if a is not None and b is not None:
                self.union.join(a, b)
        return [(inner[0], outer[0]) for inner, outer in pairs]


def factorize(graph: Graph, alike: Iterable[tuple[Value, Value]] = ()) -> Factors:
    """Classes for every dim of every value of a global-view graph. `alike` pairs values of one meaning: a gradient and its parameter."""
    dims = _Dims()
    operators = [*_operators(graph, dims)]
    for one, other in alike:
        dims.join(one, other)
    for operator in operators:
        operator.solve(dims)
    dropped: list[str] = []
    atoms = _Atoms(dims, _solve([solved for operator in operators for solved in operator.relations], dropped))
    aligned = {id(solved): pairs for operator in operators for solved, pairs in _aligned(operator, atoms, dropped)}

    factors = Factors({}, {}, {}, dropped)
    for value, items in dims.of.items():
        factors.dims[value] = tuple(() if item is None else tuple(map(atoms.union.find, atoms(item))) for item in items)
    for atom, extent in atoms.size.items():
        factors.size[atoms.union.find(atom)] = extent
    for operator in operators:
        alias, whole = _settled(operator, atoms, aligned)
        factors.instances[operator.node] = _instance(operator, dims, atoms, alias, whole)
    return factors


def _operators(graph: Graph, dims: _Dims) -> Iterator[_Operator]:
    """Every operator, in the order of the graph, its letters' dims joined on the way."""
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            dims((node, 0))
        if node.op != "call_function" or is_getitem(node):
            continue
        tensors = operands(node)
        values = [value_of(tensor) for tensor in tensors]
        rule = rule_of(node, tensors) or _unknown(node, tensors)
        letters: dict[str, int] = {}
        for value, names in [*zip(values, rule.operands, strict=True), *[((node, i), r) for i, r in enumerate(rule.results)]]:
            for name, item in zip(names, dims(value), strict=True):
                if item is None or name == ONE:
                    continue
                if name in letters:
                    dims.union.join(letters[name], item)
                letters[name] = item
        yield _Operator(node, rule, values, letters, [])


def _aligned(
    operator: _Operator, atoms: _Atoms, dropped: list[str]
) -> Iterator[tuple[_Solved, list[tuple[Token | None, Token | None]]]]:
    """The operator's relations that hold, each with the pieces that it makes one. What does not hold is `dropped`, with the reason."""
    for solved in operator.relations:
        if not solved.active:
            continue
        pairs = atoms.align(solved, operator.letters)
        if pairs is None:
            solved.active = False
            dropped.append(f"{operator.node.name}: {solved.relation.inside} and {solved.relation.outside} do not share factors")
        else:
            yield solved, pairs


def _settled(
    operator: _Operator, atoms: _Atoms, aligned: Mapping[int, list[tuple[Token | None, Token | None]]]
) -> tuple[dict[Token, Token], set[Token]]:
    """What an operator's relations say of its tokens: which go by another's name, which must be whole."""
    alias: dict[Token, Token] = {}
    whole: set[Token] = set()
    for solved in operator.relations:
        if not solved.active:
            real = [name for name in (*solved.relation.inside, *solved.relation.outside) if not name.startswith("#")]
            whole |= {(name, k) for name in real for k in range(len(atoms(operator.letters[name])))}
            continue
        for inner, outer in aligned[id(solved)]:
            if inner is not None and outer is not None:
                alias[outer] = alias.get(inner, inner)
            else:
                whole |= {token for token in (inner, outer) if token is not None}
    return alias, whole


def _instance(operator: _Operator, dims: _Dims, atoms: _Atoms, alias: Mapping[Token, Token], whole: set[Token]) -> Instance:
    node, rule = operator.node, operator.rule
    size: dict[Token, int] = {}
    factor: dict[Token, int] = {}
    whole = {alias.get(token, token) for token in whole}

    def tokens(names: tuple[str, ...], items: list[int | None]) -> tuple[tuple[Token, ...], ...]:
        found: list[tuple[Token, ...]] = []
        for name, item in zip(names, items, strict=True):
            if item is None or name == ONE:
                found.append(())
                continue
            row = []
            for position, atom in enumerate(atoms(item)):
                token = alias.get((name, position), (name, position))
                size[token] = atoms.size[atom]
                factor.setdefault(token, atoms.union.find(atom))
                if name in rule.whole or (position and name in rule.major):
                    whole.add(token)
                row.append(token)
            found.append(tuple(row))
        return tuple(found)

    ins = tuple(tokens(names, dims.of[value]) for value, names in zip(operator.values, rule.operands, strict=True))
    outs = tuple(tokens(names, dims.of[(node, index)]) for index, names in enumerate(rule.results))
    tied = _tied(rule, size, whole)
    letter_sums: tuple[dict[str, str], ...] = rule.sums or tuple({} for _ in outs)
    sums = tuple({t: how for letter, how in result.items() for t in size if t[0] == letter} for result in letter_sums)
    known = rule.kind != "unknown"
    return Instance(node, rule, tuple(operator.values), ins, outs, sums, frozenset(whole), size, factor, known, tied)


def _tied(rule: Rule, size: Mapping[Token, int], whole: set[Token]) -> dict[Token, Token]:
    """The tokens that windows tie, both ways. A letter that is a product of factors, or whose partner is whole or of size 1, gets whole."""
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
    names: set[str] = set()

    def dims(prefix: str, rank: int) -> tuple[str, ...]:
        row = tuple(f"{prefix}.{i}" for i in range(rank))
        names.update(row)
        return row

    ins = tuple(dims(f"x{k}", len(records(value_of(t)[0])[value_of(t)[1]].shape)) for k, t in enumerate(tensors))
    outs = tuple(dims(f"y{k}", len(result.shape)) for k, result in enumerate(records(node)))
    return Rule(ins, outs, ({},) * len(outs), frozenset(names), kind="unknown")


def _side(names: tuple[str, ...], letters: dict[str, int], union: _Union, size: dict[int, int]) -> list[tuple[int | None, int]]:
    return [(None, int(n[1:])) if n.startswith("#") else (union.find(letters[n]), size[letters[n]]) for n in names]


def _suffixes(side: list[tuple[int | None, int]], cuts: dict[int, frozenset[int]]) -> set[int]:
    """Suffix products at which one side of a relation is cut: between its dims, and inside them."""
    found, after = set(), 1
    for item, extent in reversed(side):
        found.add(after)
        if item is not None:
            found |= {after * cut for cut in cuts.get(item, frozenset())}
        after *= extent
    found.add(after)
    return found


def _inner(side: list[tuple[int | None, int]], wanted: set[int]) -> dict[int, set[int]] | None:
    """Cuts that `wanted` suffix products mean for each dim of a side; None if one falls across a dim."""
    found: dict[int, set[int]] = defaultdict(set)
    after = 1
    for item, extent in reversed(side):
        for cut in wanted:
            if after < cut < after * extent:
                if cut % after or extent % (cut // after):
                    return None
                if item is None:
                    return None
                found[item].add(cut // after)
        after *= extent
    return found


def _chain(cuts: Iterable[int]) -> bool:
    ordered = sorted(cuts)
    return all(b % a == 0 for a, b in zip(ordered, ordered[1:], strict=False))


def _solve(relations: list[_Solved], dropped: list[str]) -> dict[int, frozenset[int]]:
    """The cuts of each dim class. Hard relations first, the most supported demands first; a soft one only joins if it adds no cut."""
    support: Counter[tuple[int, int]] = Counter()
    demands: list[tuple[_Solved, dict[int, set[int]] | None]] = []
    for solved in relations:
        wanted = _suffixes(solved.inside, {}) | _suffixes(solved.outside, {})
        merged: dict[int, set[int]] | None = defaultdict(set)
        for side in (solved.inside, solved.outside):
            inner = _inner(side, wanted)
            if inner is None or merged is None or not _chain(wanted):
                merged = None
                break
            for item, found in inner.items():
                merged[item] |= found
        demands.append((solved, merged))
        if merged is not None and not solved.relation.soft:
            support.update((item, cut) for item, found in merged.items() for cut in found)
    for solved, merged in demands:
        if merged is None:
            solved.active = False
            dropped.append(f"{solved.node.name}: a reshape without common factors keeps its dims whole")

    def weight(entry: tuple[_Solved, dict[int, set[int]] | None]) -> tuple[object, ...]:
        """The support of what is least asked for; equals are told apart by what they ask, so that the graph's order says nothing."""
        solved, merged = entry
        found = sorted((support[item, cut], cut) for item, cuts in (merged or {}).items() for cut in cuts)
        sides = [[extent for _, extent in side] for side in (solved.inside, solved.outside)]
        return found[0] if found else (1 << 30, 0), found, sides

    live = [entry for entry in demands if entry[0].active]
    hard = [e[0] for e in sorted((e for e in live if not e[0].relation.soft), key=weight, reverse=True)]
    soft = [e[0] for e in sorted((e for e in live if e[0].relation.soft), key=weight, reverse=True)]
    known = _Cuts()
    for solved in hard:
        if not known.add(solved):
            solved.active = False
            dropped.append(f"{solved.node.name}: {solved.node.target} asks for factors that do not nest with those of other operators")
    for solved in soft:
        solved.active = False
    changed = True
    while changed:
        changed = False
        for solved in soft:
            if not solved.active and known.has(solved) and known.add(solved):
                solved.active = changed = True
    return known.cuts


class _Cuts:
    """The cuts of dim classes under the relations added so far, carried through all of them to the fixpoint."""

    def __init__(self) -> None:
        self.cuts: dict[int, frozenset[int]] = {}
        self._touching: dict[int, list[_Solved]] = defaultdict(list)

    def has(self, solved: _Solved) -> bool:
        """Whether what a relation asks of its one side is cut already."""
        inner = _inner(solved.inside, _suffixes(solved.inside, {}) | _suffixes(solved.outside, {}))
        return inner is not None and all(found <= self.cuts.get(item, frozenset()) for item, found in inner.items())

    def add(self, solved: _Solved) -> bool:
        """Whether the relation fits: if cuts stop nesting under it, all is as it was before."""
        items = {item for item, _ in (*solved.inside, *solved.outside) if item is not None}
        for item in items:
            self._touching[item].append(solved)
        before: dict[int, frozenset[int]] = {}
        if self._carry(solved, before):
            return True
        for item in items:
            self._touching[item].pop()
        self.cuts.update(before)
        return False

    def _carry(self, last: _Solved, before: dict[int, frozenset[int]]) -> bool:
        """Carry cuts on from a new relation; `before` receives what each changed class had."""
        work = [last]
        while work:
            solved = work.pop()
            wanted = _suffixes(solved.inside, self.cuts) | _suffixes(solved.outside, self.cuts)
            if not _chain(wanted):
                return False
            for side in (solved.inside, solved.outside):
                inner = _inner(side, wanted)
                if inner is None:
                    return False
                for item, found in inner.items():
                    had = self.cuts.get(item, frozenset())
                    if found <= had:
                        continue
                    if not _chain(had | found):
                        return False
                    before.setdefault(item, had)
                    self.cuts[item] = had | found
                    work += self._touching[item]
        return True


def _extents(size: int, cuts: frozenset[int]) -> list[int]:
    """Sizes of the pieces, major to minor: `_extents(2304, {64, 768}) == [3, 12, 64]`."""
    bounds = [size, *sorted(cuts, reverse=True), 1]
    return [a // b for a, b in zip(bounds, bounds[1:], strict=False)]


def _tokens(
    names: Iterable[str], letters: Mapping[str, int], atoms_of: Callable[[int], list[int]], piece_size: Mapping[int, int]
) -> list[Piece]:
    """(token, atom, size) along one side of a relation; virtual letters have no token."""
    row: list[Piece] = []
    for name in names:
        if name.startswith("#"):
            row.append((None, None, int(name[1:])))
        else:
            row += [((name, k), atom, piece_size[atom]) for k, atom in enumerate(atoms_of(letters[name]))]
    return [entry for entry in row if entry[2] != 1]


def _align(inside: Sequence[Piece], outside: Sequence[Piece]) -> list[tuple[Piece, Piece]] | None:
    """Pairs of equal pieces; a virtual piece may stand for several real ones."""
    pairs: list[tuple[Piece, Piece]] = []
    inside, outside = list(inside), list(outside)
    while inside or outside:
        if not inside or not outside:
            return None
        a, b = inside.pop(0), outside.pop(0)
        if a[2] == b[2]:
            pairs.append((a, b))
        elif a[0] is None and a[2] % b[2] == 0:
            pairs.append(((None, None, b[2]), b))
            inside.insert(0, (None, None, a[2] // b[2]))
        elif b[0] is None and b[2] % a[2] == 0:
            pairs.append((a, (None, None, a[2])))
            outside.insert(0, (None, None, b[2] // a[2]))
        else:
            return None
    return pairs
