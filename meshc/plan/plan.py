"""Plans: what each mesh axis splits, and which tensors are pinned, as text and as a value.

    tp: heads, ffn, vocab > seq                    an axis entry: factors in ranks, first rank first
    dp: batch; store params, grads, state          tensors that are stored split along the axis between steps
    cp: heads@attention > seq                      a factor inside one region of the model only
    pp: -                                          use this axis for nothing
    pin lm_head.weight: vocab/tp, _  only          one entry per dim of the tensors that a glob names
    pin op:lm_head/backward: batch/dp, -/tp        use of axes in the operators that a glob names
    store lm_head.weight state: vocab/dp/tp, _     sharding between steps, in addition to the store clauses
    remat model.layers.*: cheap                    values of modules that backward recomputes
    keep value:model.layers.*.mlp                  values that backward never recomputes
    offload state                                  tensors that are kept on the host while not in use
    precision model.layers.*: float8 row           products in few bits
    sparse model.layers.*: 2:4                     products with the largest 2 of each 4 weights
    compress dp: int8                              gradients over an axis in fewer bits, with error feedback

Lines of the last three kinds change what is computed; no others do.

``Plan(text)`` parses, ``str(plan)`` prints the canonical text, and ``Plan(str(plan)) == plan``. ``docs/plans.md`` defines the entries.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshc.errors import ArtifactError, PlanError
from meshc.ir.bounds import MOST_PINS, MOST_PLAN, read_text
from meshc.ir.mesh import Mesh, role
from meshc.plan.entries import AUTO, AxisEntry, OperatorPin, Pin, PinDim, PinFactor, PlanLine, StoreLine, TensorLine, duplicates
from meshc.plan.memory_lines import ChunkLine, KeepLine, OffloadLine, RematLine
from meshc.plan.plan_faults import refuse_faults, suggest
from meshc.plan.precision_lines import CompressLine, ComputeLine, PrecisionLine, SparseLine
from meshc.plan.reader import number_lines, read_entries, toml_lines, yaml_lines


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """Axis entries, pins of tensors and of operators, and store, recompute, offload, chunk, precision, sparse and compress lines.

    ``Plan(lines)`` takes text, a list of lines, or a mapping of axes to entries in which ``pin``, ``store``, ``remat``,
    ``keep``, ``offload``, ``chunk``, ``precision``, ``sparse`` and ``compress`` each hold a list.
    Raises PlanError, which lists every line that cannot be read.
    """

    axes: tuple[AxisEntry, ...]
    pins: tuple[Pin, ...]
    stores: tuple[StoreLine, ...]
    operators: tuple[OperatorPin, ...]
    remats: tuple[RematLine, ...]
    kept: tuple[KeepLine, ...]
    offloads: tuple[OffloadLine, ...]
    chunks: tuple[ChunkLine, ...]
    precisions: tuple[PrecisionLine | ComputeLine, ...]
    sparsities: tuple[SparseLine, ...]
    compressions: tuple[CompressLine, ...]

    def __init__(self, lines: str | Iterable[str] | Mapping[str, object] | Plan = "") -> None:
        vars(self).update(vars(lines if isinstance(lines, Plan) else Plan.of(**read_entries(number_lines(lines), "this plan"))))

    @classmethod
    def of(
        cls,
        axes: Iterable[AxisEntry] = (),
        pins: Iterable[Pin] = (),
        stores: Iterable[StoreLine] = (),
        operators: Iterable[OperatorPin] = (),
        remats: Iterable[RematLine] = (),
        kept: Iterable[KeepLine] = (),
        offloads: Iterable[OffloadLine] = (),
        chunks: Iterable[ChunkLine] = (),
        precisions: Iterable[PrecisionLine | ComputeLine] = (),
        sparsities: Iterable[SparseLine] = (),
        compressions: Iterable[CompressLine] = (),
    ) -> Plan:
        """The plan of these entries, pins and lines."""
        plan = object.__new__(cls)
        vars(plan).update(
            axes=tuple(axes), pins=tuple(pins), stores=tuple(stores), operators=tuple(operators), remats=tuple(remats), kept=tuple(kept),
            offloads=tuple(offloads), chunks=tuple(chunks), precisions=tuple(precisions),
            sparsities=tuple(sparsities), compressions=tuple(compressions),
        )  # fmt: skip
        refuse_faults("these entries are no plan", duplicates(plan.axes))
        return plan

    def having(
        self,
        axes: Iterable[AxisEntry],
        stores: Iterable[StoreLine] | None = None,
        operators: Iterable[OperatorPin] | None = None,
        precisions: Iterable[PrecisionLine | ComputeLine] | None = None,
    ) -> Plan:
        """The plan with its entries replaced, and its store lines, operator pins or precision lines too if given; all other lines stay."""
        given = {"axes": axes, "stores": stores, "operators": operators, "precisions": precisions}
        return Plan.of(**{**vars(self), **{name: lines for name, lines in given.items() if lines is not None}})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in a ``.plan`` file of lines, or a ``.yaml``, ``.yml`` or ``.toml`` file that holds the same as a mapping."""
        file = Path(path)
        readers = {".plan": number_lines, ".yaml": yaml_lines, ".yml": yaml_lines, ".toml": toml_lines}
        if file.suffix not in readers:
            raise PlanError(f"{file}: a plan is read from a file that ends in {', '.join(readers)}")
        try:
            text = read_text(file, MOST_PLAN)
        except ArtifactError as error:
            raise PlanError(f"the plan file {error}") from None
        try:
            lines = readers[file.suffix](text)
        except PlanError as error:
            raise PlanError(f"{file}: {error}") from error
        return cls.of(**read_entries(lines, str(file)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the canonical text to a ``.plan`` file, which ``Plan.load`` reads."""
        file_to_write(path).write_text(f"{self}\n", encoding="utf-8")

    def entry(self, axis: str) -> AxisEntry | None:
        """The entry of this axis, or None."""
        return next((entry for entry in self.axes if entry.axis == axis), None)

    @property
    def gradient_compressions(self) -> tuple[CompressLine, ...]:
        """The compress lines about sums of gradients over an axis of data."""
        return tuple(line for line in self.compressions if role(line.axis) != "pp")

    @property
    def stage_compressions(self) -> tuple[CompressLine, ...]:
        """The compress lines about what the stages of a pipeline send each other."""
        return tuple(line for line in self.compressions if role(line.axis) == "pp")

    def check(self, mesh: Mesh) -> None:
        """Raises PlanError if the plan uses an axis that the mesh does not have, or if its lines contradict each other."""
        lines: tuple[TensorLine, ...] = (*self.pins, *self.stores)
        uses = [(entry.where, entry.axis) for entry in self.axes]
        uses += dict.fromkeys((line.where, axis) for line in lines for axis, _, _ in line.splits())
        uses += dict.fromkeys((pin.where, axis) for pin in self.operators for axis in pin.axes)
        uses += [(line.where, line.axis) for line in self.compressions]
        faults = [f"{where}: the mesh has no axis {axis}{suggest(axis, mesh.names)}" for where, axis in uses if axis not in mesh.names]
        for line in lines:
            faults += _clashes_within(line)
        about: dict[tuple[str, str], list[TensorLine]] = defaultdict(list)
        for pin in self.pins:
            about["pin", pin.pattern].append(pin)
        for one in self.stores:
            for kind in one.kinds:
                about[kind, one.pattern].append(one)
        for (what, _), alike in about.items():
            faults += contradictions(alike, named=what == "pin")
        refuse_faults(f"the plan does not fit the mesh {mesh}, or itself", list(dict.fromkeys(faults)))

    @property
    def leaves_formats_open(self) -> bool:
        """Whether a precision line leaves a choice to the compiler."""
        return any(line.format == AUTO for line in self.formats)

    def __add__(self, other: Plan) -> Plan:
        return Plan.of(**{name: lines + getattr(other, name) for name, lines in vars(self).items()})

    @property
    def formats(self) -> tuple[PrecisionLine, ...]:
        """The precision lines that give products a format."""
        return tuple(line for line in self.precisions if isinstance(line, PrecisionLine))

    @property
    def computes(self) -> tuple[ComputeLine, ...]:
        """The precision lines that say in which dtype modules compute."""
        return tuple(line for line in self.precisions if isinstance(line, ComputeLine))

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.axes, *self.lines())))

    def lines(
        self,
    ) -> tuple[PlanLine, ...]:
        """All lines except the axis entries, in printed order."""
        return (
            *self.pins, *self.operators, *self.stores, *self.remats, *self.kept, *self.offloads, *self.chunks, *self.precisions,
            *self.sparsities, *self.compressions,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"Plan({str(self)!r})"


def file_to_write(path: str | os.PathLike[str]) -> Path:
    """The path of a plan file that may be written. Raises PlanError for another kind of file."""
    file = Path(path)
    if file.suffix != ".plan":
        raise PlanError(f"{file}: a plan is written as lines, to a file that ends in .plan")
    return file


def contradictions(lines: Sequence[TensorLine], named: bool = True) -> list[str]:
    """Messages about contradictions between pins, or store lines, of one tensor; each message names both lines.

    `named`: whether the tensor is known to have the factors that the lines name. Before the model is known, two different names of one dim
    may be an alias or a typing error, and are no contradiction.
    """
    if len(lines) > MOST_PINS:
        what = "pins" if isinstance(lines[0], Pin) else "store lines"
        return [f"{lines[0].where} and {len(lines) - 1} more {what} are about one tensor, of which {MOST_PINS} may be; join them into one"]
    return [f"{one.where} and {other.where}: {why}" for one, other in itertools.combinations(lines, 2)
            for why in _clashes(one, other, named)]  # fmt: skip


def _clashes(one: TensorLine, other: TensorLine, named: bool) -> Iterator[str]:
    what = "pin" if isinstance(one, Pin) else "store line"
    if len(one.dims) != len(other.dims):
        yield f"they name {len(one.dims)} and {len(other.dims)} dims; a {what} has one entry for each dim of the tensor"
        return
    for dim, (left, right) in enumerate(zip(one.dims, other.dims, strict=True)):
        here, there = _occurrences(left), _occurrences(right)
        if named and here and there and not (here.keys() <= there.keys() or here.keys() >= there.keys()):
            yield f"dim {dim} is {left} and {right}; if the dim holds these factors together, write one {what} and join them by *"
            return
        for (factor, number), part in here.items():
            again = there.get((factor, number), part)
            if part != again and all(pinned.axes or pinned.whole for pinned in (part, again)):
                yield f"{factor} in dim {dim} is {_dim_text(part)} in one and {_dim_text(again)} in the other; keep one of the two"
                return
    for axis, dim, factor in one.splits():
        for other_axis, other_dim, other_factor in other.splits():
            if axis == other_axis and (dim != other_dim or (named and factor != other_factor)):
                yield f"{axis} splits {factor} in dim {dim} and {other_factor} in dim {other_dim}; an axis splits a value once"


def _occurrences(dim: PinDim) -> dict[tuple[str, int], PinFactor]:
    """A dim's factors by (name, number among factors of that name)."""
    found: dict[tuple[str, int], PinFactor] = {}
    for part in dim.factors:
        found[part.factor, sum(name == part.factor for name, _ in found)] = part
    return found


def _dim_text(part: PinFactor) -> str:
    return "whole" if part.whole else f"split by {', then '.join(part.axes)}"


def _clashes_within(pin: TensorLine) -> Iterator[str]:
    for one, other in itertools.combinations(pin.splits(), 2):
        if one[0] == other[0]:
            places = f"{one[2]} in dim {one[1]} " + ("twice" if one == other else f"and {other[2]} in dim {other[1]}")
            yield f"{pin.where}: {one[0]} splits {places}; an axis splits a value once"


def open_axes(plan: Plan) -> tuple[str, ...]:
    """The axes that a plan leaves to the search."""
    return tuple(entry.axis for entry in plan.axes if entry.auto)
