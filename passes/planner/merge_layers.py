"""Plan lines of single layers, merged into few lines with globs of layer numbers.

    store layers.1.up: ffn/dp, _                  store layers.[1-9].up: ffn/dp, _
    store layers.2.up: ffn/dp, _        gives     store layers.[12][0-9].up: ffn/dp, _
    ... layers.30.up: ffn/dp, _                   store layers.30.up: ffn/dp, _
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from meshc.plan.entries import OperatorPin, StoreLine

Line = TypeVar("Line", bound=StoreLine | OperatorPin)
_NUMBER = re.compile(r"(?<![^.])\d+(?=[./]|$)")


def merge_layers(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Merged lines, each at the place of its first layer."""
    together: dict[tuple[Line, str], dict[int, None]] = {}
    for line in lines:
        found = _NUMBER.search(line.pattern)
        behind = line.pattern[found.end() :] if found else ""
        before = replace(line, pattern=line.pattern[: found.start()] if found else line.pattern)
        numbers = together.setdefault((before, behind), {})
        numbers |= {int(found[0]): None} if found else {}
    return tuple(
        replace(before, pattern=f"{before.pattern}{glob}{behind}")
        for (before, behind), numbers in together.items()
        for glob in (globs(numbers) if numbers else [""])
    )


def globs(numbers: Collection[int]) -> list[str]:
    """Few globs that match `numbers` and no other numbers."""
    texts = sorted(map(str, numbers), key=lambda text: (len(text), text))
    return [glob for length in dict.fromkeys(map(len, texts)) for glob in _of_one_length([text for text in texts if len(text) == length])]


def _of_one_length(texts: Sequence[str]) -> list[str]:
    """Globs for numbers of equal length; first digits with the same remainders share one."""
    if not texts[0]:
        return [""]
    following: dict[str, list[str]] = {}
    for text in texts:
        following.setdefault(text[0], []).append(text[1:])
    firsts: dict[tuple[str, ...], list[str]] = {}
    for digit, rest in following.items():
        firsts.setdefault(tuple(rest), []).append(digit)
    return [f"{_character_class(digits)}{glob}" for rest, digits in firsts.items() for glob in _of_one_length(rest)]


def _character_class(digits: Sequence[str]) -> str:
    """Glob of one of `digits`: `3`, `[35]`, `[2-5]`, `[2-57]`."""
    runs: list[str] = []
    for digit in digits:
        if runs and int(digit) == int(runs[-1][-1]) + 1:
            runs[-1] += digit
        else:
            runs.append(digit)
    said = "".join(run if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs)
    return said if said == digits[0] else f"[{said}]"
