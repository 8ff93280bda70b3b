"""Parser of a program's text: `ast` finds assignments, the allow-list resolves operators; nothing is executed.

The grammar is what `meshc.text` prints: one function per stage, one call per assignment, a block per region, arguments that are names,
literals, constants or lists. Everything else is refused, with the line, the fault, and what is allowed there.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NoReturn

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc import ir
from meshc.errors import ArtifactError
from meshc.ir import PHASES, Record, Source
from meshc.ir.functions import Function
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.regions import set_region
from meshc.ir.sharding import ORDERS, Part, Sharding, local_shape
from meshc.ir.sharing import WORDS, set_sharing
from meshc.ir.sizes import Dynamic, Number, from_ast
from meshc.ir.sizes import parse as parse_size
from meshc.ir.storage_moves import TIERS
from meshc.program.program import Origin, Stage
from meshc.text.allowed_operators import reorder_arguments, resolve
from meshc.text.printer import CONSTANTS, DEVICES, DTYPES, RESERVED, WORD, SideRow, SideTable

REGION: Final = "the only blocks are regions, by number: with region(3):"
TYPE_EXAMPLE: Final = "for example f32[batch 8/dp, heads 4/tp * head 32] partial(sum: cp), i64[8, 128], int"
ARGUMENT: Final = (
    "an argument is a value's name, a number, a string, True, False, None, inf, nan, a dtype, layout, device, or a list of these"
)

_ONE_TYPE: Final = re.compile(
    r"(?P<dtype>\w+)\[(?P<dims>(?:[^\[\](){}]|\{[^{}]*\})*)\]"
    rf"(?P<rest>(?: (?:whole|{'|'.join(TIERS)}|\w+\((?:[^(){{}}]|\{{[^{{}}]*\}})*\)))*)|(?P<int>int)"
)
_TYPES: Final = re.compile(r"\((?:T(?:, T)*)?\)".replace("T", f"(?:{re.sub(r'[?]P<[a-z]+>', '?:', _ONE_TYPE.pattern)})"))
EARLIER: Final = {"pending": "partial"}
"""Words of types in artifacts before version 6 -> today's words."""
_CLAUSE: Final = re.compile(r" (\w+)(?:\(((?:[^(){}]|\{[^{}]*\})*)\))?")
_WORD: Final = WORD.pattern
_SIZE: Final = r"\d{1,18}|n_\w+|\{[^{}]*\}"
_PIECE: Final = re.compile(r"(?:[^,*{}]|\{[^{}]*\})+")
_ITEM: Final = re.compile(r"(?:[^,{}]|\{[^{}]*\})+")
_PART: Final = re.compile(rf"({_WORD}) ({_SIZE})((?:/{_WORD})*)")
_SIZES: Final = re.compile(r"([A-Za-z_]\w*) (\d{1,18})\.\.(\d{1,18}) (\d{1,18})", re.ASCII)
_PARTIAL: Final = re.compile(rf"({_WORD}): ({_WORD})")
_AXIS: Final = re.compile(rf"({_WORD}?)=([1-9][0-9]{{0,8}})")


def parse_stage(text: str, side_table: SideTable | None = None, where: str = "program text") -> Stage:
    """The stage that a text describes, with sources, reasons and phases from `side_table`; `where` names the text in messages.

    Raises ArtifactError. The result prints as `text`, except for comments that the side table does not have.
    """
    return _StageReader(text, side_table or {}, where).stage()


def parse_type(
    text: str, axis_sizes: Mapping[str, int] | None = None, hints: Mapping[str, int] | None = None
) -> Record | tuple[Record, ...]:
    """The record that a type describes; with `axis_sizes` its shape is local. `hints`: values of the symbols that the type may contain.

    Raises ArtifactError.
    """
    hints = hints or {}
    text = text.strip()
    if text.startswith("("):
        if not _TYPES.fullmatch(text):
            raise ArtifactError(f"{text!r} is no list of types; (f32[8], i64[8]) is one")
        return tuple(_record(match, axis_sizes, hints) for match in _ONE_TYPE.finditer(text[1:-1]))
    match = _ONE_TYPE.fullmatch(text)
    if match is None:
        raise ArtifactError(f"{text!r} is no type; {TYPE_EXAMPLE}")
    return _record(match, axis_sizes, hints)


def parse_sizes(text: str) -> tuple[Dynamic, ...]:
    """The dynamic sizes in the text of `print_sizes`. Raises ArtifactError."""
    found = []
    for item in text.split(", ") if text else []:
        match = _SIZES.fullmatch(item)
        if match is None:
            raise ArtifactError(f"{item!r} is no dynamic size: NAME LEAST..GREATEST STANDS_FOR, for example seq 2..512 37")
        low, high, hint = (int(match[group]) for group in (2, 3, 4))
        if low > high or hint < 2:
            raise ArtifactError(f"{item!r} is no dynamic size: its least is above its greatest, or 0 or 1 stands for it")
        found.append(Dynamic(match[1], low, high, hint))
    return tuple(found)


def parse_one_type(text: str, hints: Mapping[str, int] | None = None) -> Record:
    """The record, with its global shape, of a type that is not a list of types."""
    found = parse_type(text, None, hints)
    if isinstance(found, tuple):
        raise ArtifactError(f"{text!r} is a list of types where one value is meant")
    return found


def _record(match: re.Match[str], axis_sizes: Mapping[str, int] | None, hints: Mapping[str, int]) -> Record:
    text = match[0]
    if match["int"]:
        return Record()
    dtype = DTYPES.get(match["dtype"])
    if dtype is None:
        raise ArtifactError(f"{text!r} is no type: {match['dtype']} is no dtype; these are: {', '.join(DTYPES)}")
    dims = [_dim(dim.strip(), text, hints) for dim in _ITEM.findall(match["dims"])] if match["dims"].strip() else []
    clauses: dict[str, str] = {}
    for clause in _CLAUSE.finditer(match["rest"]):
        word = EARLIER.get(clause[1], clause[1])
        if word not in ("partial", "pad", "whole", "local", *TIERS, "used") or word in clauses:
            raise ArtifactError(f"{text!r} is no type: {clause[0].strip()} is unknown or there twice; {TYPE_EXAMPLE}")
        clauses[word] = clause[2] or ""
    storage, *others = [one for one in TIERS if clauses.pop(one, None) is not None] or ["device"]
    if others:
        raise ArtifactError(f"{text!r} is no type: what lies on the {others[-1]} lies on the host: say one of the two")
    used = _used(clauses.pop("used", None), len(dims), text)
    plain = all(isinstance(dim, int) for dim in dims)
    if plain and (any(dim != 1 for dim in dims) or not clauses.keys() & {"partial", "pad", "whole"}):
        if clauses:
            raise ArtifactError(f"{text!r} is no type: a value without factors has no {', '.join(clauses)}")
        return Record(tuple(dim for dim in dims if isinstance(dim, int)), dtype, storage=storage, used=used)
    if any(isinstance(dim, int) and dim != 1 for dim in dims):
        raise ArtifactError(f"{text!r} is no type: dims have factors in all places (1 aside) or in none; {TYPE_EXAMPLE}")
    sharding = Sharding(
        tuple(() if isinstance(dim, int) else dim for dim in dims), _partial(clauses.get("partial"), text), _zero(clauses.get("pad"), text)
    )
    if any(dim >= len(sharding.dims) or position >= len(sharding.dims[dim]) for dim, position in sharding.zero):
        raise ArtifactError(f"{text!r} is no type: pad() names a part that is not there")
    return Record(_shape(sharding, clauses.get("local"), axis_sizes, text, hints), dtype, sharding, storage=storage, used=used)


def _used(said: str | None, dims: int, text: str) -> int | None:
    if said is None:
        return None
    if not re.fullmatch(r"\d{1,3}", said, re.ASCII) or int(said) >= dims:
        raise ArtifactError(f"{text!r} is no type: used() names a dim of it")
    return int(said)


def _shape(
    sharding: Sharding, local: str | None, axis_sizes: Mapping[str, int] | None, text: str, hints: Mapping[str, int]
) -> tuple[int, ...]:
    if local is not None:
        items = [item.strip() for item in _ITEM.findall(local)]
        if not all(re.fullmatch(_SIZE, item, re.ASCII) for item in items):
            raise ArtifactError(f"{text!r} is no type: local() holds a shape")
        return tuple(_size(item, hints) for item in items)
    if axis_sizes is None:
        return sharding.shape
    unknown = sorted(sharding.split_axes() - axis_sizes.keys())
    if unknown:
        raise ArtifactError(f"{text!r} is split over {', '.join(unknown)}, but @ranks has {', '.join(axis_sizes)}")
    return local_shape(sharding, axis_sizes)


def _size(text: str, hints: Mapping[str, int]) -> int:
    found = parse_size(text[1:-1] if text.startswith("{") else text, hints)
    if not isinstance(found, int):
        raise ArtifactError(f"{text} is no integer, as a size is")
    return found


def _dim(dim: str, text: str, hints: Mapping[str, int]) -> int | tuple[Part, ...]:
    if re.fullmatch(_SIZE, dim, re.ASCII):
        return _size(dim, hints)
    parts = []
    for piece in _PIECE.findall(dim):
        match = _PART.fullmatch(piece.strip())
        if match is None:
            raise ArtifactError(f"{text!r} is no type: {piece.strip()!r} is not FACTOR SIZE/AXIS/...; {TYPE_EXAMPLE}")
        parts.append(Part(match[1], _size(match[2], hints), *_cuts(match[3], text)))
    return tuple(parts)


def _cuts(said: str, text: str) -> tuple[tuple[str, ...], str]:
    """The axes of a part, and the order of the tiles along the first axis."""
    cuts = [cut.partition("~") for cut in said.split("/")[1:]]
    if any(not axis or (mark and (at or order not in ORDERS)) for at, (axis, mark, order) in enumerate(cuts)):
        raise ArtifactError(f"{text!r} is no type: {said!r} is not /AXIS/..., or /AXIS~ORDER/... with an order of {', '.join(ORDERS)}")
    return tuple(axis for axis, _, _ in cuts), cuts[0][2] if cuts else ""


def _partial(clause: str | None, text: str) -> tuple[tuple[str, str], ...]:
    partial = []
    for item in [] if clause is None else clause.split(", "):
        match = _PARTIAL.fullmatch(item)
        if match is None or match[1] not in REDUCTIONS:
            raise ArtifactError(f"{text!r} is no type: {item!r} is not REDUCTION: AXIS, with a reduction of {', '.join(REDUCTIONS)}")
        partial.append((match[2], match[1]))
    return tuple(partial)


def _zero(clause: str | None, text: str) -> frozenset[tuple[int, int]]:
    if clause is None:
        return frozenset()
    if not re.fullmatch(r"zero: \d{1,9}\.\d{1,9}(, \d{1,9}\.\d{1,9})*", clause, re.ASCII):
        raise ArtifactError(f"{text!r} is no type: pad(zero: 0.1, 2.0) lists parts as DIM.POSITION")
    return frozenset((int(dim), int(position)) for dim, position in re.findall(r"(\d+)\.(\d+)", clause, re.ASCII))


class _StageReader:
    """Parser of one stage's text."""

    def __init__(self, text: str, side_table: SideTable, where: str) -> None:
        self.lines = text.split("\n")
        self.side_table = side_table
        self.where = where
        self.graph = Graph()
        self.values: dict[str, Node] = {}
        self.at: dict[str, int] = {}
        self.axis_sizes: dict[str, int] | None = None
        self.hints: dict[str, int] = {}
        self.regions: set[int] = set()
        self.types: dict[str, Record | tuple[Record, ...]] = {}  # memoised by text: equal layers have equal types
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            self.fail(error.lineno or 1, f"this is no Python: {error.msg}")
        except (ValueError, RecursionError, MemoryError) as error:
            raise ArtifactError(f"{where}: this is no Python: {error}") from None

    def fail(self, at: ast.AST | int, why: str) -> NoReturn:
        number = at if isinstance(at, int) else getattr(at, "lineno", 1)
        line = self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""
        raise ArtifactError(f"{self.where}, line {number}: {why}\n    {line[:200]}") from None

    def stage(self) -> Stage:
        body = self.tree.body
        if len(body) != 1 or not isinstance(function := body[0], ast.FunctionDef):
            self.fail(body[1] if len(body) > 1 else 1, "a stage's text is one function and nothing else")
        self.ranks(function)
        inputs = self.parameters(function)
        *assignments, last = function.body
        for statement in assignments:
            if isinstance(statement, ast.With):
                self.region_of(statement)
            else:
                self.assignment(statement)
        if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Dict):
            self.fail(last, 'a stage ends with its results: return {"output:loss": loss}')
        outputs = [self.string(key or last, "a result's key") for key in last.value.keys]
        self.at |= {f"return {key}": getattr(at, "lineno", 1) for key, at in zip(outputs, last.value.keys, strict=True)}
        self.graph.output(tuple(self.argument(value) for value in last.value.values))
        origin = Origin(self.where, tuple(self.lines), self.at, self.axis_sizes)
        return Stage(function.name, self.graph, tuple(inputs), tuple(outputs), origin)

    def ranks(self, function: ast.FunctionDef) -> None:
        """Reads the decorators: the sizes of the axes, and the dynamic sizes."""
        for decorator in function.decorator_list:
            match decorator:
                case ast.Call(func=ast.Name(id="sizes"), args=[argument], keywords=[]) if not self.hints:
                    try:
                        self.hints = {size.symbol: size.hint for size in parse_sizes(self.string(argument, "the dynamic sizes"))}
                    except ArtifactError as error:
                        self.fail(decorator, str(error))
                case ast.Call(func=ast.Name(id="ranks"), args=[argument], keywords=[]) if self.axis_sizes is None:
                    text = self.string(argument, "the axes")
                    matches = [_AXIS.fullmatch(item) for item in text.split(",")]
                    self.axis_sizes = {match[1]: int(match[2]) for match in matches if match is not None}
                    if len(self.axis_sizes) != len(matches):
                        self.fail(decorator, f"{text!r} lists no axes: AXIS=SIZE,AXIS=SIZE")
                case ast.Call(func=ast.Name(id="ranks")):
                    self.fail(decorator, 'there is one @ranks, with one text: @ranks("dp=2,tp=4")')
                case _:
                    self.fail(decorator, 'the only decorators are @ranks("dp=2,tp=4") and @sizes("seq 2..512 37")')

    def parameters(self, function: ast.FunctionDef) -> list[str]:
        arguments = function.args
        if arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg or function.returns is not None:
            self.fail(function, 'a parameter is NAME: "TYPE" = "KEY", nothing else')
        if len(arguments.defaults) != len(arguments.args):
            self.fail(function, 'every parameter has a key: x: "f32[8]" = "input:x"')
        keys = []
        for argument, default in zip(arguments.args, arguments.defaults, strict=True):
            keys.append(self.string(default, "a parameter's key"))
            self.define(argument, argument.arg, argument.annotation, None)
        return keys

    def region_of(self, block: ast.With) -> None:
        """Reads the lines under `with region(NUMBER):`."""
        match block.items:
            case [ast.withitem(ast.Call(func=ast.Name(id="region"), args=[ast.Constant(value=int() as number)], keywords=[]), None)] if (
                not isinstance(number, bool)
            ):
                pass
            case _:
                self.fail(block, REGION)
        if number in self.regions:
            self.fail(block, f"there is a region {number} above: the lines of a region stand together, under a number of their own")
        self.regions.add(number)
        for statement in block.body:
            set_region(self.assignment(statement), number)

    def assignment(self, statement: ast.stmt) -> Node:
        annotation: ast.expr | None = None
        match statement:
            case ast.AnnAssign(target=ast.Name(id=target), annotation=annotation, value=ast.Call() as value):
                pass
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as value):
                pass
            case _:
                self.fail(statement, 'a line is NAME: "TYPE" = OPERATOR(ARGUMENTS), nothing else')
        try:
            operator = resolve(name := self.dotted_name(value.func))
        except ArtifactError as error:
            self.fail(value.func, str(error))
        arguments = reorder_arguments(name, [self.argument(item) for item in value.args])
        keywords: dict[str, Argument] = {}
        for item in value.keywords:
            if item.arg is None:
                self.fail(value, "** may not stand here")
            keywords[item.arg] = self.argument(item.value)
        return self.define(statement, target, annotation, (operator, arguments, keywords))

    def define(
        self, at: ast.AST, name: str, annotation: ast.expr | None, call: tuple[Function, tuple[Argument, ...], dict[str, Argument]] | None
    ) -> Node:
        """Adds the node of a parameter, or of `call`: (operator, arguments, keywords)."""
        if name in self.values:
            self.fail(at, f"{name} is assigned twice")
        if name in RESERVED:
            self.fail(at, f"{name} is a word of the language and no name for a value")
        node = (
            self.graph.create_node("placeholder", name, name=name) if call is None else self.graph.create_node("call_function", *call, name)
        )
        if node.name != name:  # fx gives no value the name of a builtin; a graph may hold one all the same
            node.name = name
        self.values[name] = node
        self.at[name] = getattr(at, "lineno", 1)
        if annotation is None:
            return node
        try:
            text, semicolon, words = self.string(annotation, "a type").partition("; ")
            set_sharing(node, _words(words) if semicolon else ())
            found = self.types.get(text) or parse_type(text, self.axis_sizes, self.hints)
            self.types[text] = found
        except ArtifactError as error:
            self.fail(annotation, str(error))
        row = self.side_table.get(name, {})
        if isinstance(found, tuple):
            rows: Sequence[SideRow | list[SideRow]] = row if isinstance(row, list) and len(row) == len(found) else [row] * len(found)
            ir.set_record(node, tuple(self.with_side_row(name, record, row) for record, row in zip(found, rows, strict=True)))
        else:
            ir.set_record(node, self.with_side_row(name, found, row))
        return node

    def with_side_row(self, name: str, record: Record, row: SideRow | list[SideRow]) -> Record:
        """The record with what its side-table row says."""
        try:
            if not isinstance(row, dict):
                raise TypeError
            source = Source(**row.get("source", {}))
            reason, phase, again = row.get("reason", ""), row.get("phase", record.phase), row.get("again", False)
            of, chunk = row.get("of", ""), row.get("chunk")
            if not all(isinstance(words, str) for words in (source.file, source.code, source.module, reason, of)):
                raise TypeError
            if type(source.line) is not int or not isinstance(phase, str) or phase not in PHASES or type(again) is not bool:
                raise TypeError
            if chunk is not None and type(chunk) is not int:
                raise TypeError
            return replace(record, source=source, reason=reason, phase=phase, again=again, of=of, chunk=chunk)
        except (TypeError, AttributeError):
            raise ArtifactError(f"{self.where}: the side table's entry for {name} is no source, reason and phase: {row!r}") from None

    def argument(self, value: ast.expr) -> Argument:
        match value:
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Name(id=name) if name in CONSTANTS:
                return CONSTANTS[name]
            case ast.Name(id=name) if name in DEVICES:
                return torch.device(name)
            case ast.Name(id=name) if name not in self.hints:
                self.fail(value, f"{name} is not defined above; {ARGUMENT}")
            case ast.Constant(value=None | bool() | int() | float() | str() as constant):
                return constant
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if not isinstance(number, bool):
                return -number
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
                return -math.inf
            case ast.List(elts=items):
                return [self.argument(item) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.argument(item) for item in items)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int() as index)) if name in DEVICES:
                return torch.device(name, index)
            case _:
                if self.hints and (size := self.size(value)) is not None:
                    return size
                self.fail(value, f"{_excerpt(value)} may not stand here; {ARGUMENT}")

    def size(self, value: ast.expr) -> Number | None:
        try:
            return from_ast(value, self.hints)
        except (ArtifactError, ArithmeticError, RecursionError) as error:
            self.fail(value, str(error))

    def string(self, value: ast.AST, what: str) -> str:
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            self.fail(value, f"{what} is a string")
        return value.value

    def dotted_name(self, function: ast.expr) -> str:
        if isinstance(function, ast.Attribute):
            return f"{self.dotted_name(function.value)}.{function.attr}"
        if not isinstance(function, ast.Name):
            self.fail(function, f"{_excerpt(function)} is no operator's name")
        return function.id


def _words(text: str) -> list[str]:
    """The words behind a type."""
    words = text.split(", ")
    unknown = next((word for word in words if word not in WORDS), None)
    if unknown is not None:
        raise ArtifactError(f"behind a type stands what its value's memory is, {' or '.join(WORDS)}, not {unknown!r:.60}")
    return words


def _excerpt(value: ast.expr) -> str:
    text = ast.unparse(value)
    return text if len(text) <= 60 else f"{text[:60]} ..."


__all__ = ["parse_one_type", "parse_stage", "parse_type"]
