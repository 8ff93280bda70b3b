"""Unexpected exceptions at the edge of a compilation phase: one error with the user's line, and what to do.

The line is found in the frames of the traceback: a graph node in a frame's locals is the value that was being processed.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch.fx import Node

from meshc.errors import CompilerFault, MeshcError, StateError
from meshc.frames import innermost
from meshc.frontend.sources import source_of
from meshc.frontend.trace_errors import RANDOMNESS, user_frame
from meshc.ir import Record

_LONGEST: Final = 300


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A context in which any exception but meshc's own becomes a CompilerFault that names the phase, with the original as its cause."""
    try:
        yield
    except MeshcError:
        raise
    except Exception as error:
        raise CompilerFault(_message(name, error)) from error


ON_ONE_DEVICE: Final[tuple[tuple[str, str], ...]] = (
    ("saved tensor hooks", (
        "leave torch.utils.checkpoint out where a transform of torch.func meets it: a program's plan says what is kept for backward, and "
        "what is computed again"
    )),
    ("scaled_dot_product", (
        "call the model under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), whose attention has derivatives of any order"
    )),
    ("randomness error mode", RANDOMNESS),
    ("", "call the model itself with these inputs, and mend what it raises"),
)  # fmt: skip
"""(part of the text of an error that the model itself raises, what to do)."""


@contextmanager
def on_one_device() -> Iterator[None]:
    """A context for calls of the model that a program is compared with: a RuntimeError becomes a StateError with the user's line."""
    try:
        yield
    except RuntimeError as error:
        source = innermost(traceback.extract_tb(error.__traceback__))
        where = f"\n  in your model: {source} `{source.code}`" if source is not None else ""
        raise StateError(
            f"the model itself, on one device, raises {type(error).__name__}: {_short(error)}{where}\n"
            "  why: a program is compared with what the model gives there\n"
            f"  what to do: {next(advice for part, advice in ON_ONE_DEVICE if part in str(error))}"
        ) from error


def _short(error: Exception) -> str:
    """The first line of an error's text."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def _message(name: str, error: Exception) -> str:
    text = _short(error)
    short = f"{type(error).__name__}: {text}" if text else type(error).__name__
    value, source = _worked_on(error)
    of = f" at {value}" if value else ""
    where = f"\n  in your model: {source}" if source else ""
    return (
        f"compiling failed in {name}{of}: {short}{where}\n"
        "  why: this is a fault in meshc, or a limit that it does not say clearly enough\n"
        "  what to do: write that line in another way, or try a mesh or a plan with fewer axes; and please report it, with this message, "
        "its trace and a few lines that show it"
    )


def _worked_on(error: BaseException) -> tuple[str, str]:
    """The value that was being processed and its line in the user's model, each "" if unknown."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = (value for held in reversed(frames) for value in (held.get("node"), held.get("self"), *held.values()))
    node = next((node for value in values if (node := _node_of(value)) is not None), None)
    if node is None:
        return "", user_frame(str(error))
    kept = node.meta.get("meshc")
    record = kept[0] if isinstance(kept, list | tuple) and kept else kept
    source = record.source if isinstance(record, Record) and record.source.file else source_of(node)
    return node.name, str(source) if source.file else ""


def _node_of(value: object) -> Node | None:
    if isinstance(value, Node):
        return value
    inner = getattr(value, "node", None) if type(value).__module__.startswith("meshc.") else None
    return inner if isinstance(inner, Node) else None
