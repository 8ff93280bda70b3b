"""Programs as texts in which values are called by their number in the stage, so that two may be compared."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshc.program.program import PlainProgram
from meshc.text.printer import print_program

DEFINED = re.compile(r'^\s+([A-Za-z_]\w*): "')
QUOTED = re.compile(r'("(?:[^"\\]|\\.)*")')
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?!\w*\()")


def text_of(program: PlainProgram) -> str:
    """Comments included."""
    lines: list[str] = []
    names: dict[str, str] = {}
    for line in print_program(program).splitlines():
        if line.startswith("def "):
            names = {}
        found = DEFINED.match(line)
        if found:
            names.setdefault(found[1], f"v{len(names)}")
        code, _, comment = line.partition("  # ")
        parts = QUOTED.split(code)
        parts[::2] = [_renamed(part, names) for part in parts[::2]]
        lines.append("".join(parts) + (f"  # {comment}" if comment else ""))
    return "\n".join(lines)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return NAME.sub(lambda word: names.get(word[0], word[0]), text)
