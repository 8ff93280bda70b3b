"""Plans: what each mesh axis splits, and which tensors are pinned, as text and as a value.

    tp: heads, ffn, vocab > seq                    an axis entry: factors in ranks, first rank first
    dp: batch; store params, grads, state          what lies split along the axis between steps
    cp: heads@attention > seq                      a factor inside one region of the model only
    pp: -                                          use this axis for nothing
    pin lm_head.weight: vocab/tp, _  only          one entry a dim of the tensors that a glob names

``Plan(text)`` reads, ``str(plan)`` prints the canonical text, and ``Plan(str(plan)) == plan``. What the entries mean is
in ``docs/plans.md``.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NoReturn

from meshc.errors import PlanError
from meshc.mesh import NAME, Mesh

STORES: Final = ("params", "grads", "state")
"""What a store clause may name, in the order in which it is printed."""


@dataclass(frozen=True, slots=True)
class Term:
    """A factor that an axis may take: everywhere, or in one region (``attention``, or a glob of module paths)."""

    factor: str
    region: str | None = None

    def covers(self, name: str) -> bool:
        """Whether the term means the factor of this name; in a factor's path ``*`` stands for any text."""
        return fnmatchcase(name, self.factor)

    def __str__(self) -> str:
        return self.factor if self.region is None else f"{self.factor}@{self.region}"


@dataclass(frozen=True, slots=True)
class AxisEntry:
    """What one axis is used for. ``ranks`` is empty for ``-``: no operator takes anything along the axis."""

    axis: str
    ranks: tuple[tuple[Term, ...], ...] = ()
    store: tuple[str, ...] = ()
    line: int = field(default=0, compare=False)
    """Where the entry was written; 0 if it was not written in lines."""
    text: str = field(default="", compare=False)
    source: str = field(default="hand", compare=False)
    """Who wrote the entry: ``hand``, ``recipe NAME`` or ``role ROLE, recipe NAME``."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of all ranks, first rank first."""
        return tuple(itertools.chain.from_iterable(self.ranks))

    @property
    def where(self) -> str:
        """The entry as messages and reasons cite it."""
        return _cite(self) if self.source == "hand" else f"`{self}` ({self.source})"

    def __str__(self) -> str:
        ranks = " > ".join(", ".join(map(str, rank)) for rank in self.ranks) or "-"
        store = f"; store {', '.join(self.store)}" if self.store else ""
        return f"{self.axis}: {ranks}{store}"


@dataclass(frozen=True, slots=True)
class PinFactor:
    """One factor in a pinned dim: split by ``axes`` in order, kept ``whole``, or, with neither, named and left open."""

    factor: str
    axes: tuple[str, ...] = ()
    whole: bool = False

    def __str__(self) -> str:
        return "/".join((self.factor, *self.axes)) + ("!" if self.whole else "")


@dataclass(frozen=True, slots=True)
class PinDim:
    """What a pin says about one dim: the factors that it names, major to minor; none for ``_``. Factors not named are open."""

    factors: tuple[PinFactor, ...] = ()

    def __str__(self) -> str:
        return " * ".join(map(str, self.factors)) or "_"


@dataclass(frozen=True, slots=True)
class Pin:
    """What the tensors that ``pattern`` names are held to. ``only``: those values alone, not the rest of their factors' classes."""

    pattern: str
    dims: tuple[PinDim, ...]
    only: bool = False
    line: int = field(default=0, compare=False)
    text: str = field(default="", compare=False)

    def matches(self, name: str) -> bool:
        """Whether the pin is about this parameter (``fc.weight``), input (``input:x``) or value (``value:model.norm``)."""
        return fnmatchcase(name, self.pattern)

    @property
    def where(self) -> str:
        """The pin as messages and reasons cite it."""
        return _cite(self)

    def splits(self) -> list[tuple[str, int, str]]:
        """Every (axis, dim, factor) that the pin asks for."""
        return [(axis, dim, part.factor) for dim, entry in enumerate(self.dims) for part in entry.factors for axis in part.axes]

    def __str__(self) -> str:
        return f"pin {self.pattern}: {', '.join(map(str, self.dims))}{'  only' if self.only else ''}"


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """Axis entries and pins.

    ``Plan(lines)`` takes text, a list of lines, or a mapping of axes to entries in which ``pin`` holds a list.
    Raises PlanError, which lists every line that cannot be read.
    """

    axes: tuple[AxisEntry, ...]
    pins: tuple[Pin, ...]

    def __init__(self, lines: str | Iterable[str] | Mapping[str, Any] | Plan = "") -> None:
        if isinstance(lines, Plan):
            self._fill(lines.axes, lines.pins)
        else:
            self._fill(*_read(_numbered(lines), "this plan"))

    @classmethod
    def of(cls, axes: Iterable[AxisEntry] = (), pins: Iterable[Pin] = ()) -> Plan:
        """The plan of these entries and pins."""
        plan = object.__new__(cls)
        plan._fill(tuple(axes), tuple(pins))
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in a ``.plan`` file of lines, or a ``.yaml``, ``.yml`` or ``.toml`` file that holds the same as a mapping."""
        file = Path(path)
        readers = {".plan": _numbered, ".yaml": _yaml_lines, ".yml": _yaml_lines, ".toml": _toml_lines}
        if file.suffix not in readers:
            raise PlanError(f"{file}: a plan is read from a file that ends in {', '.join(readers)}")
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the plan file {file} cannot be read: {error}") from error
        try:
            lines = readers[file.suffix](text)
        except PlanError as error:
            raise PlanError(f"{file}: {error}") from error
        return cls.of(*_read(lines, str(file)))

    def _fill(self, axes: tuple[AxisEntry, ...], pins: tuple[Pin, ...]) -> None:
        _refuse("the plan uses an axis twice; join the two entries into one", _duplicates(axes))
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "pins", pins)

    def entry(self, axis: str) -> AxisEntry | None:
        """The entry of this axis, or None."""
        return next((entry for entry in self.axes if entry.axis == axis), None)

    def pins_for(self, name: str) -> list[Pin]:
        """The pins about this tensor, in the order of the plan."""
        return [pin for pin in self.pins if pin.matches(name)]

    def check(self, mesh: Mesh) -> None:
        """Raises PlanError if the plan uses an axis that the mesh does not have, or if its pins contradict each other."""
        uses = [(entry.where, entry.axis) for entry in self.axes]
        uses += dict.fromkeys((pin.where, axis) for pin in self.pins for axis, _, _ in pin.splits())
        faults = [f"{where}: the mesh has no axis {axis}{_suggest(axis, mesh.names)}" for where, axis in uses if axis not in mesh.names]
        for pin in self.pins:
            faults += _clashes_within(pin)
        for pattern in dict.fromkeys(pin.pattern for pin in self.pins):
            faults += contradictions([pin for pin in self.pins if pin.pattern == pattern])
        _refuse(f"the plan does not fit the mesh {mesh}, or itself", faults)

    def __add__(self, other: Plan) -> Plan:
        return Plan.of(self.axes + other.axes, self.pins + other.pins)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.axes, *self.pins)))

    def __repr__(self) -> str:
        return f"Plan({str(self)!r})"


def contradictions(pins: Sequence[Pin]) -> list[str]:
    """What pins about one tensor contradict each other in: a message for each, which names both lines."""
    return [f"{one.where} and {other.where}: {why}" for one, other in itertools.combinations(pins, 2) for why in _clashes(one, other)]


def _clashes(one: Pin, other: Pin) -> Iterator[str]:
    if len(one.dims) != len(other.dims):
        yield f"they name {len(one.dims)} and {len(other.dims)} dims; a pin has one entry for each dim of the tensor"
        return
    for dim, (left, right) in enumerate(zip(one.dims, other.dims, strict=True)):
        here = {part.factor: part for part in left.factors}
        there = {part.factor: part for part in right.factors}
        if here and there and not (here.keys() <= there.keys() or here.keys() >= there.keys()):
            yield f"dim {dim} is {left} and {right}; if the dim holds these factors together, write one pin and join them by *"
            return
        for factor, part in here.items():
            again = there.get(factor, part)
            if part != again and all(pinned.axes or pinned.whole for pinned in (part, again)):
                yield f"{factor} in dim {dim} is {_said(part)} in one and {_said(again)} in the other; keep one of the two"
                return
    for axis, dim, factor in one.splits():
        for other_axis, other_dim, other_factor in other.splits():
            if axis == other_axis and (dim, factor) != (other_dim, other_factor):
                yield f"{axis} splits {factor} in dim {dim} and {other_factor} in dim {other_dim}; an axis splits a value once"


def _said(part: PinFactor) -> str:
    return "whole" if part.whole else f"split by {', then '.join(part.axes)}"


def _clashes_within(pin: Pin) -> Iterator[str]:
    for one, other in itertools.combinations(pin.splits(), 2):
        if one[0] == other[0]:
            yield f"{pin.where}: {one[0]} splits {one[2]} in dim {one[1]} and {other[2]} in dim {other[1]}; an axis splits a value once"


def _duplicates(axes: Sequence[AxisEntry]) -> list[str]:
    return [f"{one.where} and {other.where}" for one, other in itertools.combinations(axes, 2) if one.axis == other.axis]


def _cite(item: AxisEntry | Pin) -> str:
    return f"line {item.line}, `{item.text}`" if item.line else f"`{item.text or item}`"


def _refuse(what: str, faults: Sequence[str]) -> None:
    if faults:
        raise PlanError(f"{what}:" + "".join(f"\n  {fault}" for fault in faults))


def _suggest(word: str, words: Iterable[str]) -> str:
    known = list(words)
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (there are: {', '.join(known)})"


# Sources of lines: pairs of the line's number, 0 where there is none, and the line.


def _numbered(lines: str | Iterable[str] | Mapping[str, Any]) -> list[tuple[int, str]]:
    if isinstance(lines, Mapping):
        return _mapping_lines((0, key, value) for key, value in lines.items())
    split: list[Any] = lines.splitlines() if isinstance(lines, str) else list(lines) if isinstance(lines, Iterable) else [lines]
    if not all(isinstance(line, str) for line in split):
        raise PlanError(f"a plan is text, lines of text, or a mapping of axes to entries, not {lines!r}")
    return list(enumerate(split, start=1))


def _mapping_lines(items: Iterable[tuple[int, Any, Any]]) -> list[tuple[int, str]]:
    """The lines of (number, key, value) triples: an axis and its entry, ``pin PATTERN`` and dims, ``pin`` and a list of pins."""
    lines = []
    for number, key, value in items:
        if key == "pin":
            for pin in value if isinstance(value, (list, tuple)) else [value]:
                texts = [f"{pattern}: {dims}" for pattern, dims in pin.items()] if isinstance(pin, Mapping) else [str(pin)]
                lines += [(number, f"pin {text}") for text in texts]
        elif isinstance(key, str) and isinstance(value, str):
            lines.append((number, f"{key}: {value}"))
        else:
            fix = 'write text, as in {"tp": "heads, ffn"}, and "-" to use an axis for nothing'
            raise PlanError(f"the plan's entry {key!r} holds {value!r}; {fix}")
    return lines


def _toml_lines(text: str) -> list[tuple[int, str]]:
    try:
        tomllib = importlib.import_module("tomllib")
    except ImportError as error:
        raise PlanError("TOML needs Python 3.11; or put the same lines into a .plan file, which needs nothing") from error
    try:
        entries: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fix = 'entries are quoted in TOML, as in tp = "heads, ffn" and pin = ["lm_head.weight: vocab/tp, _"]'
        raise PlanError(f"{error}; {fix}") from error
    return _numbered(entries)


def _yaml_lines(text: str) -> list[tuple[int, str]]:
    # Nodes rather than values: they keep line numbers, repeated keys, and words such as `no` as they were written.
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise PlanError("YAML needs the package pyyaml; or put the same lines into a .plan file, which needs nothing") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise PlanError(f'{error}\nquote what is special in YAML: "-", and patterns that start with *') from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise PlanError("a plan in YAML is a mapping of axes to entries")
    lines: list[tuple[int, str]] = []
    for key, value in root.value:
        is_pin = key.value == "pin"
        for node in value.value if is_pin and isinstance(value, yaml.SequenceNode) else [value]:
            number = node.start_mark.line + 1
            if isinstance(node, yaml.ScalarNode):
                lines.append((number, f"pin {node.value}" if is_pin else f"{key.value}: {node.value}"))
            elif isinstance(node, yaml.MappingNode) and is_pin:
                lines += [(pattern.start_mark.line + 1, f"pin {pattern.value}: {dims.value}") for pattern, dims in node.value]
            else:
                raise PlanError(f"line {number}: the entry {key.value} holds a list or a mapping; write text, as in tp: heads, ffn")
    return lines


# Reading: one line at a time, so that every line that is wrong can be shown.

_FACTOR: Final = re.compile(r"(?:\w[\w-]*|\*(?=\.))(?:\.(?:\w[\w-]*|\*))*")
_GLOB: Final = re.compile(r"[\w.*?\[\]!-]+")
_KIND: Final = re.compile(r"\w+:(?=[\w.*?\[\]!-]+\s*:)")
_PIN: Final = re.compile(r"pin\s+(?=[^\s:])")


class _Fault(Exception):
    def __init__(self, column: int, fix: str) -> None:
        self.column = column
        self.fix = fix


class _Line:
    """A cursor over one line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.skip()

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    @property
    def done(self) -> bool:
        return self.at == len(self.text)

    def accept(self, pattern: str | re.Pattern[str]) -> str | None:
        match = re.compile(pattern).match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        self.skip()
        return match[0].strip()

    def expect(self, pattern: str | re.Pattern[str], fix: str) -> str:
        found = self.accept(pattern)
        return self.fail(fix) if found is None else found

    def fail(self, fix: str, at: int | None = None) -> NoReturn:
        raise _Fault(self.at if at is None else at, fix)


def _read(lines: Iterable[tuple[int, str]], name: str) -> tuple[tuple[AxisEntry, ...], tuple[Pin, ...]]:
    axes: list[AxisEntry] = []
    pins: list[Pin] = []
    faults: list[str] = []
    for number, raw in lines:
        text = raw.split("#", 1)[0].expandtabs().rstrip()
        line = _Line(text)
        if line.done:
            continue
        try:
            if line.accept(_PIN) is not None:
                pins.append(_read_pin(line, number))
            else:
                axes.append(_read_axis(line, number))
        except _Fault as fault:
            head = f"line {number}: " if number else ""
            faults.append(f"{head}{text}\n  {' ' * (len(head) + fault.column)}^ {fault.fix}")
    doubled = [f"an axis has two entries, which should be one: {fault}" for fault in _duplicates(axes)]
    _refuse(f"{name} cannot be read", faults + doubled)
    return tuple(axes), tuple(pins)


def _read_axis(line: _Line, number: int) -> AxisEntry:
    axis = line.expect(NAME, "a line starts with the name of a mesh axis, or with `pin`; as in `tp: heads, ffn`")
    line.expect(":", f"after the axis comes a colon: `{axis}: heads, ffn`")
    ranks: list[tuple[Term, ...]] = []
    if line.accept(r"-(?![\w.])") is None:
        seen: set[Term] = set()
        ranks.append(_read_rank(line, axis, seen))
        while line.accept(">"):
            ranks.append(_read_rank(line, axis, seen))
    store = _read_store(line) if line.accept(";") else ()
    if not line.done:
        line.fail("separate factors by `,`, ranks by `>`, and put `; store ...` last")
    return AxisEntry(axis, tuple(ranks), store, number, line.text.strip())


def _read_rank(line: _Line, axis: str, seen: set[Term]) -> tuple[Term, ...]:
    rank: list[Term] = []
    while not rank or line.accept(","):
        start = line.at
        factor = line.expect(_FACTOR, f"a factor belongs here, as in `{axis}: heads, ffn > seq`; `{axis}: -` uses the axis for nothing")
        region = line.expect(_GLOB, f"a region follows @: `{factor}@attention`, or a glob of module paths") if line.accept("@") else None
        term = Term(factor, region)
        if term in seen:
            line.fail(f"{term} is there twice: keep one", start)
        seen.add(term)
        rank.append(term)
    return tuple(rank)


def _read_store(line: _Line) -> tuple[str, ...]:
    line.expect(r"store\b", "only `store params, grads, state`, or a part of it, follows a semicolon")
    words: list[str] = []
    while not words or line.accept(","):
        start = line.at
        word = line.expect(r"\w+", f"what is stored split belongs here: {', '.join(STORES)}")
        if word not in STORES:
            line.fail(f"{word} cannot be stored{_suggest(word, STORES)}", start)
        if word in words:
            line.fail(f"{word} is there twice: keep one", start)
        words.append(word)
    return tuple(word for word in STORES if word in words)


def _read_pin(line: _Line, number: int) -> Pin:
    names = "a pin names parameters (`fc*.weight`), an input (`input:x`) or a module's value (`value:model.norm`), with * for any text"
    start = line.at
    kind = line.accept(_KIND) or ""
    if kind not in ("", "input:", "value:"):
        line.fail(names, start)
    pattern = kind + line.expect(_GLOB, names)
    line.expect(":", f"after the pattern comes a colon, then one entry for each dim: `pin {pattern}: vocab/tp, _`")
    dims = [_read_dim(line)]
    while line.accept(","):
        dims.append(_read_dim(line))
    only = line.accept(r"only\b") is not None
    if not line.done:
        line.fail("separate dims by `,`, factors in a dim by `*`, axes by `/`; `only` comes last")
    return Pin(pattern, tuple(dims), only, number, line.text.strip())


def _read_dim(line: _Line) -> PinDim:
    if line.accept(r"_(?=\s*(?:,|$)|\s+only\b)") is not None:
        return PinDim()
    parts: list[PinFactor] = []
    while not parts or line.accept(r"\*"):
        start = line.at
        factor = line.expect(_FACTOR, "a dim is FACTOR, FACTOR/AXIS, FACTOR! or _, as in `vocab/tp, _`")
        if factor in ("_", "only"):
            line.fail(f"{factor} is no factor: write `_` alone for a dim left open, name the factor to split it", start)
        if any(part.factor == factor for part in parts):
            line.fail(f"{factor} is there twice in one dim: keep one", start)
        whole = line.accept("!") is not None
        axes: list[str] = []
        while line.accept("/"):
            axes.append(line.expect(NAME, f"a mesh axis follows `/`, as in `{factor}/tp`"))
        if axes and (whole or line.accept("!")):
            line.fail(f"`{factor}!` is kept whole, so no axis splits it: drop the ! or the axis", start)
        parts.append(PinFactor(factor, tuple(axes), whole))
    return PinDim(tuple(parts))
