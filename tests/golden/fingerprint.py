"""What a program amounts to, as lines that can be compared: who reads a difference sees what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshc.cost import peak_memory
from meshc.program.program import PlainProgram
from meshc.report import summary
from meshc.report.account import link_accounts
from meshc.text import allowed_operators
from meshc.text.printer import port_type


def fingerprint(program: PlainProgram) -> str:
    """Sections of one line an item: operators by kind, collectives by kind, axis, phase and bytes, messages, memory, ports."""
    sections = {
        "operators, times in the text of each stage": _operators(program),
        "collectives, times in a call": _collectives(program),
        "messages between ranks of a pipeline in a call": _messages(program),
        "bytes on a rank": _memory(program),
        "ports": _ports(program),
    }
    blocks = ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items()]
    return "\n\n".join(blocks) + "\n"


def _operators(program: PlainProgram) -> Iterator[str]:
    for stage in program.stages.values():
        found = Counter(allowed_operators.spelling(node.target) for node in stage.graph.nodes if node.op == "call_function")
        yield from (f"{stage.name} {name} {count}" for name, count in sorted(found.items()))


def _collectives(program: PlainProgram) -> Iterator[str]:
    found: Counter[tuple[str, str, str, int]] = Counter()
    for use in summary.collectives(program):
        found[(use.phase, use.kind, "/".join(use.axes), use.bytes_per_rank)] += use.times
    for (phase, kind, axes, size), times in sorted(found.items()):
        yield f"{phase} {kind} over {axes}, {size} bytes: {times}"


def _messages(program: PlainProgram) -> Iterator[str]:
    for link in link_accounts(program) if program.pipeline is not None else ():
        yield f"{link.source} to {link.target}: {link.messages}, {link.bytes} bytes"


def _memory(program: PlainProgram) -> Iterator[str]:
    for rank in peak_memory.by_rank(program):
        kept = ", ".join(f"{kind} {size}" for kind, size in sorted(rank.kept.items()))
        yield f"{rank.rank}: {kept}, peak {rank.peak.total}, gradients {rank.peak.gradients}"


def _ports(program: PlainProgram) -> Iterator[str]:
    for title, ports in (("in", program.inputs), ("out", program.outputs)):
        yield from (f"{title} {port.key} {port_type(port)}" for port in ports)
