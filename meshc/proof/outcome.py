"""Outcome of a proof, for a reader."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch.fx import Node

from meshc.ir import has_record, op_name, records
from meshc.program.program import PlainProgram

TRUSTED = "torch's trace of the model, what operators and the runtime do, pipelines' lists, and the rules and lowerings of"

ADVICE = "what to do: compare its numbers by meshc.verify(program); it need not be wrong, since not all can be proved (docs/proof.md)"


@dataclass(frozen=True)
class UnprovedLine:
    """A line that is not proved. `should_be`: the traced call that it says it is a form of; None if it says none."""

    stage: str
    line: Node
    why: str
    should_be: Node | None = None

    def in_text(self, program: PlainProgram) -> str:
        """A message with the file and the line of a program that was read from a text."""
        origin = program.stages[self.stage].origin
        return str(self) if origin is None else f"{origin.fault(self.line.name, self.why)}{self._traced_call_text()}"

    def __str__(self) -> str:
        return f"{self.stage}: {_text(self.line)}{self._traced_call_text()}\n  why not: {self.why}"

    def _traced_call_text(self) -> str:
        return "" if self.should_be is None else f"\n  it should be: {_text(self.should_be)}"


@dataclass
class ProgramProof:
    """
    mesh      of the program
    sizes     of what is open, for which it was proved
    not_for_all  why it was not for all sizes that the program serves; "" if it was, or nothing is open
    values    number of values that the traced graph has
    lines     number of a rank's lines
    kinds     number of lines by how they are proved
    failures  lines that are not proved, in order
    trusted   number of lines that take the rule and the lowering of an operator as they are, by operator
    in_flight most bytes that collectives and host copies of a stage hold on a rank at once
    seconds   that it took
    made_by   the pass behind which the first line is not proved; "" if nobody has looked
    """

    mesh: str
    values: int
    lines: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[UnprovedLine] = field(default_factory=list)
    trusted: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    seconds: float = 0.0
    sizes: str = ""
    not_for_all: str = ""
    made_by: str = ""

    @property
    def holds(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        if not self.holds:
            more = f"\n{len(self.failures) - 1} more lines are not proved" if len(self.failures) > 1 else ""
            made_by = f"\n  made by: the pass {self.made_by}" if self.made_by else ""
            return f"not proved: {self.failures[0]}{made_by}{more}\n  {ADVICE}"
        at = f", at {self.sizes}," if self.sizes else ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        what = f"proved: {self.lines} lines of a rank on {self.mesh}{at} are the traced graph's {self.values} values"
        flying = f"{self.in_flight / 2**10:,.1f} KiB in flight at most"
        trusted = f"\n  trusted: {TRUSTED} {', '.join(sorted(self.trusted)) or 'no operator'}"
        rest = f"\n  not shown for all sizes: {self.not_for_all}" if self.not_for_all else ""
        return f"{what}: {kinds}; {flying}; {self.seconds:.1f} s{trusted}{rest}"


def _text(node: Node) -> str:
    source = str(records(node)[0].source) if has_record(node) else ""
    call = f"{op_name(node)}({', '.join(map(str, node.args))})" if node.op == "call_function" else node.op
    return f"{node.name} = {call}" + (f"  # {source}" if source else "")
