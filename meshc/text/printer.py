"""Printer of programs, stages and types as text (Python syntax, data for `meshc.text.parse`); comments as data; hashes of texts.

    @ranks("dp=2,tp=4")
    def main(
        x: "f32[batch 8/dp, hidden 256]" = "input:x",
        w: "f32[hidden 256, ffn 688/tp]" = "parameter:mlp.up_proj.weight",
    ):
        # h = self.up_proj(x)
        h: "f32[batch 8/dp, ffn 688/tp]" = aten.mm(x, w)  # model.py:12 mlp.up_proj; tp takes ffn
        return {
            "output:h": h,
        }

A parameter's default is the key under which its value enters the stage; values leave under the returned keys. `@ranks` marks a per-rank
stage, with the sizes of the axes: shapes in its records are local, shapes in its types stay global. `@sizes` lists dynamic sizes, with
their ranges and the integers used for them while compiling; a number may then be written as the symbol `n_NAME`.

A type is the dtype, the factors of each dim with the axes that split them, then everything that is not the default:

    f32[batch 8/dp/cp, heads 4/tp * head 32]     axes major to minor; `1` is a dim without a factor, `f32[]` a scalar
    f32[batch 8/dp, seq 64/cp~zigzag]            the tiles of the first axis in another order (`meshc/ir/sharding.py`)
    f32[8, 128]                                  a value without a sharding: its plain shape
    ... partial(sum: tp, max: dp)                not reduced yet over these axes
    ... pad(zero: 0.1, 2.0)                      padding known to be zero: factor 1 of dim 0, factor 0 of dim 2
    ... local(4, 128)                            a shape that does not follow from the sharding
    ... host                                     stored on the host: `f32[8, 128] host`; other tiers likewise (`meshc/ir/storage_moves.py`)
    ... used(1)                                  dim 1 holds only its used positions (`meshc/ir/used_rows_dims.py`)
    ... whole                                    has a sharding although no dim shows one: `f32[] whole` is equal on all ranks
    f32[batch n_batch/dp, seq {n_seq + 1}]       dynamic sizes: a symbol, or an expression of symbols in braces
    int                                          no tensor
    (f32[8], f32[8])                             several results

A type is followed by words for its value's memory, unless the value has fresh memory of its own (`meshc/ir/sharing.py`):

    f32[68]; its parts inside, kept              operands of a cat are computed in place, at the same address in each call
    f32[68]; over its operand                    an all-reduce writes over its operand

Lines of a compiled region are a block under the region's number, in a program for a compiling backend (`meshc/ir/regions.py`):

    with region(0):
        h: "f32[batch 8/dp, ffn 688/tp]" = aten.mm(x, w)

Comments (source, reason, the user's line, the phase, recomputation) come from `side_table` and are not part of a program.
"""

from __future__ import annotations

import hashlib
import keyword
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias, TypedDict, cast

import torch
from torch.fx import Graph, Node

from meshc import ir
from meshc.errors import ArtifactError
from meshc.ir import Record, Source, regions
from meshc.ir.graph import placeholders
from meshc.ir.sharding import Sharding, local_shape
from meshc.ir.sharing import sharing_of
from meshc.ir.sizes import Dynamic, Ratio, Size, braced_text
from meshc.pipelining import pipeline_text
from meshc.program.program import PlainProgram, Port, Stage, sizes
from meshc.text import allowed_operators

DTYPES: Final[dict[str, torch.dtype]] = {
    "b8": torch.bool,
    **{f"i{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "bf16": torch.bfloat16,
    **{f"c{bits}": getattr(torch, f"complex{bits}") for bits in (32, 64, 128)},
    **{f"f8{kind}": getattr(torch, f"float8_{kind}") for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
}
class SourceRow(TypedDict, total=False):
    """A `Source` as data, without empty fields."""

    file: str
    line: int
    code: str
    module: str


class SideRow(TypedDict, total=False):
    """The side table's row of one value, without default fields."""

    source: SourceRow
    reason: str
    phase: str
    again: bool
    of: str
    chunk: int


SideTable: TypeAlias = dict[str, SideRow | list[SideRow]]
"""Value name -> its row; a list with a row for each result if these differ."""

CONSTANTS: Final[dict[str, torch.dtype | torch.layout | torch.memory_format | float]] = {
    **DTYPES,
    "inf": math.inf,
    "nan": math.nan,
    "strided": torch.strided,
    "contiguous": torch.contiguous_format,
    "preserve": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
DEVICES: Final = ("cpu", "cuda", "meta")
"""Device types that a text may name; a device with an index prints as `cuda[0]`."""
RESERVED: Final = frozenset({*CONSTANTS, *DEVICES, *keyword.kwlist})
"""Words that cannot be value names in a text. Operator names can: they occur only before a parenthesis, where values never do."""
WORD: Final = re.compile(r"[^\s,*/\[\]():;\"'\\]+")
"""The name of a factor or an axis."""

_OF_CONSTANT: Final = {value: name for name, value in CONSTANTS.items() if not isinstance(value, float)}
_OF_DTYPE: Final = {value: name for name, value in DTYPES.items()}


def print_stage(stage: Stage, program: PlainProgram | None = None, *, comments: bool = True) -> str:
    """The stage's text. Without its program, which has the sizes of the axes, local shapes are printed explicitly.

    Raises ArtifactError for a graph without a text form: with an attribute, a module call, or an argument that is no literal.
    """
    axis_sizes = None if program is None else sizes(program)
    if axis_sizes is not None and not _is_local(stage.graph, axis_sizes):
        axis_sizes = None
    names = value_names(stage.graph)
    marked = [] if axis_sizes is None else [f"@ranks({quote(','.join(f'{axis}={size}' for axis, size in axis_sizes.items()))})"]
    if program is not None and program.dynamic:
        marked.append(f"@sizes({quote(print_sizes(program.dynamic))})")
    entered = placeholders(stage.graph)
    if len(entered) != len(stage.inputs):
        raise ArtifactError(f"stage {stage.name} has {len(entered)} parameters and {len(stage.inputs)} keys for them")
    if not stage.name.isidentifier() or keyword.iskeyword(stage.name):
        raise ArtifactError(f"a stage's name is a Python name, not {stage.name!r}")
    types: _Types = {}
    lines = []
    for node, key in zip(entered, stage.inputs, strict=True):
        lines.append(f"    {names[node]}{_annotation(node, axis_sizes, types)} = {quote(key)},{_comment(node) if comments else ''}")
    lines = [*marked, f"def {stage.name}(", *lines, "):"] if lines else [*marked, f"def {stage.name}():"]
    lines += _calls(stage.graph, names, axis_sizes, types, comments)
    return "\n".join([*lines, *_return_lines(stage, names)]) + "\n"


def _calls(
    graph: Graph, names: Mapping[Node, str], axis_sizes: Mapping[str, int] | None, types: _Types, comments: bool
) -> Iterator[str]:
    """The lines of a stage between its parameters and its results, with a block for each region."""
    group: tuple[str, Source] = ("forward", Source())
    for number, nodes in regions.blocks(node for node in graph.nodes if node.op not in ("placeholder", "output")):
        indent = "    " if number is None else "        "
        if number is not None:
            yield f"    with region({number}):"
        for node in nodes:
            if node.op != "call_function":
                raise ArtifactError(f"{node.name} is a {node.op} of {node.target!r}: a program's text holds calls of operators only")
            above: list[str] = []
            if comments:
                group = _open_group(node, group, above)
            above.append(f"{names[node]}{_annotation(node, axis_sizes, types)} = {_call(node, names)}{_comment(node) if comments else ''}")
            yield from (indent + line for line in above)


def _open_group(node: Node, group: tuple[str, Source], lines: list[str]) -> tuple[str, Source]:
    """Appends comment lines above the first node of a line of the user's model, or of a phase; returns the new group."""
    records = ir.records(node) if ir.has_record(node) else ()
    if not records:
        return group
    phase, source = records[0].phase, records[0].source
    if phase != group[0]:
        lines.append(f"# {'-' * 8} {phase} {'-' * 8}")
    if source.code and (phase, source) != group:
        lines.append(f"# {_one_line(source.code)}")
    return phase, source


def hash_stage(stage: Stage, program: PlainProgram | None = None) -> str:
    """SHA-256, in hex, of the stage's text without comments."""
    return hashlib.sha256(print_stage(stage, program, comments=False).encode()).hexdigest()


def print_program(program: PlainProgram, *, comments: bool = True) -> str:
    """The program's text: mesh, plan, mode, backend; ports; stages; schedule or pipeline. Constants are shown by a hash of their values."""
    head = {"mesh": str(program.mesh), "plan": str(program.plan), "mode": program.mode, "backend": program.backend}
    blocks = ["\n".join([*(f"{name} = {_long(text)}" for name, text in head.items()), f"microbatches = {program.microbatches}"])]
    for title, ports in (("inputs", program.inputs), ("outputs", program.outputs)):
        blocks.append(_listing(title, [_port(port) for port in ports]))
    if program.dynamic:
        blocks[0] += f"\nsizes = {quote(print_sizes(program.dynamic))}"
    if program.constraints:
        blocks.append(_listing("constraints", [quote(text) for text in program.constraints]))
    if program.constants:
        blocks.append(_listing("constants", [_constant(name, program.constants[name]) for name in _in_order(program)]))
    blocks += [print_stage(stage, program, comments=comments).rstrip("\n") for stage in program.stages.values()]
    if program.pipeline is None:
        blocks.append(_listing("schedule", [_instruction(vars(instruction)) for instruction in program.schedule]))
    else:
        blocks.append(f"pipeline = {quote(program.pipeline.axis)}")
        blocks += [_listing(title, items) for title, items in pipeline_text.listings(program.pipeline)]
    return "\n\n".join(blocks) + "\n"


def _in_order(program: PlainProgram) -> list[str]:
    """Names of the constants in the order of their ports; a file may hold them in any order."""
    ports = [port.name for port in program.inputs if port.kind == "constant" and port.name in program.constants]
    return [*ports, *sorted(program.constants.keys() - set(ports))]


def print_sizes(dynamic: Iterable[Dynamic]) -> str:
    """Dynamic sizes with their ranges and the integers that passes use for them: `batch 2..64 11, seq 2..512 37`."""
    return ", ".join(f"{size.name} {size.low}..{size.high} {size.hint}" for size in dynamic)


def hash_program(program: PlainProgram) -> str:
    """SHA-256, in hex, of the program's text without comments: equal on all ranks, or they run different programs."""
    return hashlib.sha256(print_program(program, comments=False).encode()).hexdigest()


def print_type(value: Record | tuple[Record, ...], axis_sizes: Mapping[str, int] | None = None) -> str:
    """The type of a value; of a per-rank value with `axis_sizes`."""
    if isinstance(value, tuple):
        return f"({', '.join(print_type(item, axis_sizes) for item in value)})"
    if value.dtype is None:
        if value.shape or value.sharding is not None:
            raise ArtifactError(f"a value that is no tensor has no shape and no sharding: {value}")
        return "int"
    dtype = _OF_DTYPE.get(value.dtype)
    if dtype is None:
        raise ArtifactError(f"values of {value.dtype} have no type in a program's text")
    sharding = value.sharding
    if sharding is None:
        return f"{dtype}[{', '.join(map(braced_text, value.shape))}]" + _place(value)
    for word in (*(part.factor for _, _, part in sharding.parts()), *sharding.axes()):
        if not WORD.fullmatch(word) or "~" in word and word in sharding.axes():
            raise ArtifactError(f"{word!r} cannot stand in a type: a factor or axis has none of the characters , * / ( ) [ ] : ; or space, "
                                "an axis no ~")  # fmt: skip
    text = f"{dtype}[{', '.join(' * '.join(map(str, parts)) or '1' for parts in sharding.dims)}]"
    if sharding.partial:
        text += f" partial({', '.join(f'{reduction}: {axis}' for axis, reduction in sharding.partial)})"
    if sharding.zero:
        text += f" pad(zero: {', '.join(f'{dim}.{position}' for dim, position in sorted(sharding.zero))})"
    if not any(sharding.dims) and not sharding.partial and not sharding.zero:
        text += " whole"
    if value.shape != _implied_shape(value, axis_sizes):
        text += f" local({', '.join(map(braced_text, value.shape))})"
    return text + _place(value)


def _place(value: Record) -> str:
    lies = "" if value.storage == "device" else f" {value.storage}"
    return lies if value.used is None else f"{lies} used({value.used})"


def side_table(stage: Stage) -> SideTable:
    """What a stage's text does not say, by value name: of each value (of each result) source, reason, phase, whether backward recomputes
    it, the traced value of which it is a form, and the number of its chunk; defaults are left out."""
    names = value_names(stage.graph)
    table: SideTable = {}
    for node in stage.graph.nodes:
        if ir.has_record(node):
            rows = [_side_row(record) for record in ir.records(node)]
            if any(rows):
                table[names[node]] = rows[0] if all(row == rows[0] for row in rows) else rows
    return table


def value_names(graph: Graph) -> dict[Node, str]:
    """The nodes' names in a text: their own, or with a number appended if that is a reserved word."""
    taken = {node.name for node in graph.nodes}
    names: dict[Node, str] = {}
    for node in graph.nodes:
        name = node.name
        if name in RESERVED or not name.isidentifier():
            base = re.sub(r"\W", "_", name, flags=re.ASCII)
            base = f"_{base}" if base[:1].isdigit() else base
            number = 1
            while (name := f"{base}_{number}") in taken or name in RESERVED:
                number += 1
            taken.add(name)
        names[node] = name
    return names


def quote(text: str) -> str:
    """A string literal in ASCII, in double quotes."""
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def print_argument(value: object, names: Mapping[Node, str]) -> str:
    """An argument: a value's name, a literal, a constant, a list, or a tuple."""
    if isinstance(value, Node):
        return names[value]
    if value is None or type(value) is int or isinstance(value, bool | Size | Ratio):
        return str(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, torch.device) and value.type in DEVICES:
        return value.type if value.index is None else f"{value.type}[{value.index}]"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format) and value in _OF_CONSTANT:
        return _OF_CONSTANT[value]
    if isinstance(value, list | tuple):
        items = [print_argument(item, names) for item in value]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    raise ArtifactError(f"a {type(value).__name__} cannot stand in a program's text: {value!r}; literals, lists, dtypes and devices can")


def _is_local(graph: Graph, axis_sizes: Mapping[str, int]) -> bool:
    """Whether the shapes in a graph's records are local: of the shapes that differ, more equal the tile's than the whole's."""
    votes = 0
    known: dict[tuple[int, int], int] = {}
    for node in graph.nodes:
        for record in ir.records(node) if ir.has_record(node) else ():
            if record.sharding is not None:
                alike = id(record.sharding), id(record.shape)
                if alike not in known:
                    known[alike] = _vote(record.shape, record.sharding, axis_sizes)
                votes += known[alike]
    return votes > 0


def _vote(shape: tuple[int, ...], sharding: Sharding, axis_sizes: Mapping[str, int]) -> int:
    """1 if a shape is the tile's, -1 if it is the whole's, 0 if it is both or neither."""
    if not sharding.split_axes() <= axis_sizes.keys():
        return 0
    return (shape == local_shape(sharding, axis_sizes)) - (shape == sharding.shape)


def _implied_shape(value: Record, axis_sizes: Mapping[str, int] | None) -> tuple[int, ...] | None:
    sharding = value.sharding
    assert sharding is not None
    if axis_sizes is None:
        return sharding.shape
    return local_shape(sharding, axis_sizes) if sharding.split_axes() <= axis_sizes.keys() else None


_Types: TypeAlias = dict[tuple[int, int, torch.dtype | None, str], str]
"""Type texts of a graph's values, memoised by the identity of the objects that describe them: values of equal layers share these."""


def _annotation(node: Node, axis_sizes: Mapping[str, int] | None, types: _Types) -> str:
    if not ir.has_record(node):
        return ""
    found = node.meta[ir.KEY]
    try:
        words = sharing_of(node)
        return f": {quote(_type(found, axis_sizes, types) + ('; ' if words else '') + ', '.join(words))}"
    except ArtifactError as error:
        raise ArtifactError(f"{node.name}: {error}") from None


def _type(found: Record | tuple[Record, ...], axis_sizes: Mapping[str, int] | None, types: _Types) -> str:
    if isinstance(found, tuple):
        return print_type(found, axis_sizes)
    alike = id(found.sharding), id(found.shape), found.dtype, _place(found)
    if alike not in types:
        types[alike] = print_type(found, axis_sizes)
    return types[alike]


def _call(node: Node, names: Mapping[Node, str]) -> str:
    try:
        arguments = [print_argument(value, names) for value in node.args]
        arguments += [f"{name}={print_argument(value, names)}" for name, value in node.kwargs.items()]
    except ArtifactError as error:
        raise ArtifactError(f"{node.name}, an argument of {allowed_operators.spelling(node.target)}: {error}") from None
    return f"{allowed_operators.spelling(node.target)}({', '.join(arguments)})"


def _return_lines(stage: Stage, names: Mapping[Node, str]) -> Iterator[str]:
    results = returned_values(stage.graph)
    if len(results) != len(stage.outputs):
        raise ArtifactError(f"stage {stage.name} returns {len(results)} values and has {len(stage.outputs)} keys for them")
    if not results:
        yield "    return {}"
        return
    yield "    return {"
    for key, value in zip(stage.outputs, results, strict=True):
        yield f"        {quote(key)}: {print_argument(value, names)},"
    yield "    }"


def returned_values(graph: Graph) -> tuple[object, ...]:
    """What a graph returns, as a tuple."""
    for node in reversed(graph.nodes):
        if node.op == "output":
            found = node.args[0] if node.args else ()
            return tuple(found) if isinstance(found, list | tuple) else (found,)
    return ()


def _comment(node: Node) -> str:
    if not ir.has_record(node) or not ir.records(node):
        return ""
    record = ir.records(node)[0]
    said = "; ".join(part for part in (str(record.source), record.reason, "recomputed" if record.again else "") if part)
    return f"  # {_one_line(said)}" if said else ""


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def _side_row(record: Record) -> SideRow:
    source = {name: value for name in SourceRow.__annotations__ if (value := getattr(record.source, name)) != getattr(Source, name)}
    phase = "" if record.phase == Record.phase else record.phase
    row = {"source": source, "reason": record.reason, "phase": phase, "again": record.again, "of": record.of}
    found = {name: value for name, value in row.items() if value}
    return cast(SideRow, found if record.chunk is None else {**found, "chunk": record.chunk})


def _long(text: str) -> str:
    """A string literal; a text of several lines becomes one literal per line."""
    lines = text.splitlines(keepends=True)
    return quote(text) if len(lines) < 2 else "(\n" + "".join(f"    {quote(line)}\n" for line in lines) + ")"


def _listing(title: str, items: list[str]) -> str:
    return "\n".join([f"{title} = [", *(f"    {item}," for item in items), "]"]) if items else f"{title} = []"


def _port(port: Port) -> str:
    more = f", of={quote(port.of)}" if port.of else ""
    more += ", requires_grad=True" if port.requires_grad else ""
    return f"port({quote(port.key)}, {quote(port_type(port))}{more})"


def port_type(port: Port) -> str:
    """The type of the value that enters or leaves through a port, its shape global."""
    return print_type(Record(port.shape, port.dtype, port.sharding, storage=port.storage))


def _constant(name: str, value: torch.Tensor) -> str:
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = print_type(Record(tuple(value.shape), value.dtype))
    return f"constant({quote(name)}, {quote(kind)}, sha256={quote(hashlib.sha256(data).hexdigest())})"


def _instruction(fields: Mapping[str, object]) -> str:
    return f"{fields['op']}({', '.join(f'{name}={print_argument(value, {})}' for name, value in fields.items() if name != 'op' and value)})"
