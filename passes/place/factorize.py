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
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def factorize(graph: Graph, alike: Iterable[tuple[Value, Value]] = ()) -> Factors:
    """Classes for every dim of every value of a global-view graph. `alike` pairs values of one meaning: a gradient and its parameter."""
    union = _Union()
    dim_of: dict[Value, list[int | None]] = {}
    size: dict[int, int] = {}

    def dims(value: Value) -> list[int | None]:
        if value not in dim_of:
            shape = records(value[0])[value[1]].shape
            dim_of[value] = [None if extent == 1 else union.new() for extent in shape]
            for item, extent in zip(dim_of[value], shape, strict=True):
                if item is not None:
                    size[item] = extent
        return dim_of[value]

    rules: dict[Node, tuple[Rule, list[Value], list[dict[str, int]]]] = {}
    unsolved: list[tuple[Node, Relation, dict[str, int]]] = []
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
                    union.join(letters[name], item)
                letters[name] = item
        for relation in rule.relations:
            unsolved.append((node, relation, letters))
        rules[node] = (rule, values, [letters])

    for one, other in alike:
        for a, b in zip(dims(one), dims(other), strict=True):
            if a is not None and b is not None:
                union.join(a, b)

    relations = [
        _Solved(node, relation, _side(relation.inside, letters, union, size), _side(relation.outside, letters, union, size))
        for node, relation, letters in unsolved
    ]
    dropped: list[str] = []
    cuts = _solve(relations, dropped)

    # atoms: a class per piece of a dim class, joined through the relations that hold
    pieces = _Union()
    piece_size: dict[int, int] = {}
    atoms: dict[int, list[int]] = {}

    def atoms_of(item: int) -> list[int]:
        root = union.find(item)
        if root not in atoms:
            atoms[root] = []
            for extent in _extents(size[item], cuts.get(root, frozenset())):
                piece = pieces.new()
                piece_size[piece] = extent
                atoms[root].append(piece)
        return atoms[root]

    aligned: dict[tuple[Node, int], tuple[list[Token | None], list[Token | None]]] = {}
    for node, (rule, _, (letters,)) in rules.items():
        mine = [solved for solved in relations if solved.node is node] if rule.relations else []
        for index, solved in enumerate(mine):
            if solved.active:
                inside = _tokens(solved.relation.inside, letters, atoms_of, piece_size)
                outside = _tokens(solved.relation.outside, letters, atoms_of, piece_size)
                pairs = _align(inside, outside)
                if pairs is None:
                    solved.active = False
                    dropped.append(f"{node.name}: {solved.relation.inside} and {solved.relation.outside} do not share factors")
                    continue
                for (_, a, _), (_, b, _) in pairs:
                    if a is not None and b is not None:
                        pieces.join(a, b)
                aligned[(node, index)] = ([p[0][0] for p in pairs], [p[1][0] for p in pairs])

    factors = Factors({}, {}, {}, dropped)
    for value, items in dim_of.items():
        factors.dims[value] = tuple(() if item is None else tuple(pieces.find(atom) for atom in atoms_of(item)) for item in items)
    for atom, extent in piece_size.items():
        factors.size[pieces.find(atom)] = extent
    for node, (rule, values, (letters,)) in rules.items():
        mine = [solved for solved in relations if solved.node is node] if rule.relations else []
        alias: dict[Token, Token] = {}
        whole: set[Token] = set()
        for index, solved in enumerate(mine):
            real = [n for n in (*solved.relation.inside, *solved.relation.outside) if not n.startswith("#")]
            if not solved.active:
                whole |= {(name, k) for name in real for k in range(len(atoms_of(letters[name])))}
                continue
            for inner, outer in zip(*aligned[(node, index)], strict=True):
                if inner is not None and outer is not None:
                    alias[outer] = alias.get(inner, inner)
                elif inner is not None or outer is not None:
                    whole |= {token for token in (inner, outer) if token is not None}
        factors.instances[node] = _instance(node, rule, values, atoms_of, pieces, piece_size, alias, whole, dim_of)
    return factors


def _instance(
    node: Node,
    rule: Rule,
    values: Sequence[Value],
    atoms_of: Callable[[int], list[int]],
    pieces: _Union,
    piece_size: Mapping[int, int],
    alias: Mapping[Token, Token],
    whole: set[Token],
    dim_of: Mapping[Value, list[int | None]],
) -> Instance:
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
            for position, atom in enumerate(atoms_of(item)):
                token = alias.get((name, position), (name, position))
                size[token] = piece_size[atom]
                factor.setdefault(token, pieces.find(atom))
                if name in rule.whole or (position and name in rule.major):
                    whole.add(token)
                row.append(token)
            found.append(tuple(row))
        return tuple(found)

    ins = tuple(tokens(names, dim_of[value]) for value, names in zip(values, rule.operands, strict=True))
    outs = tuple(tokens(names, dim_of[(node, index)]) for index, names in enumerate(rule.results))
    sums: list[dict[Token, str]] = []
    tied = _tied(rule, size, whole)
    letter_sums: tuple[dict[str, str], ...] = rule.sums or tuple({} for _ in outs)
    for result in letter_sums:
        sums.append({t: how for letter, how in result.items() for t in size if t[0] == letter})
    return Instance(node, rule, tuple(values), ins, outs, tuple(sums), frozenset(whole), size, factor, rule.kind != "unknown", tied)


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
