"""Module tree of a model with shardings, equal layers folded; and the values of a program, equal ones folded.

    model
      layers.0-31                                  32 alike
        mlp
          up_proj.weight   [ffn 14336/tp, hidden 4096/dp]   58.7 MB
          gives            [batch 8/dp, seq 2048, hidden 4096]
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from meshc import ir
from meshc.cost import peak_memory
from meshc.cost.divided_work import collapse_layers
from meshc.ir.sharding import Sharding
from meshc.program.program import PlainProgram, Port
from meshc.report.summary import gradient_shardings
from meshc.report.tables import part_text, placement

DEEPEST: Final = 32
"""Levels of nested modules; the rest of a longer name is one word."""

Lies: TypeAlias = tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]
"""For each dim its parts: a part's text (`ffn 688`), and the axes that split it."""


def lies(sharding: Sharding | None, shape: Sequence[int]) -> Lies:
    """Parts and axes of each dim: the data of which `tables.placement` is the text."""
    if sharding is None:
        return tuple(((str(size), ()),) for size in shape)
    return tuple(tuple((part_text(part).partition("/")[0], part.cuts) for part in parts) or (("1", ()),) for parts in sharding.dims)


class Leaf(NamedTuple):
    """A parameter, a buffer, or a module's output. `gradient`, `state`: their shardings, "" if they equal the parameter's."""

    name: str
    kind: str
    dtype: str
    lies: Lies
    partial: tuple[str, ...] = ()
    gradient: str = ""
    state: str = ""
    where: str = ""
    bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True)
class Branch:
    """A module, or several equal ones.

    name    last component of its path; of several modules their numbers, `0-31`
    count   number of equal modules
    """

    name: str
    count: int
    leaves: tuple[Leaf, ...]
    children: tuple[Branch, ...]

    @property
    def bytes(self) -> int:
        """Bytes of one such module's parameters and buffers on a rank, without optimizer state."""
        return sum(leaf.bytes for leaf in self.leaves if leaf.kind != GIVES) + sum(one.bytes * one.count for one in self.children)


GIVES: Final = "gives"


class _ModuleBuilder:
    """A module of the tree while its leaves are added."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.children: dict[str, _ModuleBuilder] = defaultdict(_ModuleBuilder)

    def at(self, path: Sequence[str]) -> _ModuleBuilder:
        here = self
        for word in path:
            here = here.children[word]
        return here


def tree(program: PlainProgram) -> Branch:
    """The model's module tree, from the module paths of parameters, buffers and operators."""
    root = _ModuleBuilder()
    states: dict[str, list[Port]] = defaultdict(list)
    for port in program.inputs:
        if port.kind == "state":
            states[port.of].append(port)
    gradients = gradient_shardings(program)
    for port in program.inputs:
        if port.kind in ("parameter", "buffer"):
            *path, name = port.name.split(".", DEEPEST)
            root.at(path).leaves.append(_leaf(program, name, port, gradients.get(port.name), states[port.name]))
    for module, one in _module_outputs(program).items():
        gives = Leaf(GIVES, GIVES, _dtype(one), lies(one.sharding, one.shape), _partial(one.sharding), bytes=ir.local_bytes(one))
        root.at(module.split(".", DEEPEST)).leaves.append(gives)
    return _fold_modules("", root)


def _leaf(program: PlainProgram, name: str, port: Port, gradient: Sharding | None, states: Sequence[Port]) -> Leaf:
    own = placement(port.sharding, port.shape)
    kept = [state.sharding for state in states if state.shape == port.shape]
    others = ("" if one is None else placement(one, port.shape) for one in (gradient, kept[0] if kept else None))
    other, state = ("" if said == own else said for said in others)
    size, state_size = (sum(peak_memory.port_bytes(each, program.axis_sizes) for each in those) for those in ([port], states))
    where = "" if port.storage == "device" else f"on the {port.storage}"
    if not where and (tiers := {each.storage for each in states} - {"device"}):
        where = f"its state on the {' and the '.join(sorted(tiers))}"
    return Leaf(name, port.kind, _dtype(port), lies(port.sharding, port.shape), (), other, state, where, size, state_size)


def _module_outputs(program: PlainProgram) -> dict[str, ir.Record]:
    """Module -> the last value that forward computes in the module itself."""
    found: dict[str, ir.Record] = {}
    for stage in program.stages.values():
        for node in ir.calls(stage.graph):
            one = ir.records(node)[0]
            floats = one.dtype is not None and one.dtype.is_floating_point
            if one.phase == "forward" and one.source.module and floats and one.sharding is not None and not one.again:
                found[one.source.module] = one
    return found


def _dtype(one: ir.Record | Port) -> str:
    return str(one.dtype).removeprefix("torch.")


def _partial(sharding: Sharding | None) -> tuple[str, ...]:
    return () if sharding is None else tuple(axis for axis, _ in sharding.partial)


# ------------------------------------------------------------------------------------------------------------------------- folding


def _fold_modules(name: str, module: _ModuleBuilder) -> Branch:
    """The branch of a module, with equal submodules folded into one."""
    groups: dict[Branch, list[str]] = {}
    for word, child in module.children.items():
        made = _fold_modules(word, child)
        groups.setdefault(replace(made, name="") if word.isdecimal() else made, []).append(word)
    children = (
        replace(alike, name=words[0] if len(words) == 1 else ranges(map(int, words)), count=len(words)) for alike, words in groups.items()
    )
    return Branch(name, 1, tuple(module.leaves), tuple(children))


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# -------------------------------------------------------------------------------------------------------------------------- values


class FoldedValues(NamedTuple):
    """Equal values of equal layers and stages. `bytes`: of one value, on a rank."""

    name: str
    phase: str
    operator: str
    module: str
    line: str
    lies: Lies
    partial: tuple[str, ...]
    dtype: str
    bytes: int
    reason: str


def values(program: PlainProgram) -> list[tuple[FoldedValues, int]]:
    """(values, count) of all results of operators and collectives, equal ones folded, the largest in total first."""
    found: Counter[FoldedValues] = Counter()
    names: dict[FoldedValues, str] = {}
    for made in _each(program):
        alike = made._replace(name="")
        names.setdefault(alike, made.name)
        found[alike] += 1
    return sorted(((one._replace(name=names[one]), count) for one, count in found.items()), key=lambda item: -item[0].bytes * item[1])


def _each(program: PlainProgram) -> Iterator[FoldedValues]:
    for stage in program.stages.values():
        for node in ir.calls(stage.graph):
            one = ir.records(node)[0]
            if one.dtype is None or ir.op_name(node) == "getitem":
                continue
            size = sum(map(ir.local_bytes, ir.records(node)))
            yield FoldedValues(
                node.name, one.phase, ir.op_name(node), collapse_layers(one.source.module), one.source.place, lies(one.sharding, one.shape),
                _partial(one.sharding), _dtype(one), size, one.reason,
            )  # fmt: skip
