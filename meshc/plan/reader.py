"""Reader of plans from text, mappings, YAML or TOML, line by line, so that every wrong line is reported."""

from __future__ import annotations

import importlib
import re
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Final

from meshc.errors import PlanError
from meshc.ir.bounds import MOST_PLAN, MOST_PLAN_LINE, MOST_PLAN_LINES, MOST_PLAN_MARKUP
from meshc.ir.mesh import NAME, RESERVED
from meshc.ir.nodes import PHASES
from meshc.plan.cursor import FACTOR, GLOB, Line, PlanLineFault
from meshc.plan.entries import (
    AUTO,
    NOTHING,
    PARTIAL,
    PENDING,
    STORES,
    AxisEntry,
    FactorTerm,
    OperatorPin,
    OperatorSplit,
    Pin,
    PinDim,
    PinFactor,
    PlanLine,
    StoreLine,
    duplicates,
)
from meshc.plan.memory_lines import read_chunk_line, read_keep_line, read_offload_line, read_remat_line
from meshc.plan.plan_faults import refuse_faults, suggest
from meshc.plan.precision_lines import read_compress_line, read_precision_line, read_sparse_line

WORDS: Final = ("pin", *RESERVED)
"""First words of lines that are no axis entries. The RESERVED ones cannot be axis names."""


def is_by_hand(text: str) -> bool:
    """Whether `text` is plan lines rather than names of recipes."""
    return ":" in text or "\n" in text or text.split(maxsplit=1)[:1] in ([word] for word in RESERVED)


# Sources of lines: pairs of the line's number, 0 where there is none, and the line.


def number_lines(lines: str | Iterable[str] | Mapping[str, object]) -> list[tuple[int, str]]:
    if isinstance(lines, Mapping):
        return _mapping_lines((0, key, value) for key, value in lines.items())
    if isinstance(lines, str):
        _refuse_long(lines, MOST_PLAN)
    split = lines.splitlines() if isinstance(lines, str) else list(lines) if isinstance(lines, Iterable) else None
    if split is None or not all(isinstance(line, str) for line in split):
        raise PlanError(f"a plan is text, lines of text, or a mapping of axes to entries, not {lines!r}")
    return list(enumerate(split, start=1))


def _mapping_lines(items: Iterable[tuple[int, object, object]]) -> list[tuple[int, str]]:
    """The lines of (number, key, value) triples: an axis and its entry, ``pin PATTERN`` and dims, ``pin`` and a list of pins.

    ``store`` is like ``pin``, and so are ``remat``, ``keep`` and ``offload``.
    """
    lines = []
    for number, key, value in items:
        if key in WORDS:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                texts = [f"{pattern}: {dims}" for pattern, dims in one.items()] if isinstance(one, Mapping) else [str(one)]
                lines += [(number, f"{key} {text}") for text in texts]
        elif isinstance(key, str) and isinstance(value, str):
            lines.append((number, f"{key}: {value}"))
        else:
            fix = 'write text, as in {"tp": "heads, ffn"}, and "-" to use an axis for nothing'
            raise PlanError(f"the plan's entry {reprlib.repr(key)} holds {reprlib.repr(value)}; {fix}")
    return lines


def toml_lines(text: str) -> list[tuple[int, str]]:
    _refuse_long(text)
    try:
        tomllib = importlib.import_module("tomllib")
    except ImportError as error:
        raise PlanError("TOML needs Python 3.11; or put the same lines into a .plan file, which needs nothing") from error
    try:
        entries: dict[str, object] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        fix = 'entries are quoted in TOML, as in tp = "heads, ffn" and pin = ["lm_head.weight: vocab/tp, _"]'
        raise PlanError(f"{error}; {fix}") from error
    return number_lines(entries)


def yaml_lines(text: str) -> list[tuple[int, str]]:
    _refuse_long(text)
    # Nodes rather than values: they keep line numbers, repeated keys, and words such as `no` as they were written.
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise PlanError("YAML needs the package pyyaml; or put the same lines into a .plan file, which needs nothing") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PlanError(f'{error}\nquote what is special in YAML: "-", and patterns that start with *') from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise PlanError("a plan in YAML is a mapping of axes to entries")
    lines: list[tuple[int, str]] = []
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise PlanError(f"line {key.start_mark.line + 1}: a list or a mapping is no axis; write text, as in tp: heads, ffn")
        word = key.value if key.value in WORDS else ""
        for node in value.value if word and isinstance(value, yaml.SequenceNode) else [value]:
            number = node.start_mark.line + 1
            if isinstance(node, yaml.ScalarNode):
                lines.append((number, f"{word} {node.value}" if word else f"{key.value}: {node.value}"))
            elif isinstance(node, yaml.MappingNode) and word:
                lines += [(pattern.start_mark.line + 1, f"{word} {pattern.value}: {dims.value}") for pattern, dims in node.value]
            else:
                raise PlanError(f"line {number}: the entry {key.value} holds a list or a mapping; write text, as in tp: heads, ffn")
    return lines


def _refuse_long(text: str, most: int = MOST_PLAN_MARKUP) -> None:
    if len(text) > most:
        fix = "; put the same lines into a .plan file" if most < MOST_PLAN else ""
        raise PlanError(f"this plan has {len(text)} characters, of which {most} may be read{fix}")


# Reading.

_KIND: Final = re.compile(r"\w+:(?=[\w.*?\[\]!-]+\s*:)")
_AUTO: Final = re.compile(rf"{AUTO}(?![\w.-])")

def read_entries(lines: Iterable[tuple[int, str]], name: str) -> dict[str, list[Any]]:
    """The entries and lines of a plan, by the field of `Plan` that holds them."""
    found: dict[str, list[Any]] = defaultdict(list)
    faults: list[str] = []
    for index, (number, raw) in enumerate(lines, 1):
        if index > MOST_PLAN_LINES:
            raise PlanError(f"{name} cannot be read: it has more than {MOST_PLAN_LINES} lines; one pin can name many tensors, with *")
        if len(raw) > MOST_PLAN_LINE:
            raise PlanError(f"{name} cannot be read: line {index} has {len(raw)} characters, of which {MOST_PLAN_LINE} may be")
        text = raw.split("#", 1)[0].expandtabs().rstrip()
        line = Line(text)
        if line.is_at_end:
            continue
        field, read = next((field, read) for field, begins, read in _KINDS_OF_LINES if line.accept(begins) is not None)
        try:
            found[field].append(replace(read(line), line=number, text=text.strip()))
        except PlanLineFault as fault:
            head = f"line {number}: " if number else ""
            faults.append(f"{head}{text}\n  {' ' * (len(head) + fault.column)}^ {fault.fix}")
    refuse_faults(f"{name} cannot be read", faults + duplicates(found["axes"]))
    return found


def _read_axis(line: Line) -> AxisEntry:
    axis = line.expect(NAME, "a line starts with the name of a mesh axis, with `pin` or `store`; as in `tp: heads, ffn`")
    line.expect(":", f"after the axis comes a colon: `{axis}: heads, ffn`")
    ranks: list[tuple[FactorTerm, ...]] = []
    if line.accept(_AUTO) is not None:
        line.expect_end(f"`{axis}: {AUTO}` stands alone: the search chooses what the axis splits and what is stored split along it")
        return AxisEntry(axis, auto=True)
    if line.accept(r"-(?![\w.])") is None:
        seen: set[FactorTerm] = set()
        while not ranks or line.accept(">"):
            ranks.append(_read_rank(line, axis, seen))
    store: tuple[str, ...] = ()
    if line.accept(";"):
        line.expect(r"store\b", "only `store params, grads, state`, or a part of it, follows a semicolon")
        store = _read_kinds(line)
    line.expect_end("separate factors by `,`, ranks by `>`, and put `; store ...` last")
    return AxisEntry(axis, tuple(ranks), store)


def _read_rank(line: Line, axis: str, seen: set[FactorTerm]) -> tuple[FactorTerm, ...]:
    rank: list[FactorTerm] = []
    while not rank or line.accept(","):
        start = line.at
        factor = line.expect(FACTOR, f"a factor belongs here, as in `{axis}: heads, ffn > seq`; `{axis}: -` uses the axis for nothing")
        if factor == AUTO:
            line.fail(f"{AUTO} is no factor: `{axis}: {AUTO}` alone leaves an axis to the search", start)
        rest = line.expect(FACTOR, f"a second factor follows *: `{factor}*seq` takes the axis apart") if line.accept(r"\*") else None
        if rest == factor:
            line.fail(f"{factor} and {rest} are one factor: `{factor}` alone takes all of the axis", start)
        region = line.expect(GLOB, f"a region follows @: `{factor}@attention`, or a glob of module paths") if line.accept("@") else None
        term = FactorTerm(factor, region, rest)
        if term in seen:
            line.fail(f"{term} is there twice: keep one", start)
        seen.add(term)
        rank.append(term)
    return tuple(rank)


def _read_kinds(line: Line) -> tuple[str, ...]:
    words: list[str] = []
    while not words or line.accept(","):
        start = line.at
        word = line.expect(r"\w+", f"what is stored split belongs here: {', '.join(STORES)}")
        if word not in STORES:
            line.fail(f"{word} cannot be stored{suggest(word, STORES)}", start)
        if word in words:
            line.fail(f"{word} is there twice: keep one", start)
        words.append(word)
    return tuple(word for word in STORES if word in words)


def _read_store_line(line: Line) -> StoreLine:
    names = "a store line names parameters, with * for any text, as in `store lm_head.weight state: vocab/dp, _`"
    if line.accept(":") is not None:
        line.fail(f"store is no axis's name: {names}", 0)
    start = line.at
    if line.accept(_KIND) is not None:
        line.fail(f"what lies between steps are parameters, their gradients and state: {names}", start)
    pattern = line.expect(GLOB, names)
    kinds = STORES
    if line.accept(":") is None:
        if re.match(r"_|[\w.]+\s*[/!*]", line.text[line.at :]):
            line.fail(f"after the pattern comes a colon: `store {pattern}: {line.text[line.at :].strip()}`")
        kinds = _read_kinds(line)
        line.expect(":", f"then comes a colon, and one entry for each dim: `store {pattern} {', '.join(kinds)}: vocab/dp, _`")
    dims = _read_dims(line, again=True)
    _refuse_rest(line)
    return StoreLine(pattern, dims, kinds)


def _read_pin(line: Line) -> Pin:
    names = (
        "a pin names parameters (`fc*.weight`), an input (`input:x`), a module's value (`value:model.norm`) or operators "
        "(`op:model.norm/backward`), with * for any text"
    )
    start = line.at
    kind = line.accept(_KIND) or ""
    if kind not in ("", "input:", "value:"):
        line.fail(names, start)
    pattern = kind + line.expect(GLOB, names)
    line.expect(":", f"after the pattern comes a colon, then one entry for each dim: `pin {pattern}: vocab/tp, _`")
    dims = _read_dims(line)
    only = line.accept(r"only\b") is not None
    _refuse_rest(line, "; `only` comes last")
    return Pin(pattern, dims, only)


def _read_dims(line: Line, again: bool = False) -> tuple[PinDim, ...]:
    dims: list[PinDim] = []
    while not dims or line.accept(","):
        dims.append(_read_dim(line, again))
    return tuple(dims)


def _refuse_rest(line: Line, more: str = "") -> None:
    line.expect_end(f"separate dims by `,`, factors in a dim by `*`, axes by `/`{more}")


def _read_dim(line: Line, again: bool) -> PinDim:
    """Parses one dim. `again`: a name may occur twice, for two factors of that name."""
    if line.accept(r"_(?=\s*(?:,|$)|\s+only\b)") is not None:
        return PinDim()
    parts: list[PinFactor] = []
    while not parts or line.accept(r"\*"):
        start = line.at
        factor = line.expect(FACTOR, "a dim is FACTOR, FACTOR/AXIS, FACTOR! or _, as in `vocab/tp, _`")
        if factor == AUTO:
            line.fail(f"{AUTO} is no factor: write `_` for a dim left open", start)
        if factor in ("_", "only"):
            line.fail(f"{factor} is no factor: write `_` alone for a dim left open, name the factor to split it", start)
        if not again and any(part.factor == factor for part in parts):
            line.fail(f"{factor} is there twice in one dim: keep one", start)
        whole = line.accept("!") is not None
        axes: list[str] = []
        while line.accept("/"):
            axes.append(line.expect(NAME, f"a mesh axis follows `/`, as in `{factor}/tp`"))
        if axes and (whole or line.accept("!")):
            line.fail(f"`{factor}!` is kept whole, so no axis splits it: drop the ! or the axis", start)
        parts.append(PinFactor(factor, tuple(axes), whole))
    return PinDim(tuple(parts))


# Parser of operator pins: the rest of a plan line after `pin op:`.
#
# lm_head/backward/mm.2: batch/dp, hidden[2]/cp, -/tp, partial/sp

_GLOB: Final = re.compile(r"[\w.*?\[\]!/-]+")
_NUMBER: Final = re.compile(r"\[[1-9]\d{0,3}\]")


def _read_operator_pin(line: Line) -> OperatorPin:
    names = "a pin of operators names MODULES, MODULES/PHASE or MODULES/PHASE/OPERATOR, as in `op:lm_head/backward/mm`; * is any text"
    start = line.at
    pattern = line.expect(_GLOB, names)
    parts = pattern.split("/")
    if len(parts) > 3 or not all(parts[1:]) or pattern == "/":
        line.fail(names, start)
    if len(parts) > 1 and not any(fnmatchcase(phase, parts[1]) for phase in PHASES):
        line.fail(f"{parts[1]} is no phase{suggest(parts[1], PHASES)}; {names}", start)
    line.expect(":", f"after the pattern comes a colon, then what axes do: `pin op:{pattern}: batch/dp, -/tp`")
    splits: list[OperatorSplit] = []
    others: dict[str, list[str]] = {NOTHING: [], PARTIAL: []}
    seen: set[str] = set()
    while not seen or line.accept(","):
        at = line.at
        factor, which = _read_split_factor(line)
        if any((split.factor, split.number) == (factor, which) for split in splits):
            line.fail(f"{factor} is there twice: write its axes one after the other, `{factor}/dp/tp`", at)
        axes = _read_split_axes(line, factor, seen)
        if factor in others:
            others[factor] += axes
        else:
            splits.append(OperatorSplit(factor, tuple(axes), which))
    line.expect_end("separate what axes do by `,`, axes by `/`")
    return OperatorPin(pattern, tuple(splits), tuple(others[NOTHING]), tuple(others[PARTIAL]))


def _read_split_factor(line: Line) -> tuple[str, int]:
    """A factor with its number among factors of that name, or a word in a factor's place."""
    says = "a pin of operators says what axes do: FACTOR/AXIS, -/AXIS for nothing, partial/AXIS for sums that wait, as in `batch/dp, -/tp`"
    start = line.at
    if line.accept(rf"{NOTHING}(?=\s*/)") is not None:
        return NOTHING, 1
    factor = line.expect(FACTOR, says)
    factor = PARTIAL if factor == PENDING else factor
    if factor in (AUTO, "_"):
        line.fail(f"{factor} is no factor: an axis that is left open is left out", start)
    which = None if factor == PARTIAL else line.accept(_NUMBER)
    if line.accept("!") is not None:
        line.fail("say it of an axis: `-/AXIS` is an axis that splits nothing", start)
    if not line.text.startswith("/", line.at):
        line.fail(f"a mesh axis follows, as in `{factor}/tp`: {says}", line.at)
    return factor, int(which[1:-1]) if which else 1


def _read_split_axes(line: Line, factor: str, seen: set[str]) -> list[str]:
    axes: list[str] = []
    while line.accept("/"):
        start = line.at
        axis = line.expect(NAME, f"a mesh axis follows `/`, as in `{factor}/tp`")
        if axis in seen:
            line.fail(f"{axis} is there twice: an axis does one thing in an operator", start)
        seen.add(axis)
        axes.append(axis)
    return axes


# Kinds of lines.


_KINDS_OF_LINES: Final[Sequence[tuple[str, str, Callable[[Line], PlanLine]]]] = (
    ("operators", r"pin\s+op:(?=[\w.*?\[\]!/-]*\s*:)", _read_operator_pin),
    ("pins", r"pin\s+(?=[^\s:])", _read_pin),
    ("remats", r"remat\b", read_remat_line),
    ("kept", r"keep\b", read_keep_line),
    ("offloads", r"offload\b", read_offload_line),
    ("chunks", r"chunk\b", read_chunk_line),
    ("precisions", r"precision\b", read_precision_line),
    ("sparsities", r"sparse\b", read_sparse_line),
    ("compressions", r"compress\b", read_compress_line),
    ("stores", r"store\b", _read_store_line),
    ("axes", "", _read_axis),
)
"""(field of a `Plan`, beginning of a line, reader of the rest); the first whose beginning fits reads the line. `pin op:` with one more
colon begins a pin of operators, as opposed to that of a parameter named `op`."""
