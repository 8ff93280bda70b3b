"""Formats that a plan leaves open (`precision PATTERN: auto`): a kind of products is in 8 bits if a call is predicted to take less for it.

    layers.*.up      a call takes 1.9 ms less in float8 row                  precision layers.*.up: float8 row
    layers.*.k_proj  a call would take 40.2 us more                          stays as it is
    layers.*.gate    the kernel for scales of rows gives bfloat16 alone      stays as it is

The model is compiled as it is; with all open products in 8 bits that a kernel of the mesh's device would run; and so without one kind after
the other, of which the clock (`meshc/cost/program_clock.py`) sees what is multiplied, rounded and sent. Kinds that gain nothing go, and all
do if what is left takes no less than the model as it is. What is chosen becomes lines of the plan, which say it for any mesh and device.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from meshc.cost.devices import EIGHT_BITS, Device, devices_of
from meshc.cost.program_clock import program_seconds
from meshc.cost.scaled_products import SCALED, why_emulated
from meshc.frontend.dynamic_dims import DynamicDims
from meshc.ir import calls, record
from meshc.ir.schemas import named_arguments
from meshc.ops.quantize import KERNEL_MULTIPLE
from meshc.passes.driver.compile_program import compile_program, compile_traced, place, trace
from meshc.passes.phases.compiler_pass import report_progress
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.stages.attempt import Refusal, attempt
from meshc.plan.plan import Plan
from meshc.plan.precision_lines import AUTO, PrecisionLine
from meshc.plan.recipes import resolve
from meshc.program.program import PlainProgram
from meshc.report.tables import seconds_text

CHOSEN: Final = ("float8 row", "float8 row, gradients in bf16")
"""Formats that are tried, the second where the first does not fit: a pipeline has no scales along all microbatches. Of the formats that
kernels run, rows lose least; one scale for a tensor has the same rate."""
Kinds: TypeAlias = Mapping[str, tuple[str, ...]]
"""Kind of product -> its modules: those of equal layers."""


def settle_formats(request: Request) -> tuple[Request, list[str]]:
    """The request with a line for each kind of product that is chosen in the place of those that leave formats open, and notes. Raises
    PlanError for lines that cover no product."""
    plan, device = resolve(request.plan, request.mesh), devices_of(request.mesh).slowest()
    placed = place(request)
    open_formats = placed.traced.open_formats
    notes = [note for note in placed.notes if note.startswith("precision: ")]
    plain = _with_lines(plan, {})
    kinds = _kinds([module for module, is_open in open_formats.items() if is_open])
    if EIGHT_BITS not in device.flops_per_s:
        notes += [f"precision: {kind} stays as it is: {device.name} has no products of 8 bits" for kind in kinds]
        return replace(request, plan=plain), notes
    search = _FormatSearch(request, plan, device, kinds, open_formats)
    chosen = search.choose()
    return replace(request, plan=_with_lines(plan, search.lines(chosen))), [*notes, *search.notes(chosen)]


def _kinds(modules: Sequence[str]) -> Kinds:
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        found[re.sub(r"(?<![^.])\d+(?![^.])", "*", module)].append(module)
    return {kind: tuple(those) for kind, those in found.items()}


def _with_lines(plan: Plan, lines: Mapping[PrecisionLine, Sequence[PrecisionLine]]) -> Plan:
    """The plan with these lines in the place of each that leaves formats open."""
    is_open = {line for line in plan.formats if line.format == AUTO}
    return plan.having(
        plan.axes, precisions=[each for line in plan.precisions for each in (lines.get(line, ()) if line in is_open else [line])]
    )


@dataclass
class _FormatSearch:
    """
    modules  of all products with a weight -> whether the plan leaves their format open
    gains    seconds by which a call is shorter for a kind
    kept     why a kind stays as it is
    """

    request: Request
    plan: Plan
    device: Device
    kinds: Kinds
    modules: Mapping[str, bool]

    def __post_init__(self) -> None:
        self.format = CHOSEN[0]
        self.gains = dict[str, float]()
        self.kept = dict[str, str]()
        self._traced: TracedModel | None = None
        """Of the model with some line, from which all programs with lines are made."""

    def choose(self) -> list[str]:
        """The kinds that are in 8 bits."""
        for kind, modules in self.kinds.items():
            if self._patterns(kind, modules) is None:
                self.kept[kind] = "no line names it alone: what else it covers stays, too"
        report_progress("formats: the model as it is")
        before, left = compile_program(replace(self.request, plan=_with_lines(self.plan, {}), dynamic=DynamicDims()))
        plain_s = program_seconds(before).total
        asked = replace(left.request, mesh=left.mesh, microbatches=before.microbatches)
        self.plan = left.plan.having(left.plan.axes, precisions=self.plan.precisions)  # axes of it may have been open
        wanted = self._with_kernels(asked)
        if not wanted:
            return []
        whole_s = self._seconds(asked, wanted)
        for kind in wanted:
            without_s = plain_s if len(wanted) == 1 else self._seconds(asked, [one for one in wanted if one != kind])
            self.gains[kind] = without_s - whole_s
        chosen = [kind for kind in wanted if self.gains[kind] > 0]
        together_s = whole_s if len(chosen) == len(wanted) else self._seconds(asked, chosen) if chosen else plain_s
        if chosen and together_s >= plain_s:
            more = seconds_text(together_s - plain_s)
            self.kept |= dict.fromkeys(chosen, f"all that gain in {self.format} make a call {more} longer together")
            return []
        return chosen

    def lines(self, chosen: Collection[str]) -> dict[PrecisionLine, list[PrecisionLine]]:
        """Lines for the kinds, by the line that leaves their format open."""
        found: dict[PrecisionLine, list[PrecisionLine]] = defaultdict(list)
        for kind in chosen:
            last = next(line for line in reversed(self.plan.formats) if line.covers(self.kinds[kind][0]))
            found[last] += [PrecisionLine(pattern, self.format) for pattern in self._patterns(kind, self.kinds[kind]) or ()]
        return found

    def notes(self, chosen: Collection[str]) -> list[str]:
        found = []
        for kind in self.kinds:
            gain = self.gains.get(kind, 0.0)
            predicted = f"({self.device.name}, predicted)"
            if kind in chosen:
                found.append(f"precision: {kind} is in {self.format}: a call takes {seconds_text(gain)} less for it {predicted}")
            else:
                why = self.kept.get(kind) or f"in {self.format} a call would take {seconds_text(-gain)} more {predicted}"
                found.append(f"precision: {kind} stays as it is: {why}")
        return found

    def _patterns(self, kind: str, modules: Sequence[str]) -> list[str] | None:
        """Patterns of lines that cover these modules and no other with a product; None if there are none."""
        for patterns in ([kind or "*"], [module or "*" for module in modules]):
            lines = [PrecisionLine(pattern, self.format) for pattern in patterns]
            if {module for module in self.modules if any(line.covers(module) for line in lines)} == {*modules}:
                return patterns
        return None

    def _with_kernels(self, asked: Request) -> list[str]:
        """The kinds whose products a kernel runs on a rank. What keeps the others is in `kept`."""
        wanted = [kind for kind in self.kinds if kind not in self.kept]
        if not wanted:
            return []
        found = self._try_formats(asked, wanted)
        if isinstance(found, Refusal):
            self.kept |= dict.fromkeys(wanted, f"with it there is no program: {found}")
            return []
        for kind, why in _without_kernels(found, self.device).items():
            self.kept.setdefault(kind, why)
        return [kind for kind in wanted if kind not in self.kept]

    def _try_formats(self, asked: Request, wanted: Sequence[str]) -> PlainProgram | Refusal:
        """The program with these kinds in the first format that there is a program with."""
        found: PlainProgram | Refusal | None = None
        for self.format in CHOSEN:
            found = attempt(lambda: self._compile(asked, wanted))
            if not isinstance(found, Refusal):
                return found
        assert found is not None
        return found

    def _seconds(self, asked: Request, chosen: Collection[str]) -> float:
        return program_seconds(self._compile(asked, chosen)).total

    def _compile(self, asked: Request, chosen: Collection[str]) -> PlainProgram:
        report_progress(f"formats: {self.format} for {', '.join(chosen)}")
        asked = replace(asked, plan=_with_lines(self.plan, self.lines(chosen)))
        if self._traced is None:
            self._traced = trace(asked)
        return (compile_traced(self._traced.copy_for_request(asked)) or compile_program(asked))[0]


def _without_kernels(program: PlainProgram, device: Device) -> dict[str, str]:
    """Why a kind's products in 8 bits are none that a kernel runs as they are: of each kind that has no other."""
    found: dict[str, list[str]] = defaultdict(list)
    for stage in program.stages.values():
        for node in calls(stage.graph):
            if node.target in SCALED:
                (kind,) = _kinds([record(node).source.module])
                found[kind].append(why_emulated(node, device) or _why_filled(named_arguments(node)))
    return {kind: reasons[0] for kind, reasons in found.items() if all(reasons)}


def _why_filled(named: Mapping[str, object]) -> str:
    (m, k), (_, n) = (record(named[name]).shape for name in "ab")  # type: ignore[arg-type]  # they are nodes
    odd = any(size % KERNEL_MULTIPLE for size in (m, k, n))
    return f"its sizes on a rank, {m} x {k} x {n}, are no multiples of {KERNEL_MULTIPLE}" if odd else ""
