"""Error classes of meshc, and formatting of lists in messages.

A message has four parts: the operator and value at fault, where that is in the user's model, why, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Raised = TypeVar("Raised", bound="MeshcError")


class MeshcError(Exception):
    """Base of all errors that meshc raises on purpose.

    everywhere  all ranks have raised it together, with nothing on its way between them: a run in which it is caught can go on
    """

    everywhere = False
    compared = False
    """Whether ranks have told each other already whether all raise it."""

    def mark_everywhere(self: Raised) -> Raised:
        """The error, which all ranks raise, since all have the same before them."""
        self.everywhere = True
        return self


class CaptureError(MeshcError):
    """The model could not be traced as one graph (data-dependent control flow, for instance)."""


class PlanError(MeshcError):
    """The mesh, the plan or the pins are wrong; the message lists every failure found."""


class CompileError(MeshcError):
    """A pass cannot go on; the message names the operator and the line of the user's model."""


class CompilerFault(CompileError):
    """A pass stopped where it should not: a fault in meshc, or a limit that nothing states. The cause is the original exception."""


class ScheduleError(MeshcError):
    """A pipeline schedule cannot be read or cannot run; the message names each instruction at fault, with its rank and place."""


class InputError(MeshcError):
    """Inputs at run time do not match the program (structure, shape, dtype, values out of range, or they differ between ranks).

    of_all  found in what every rank has, so that all are about to raise it
    """

    of_all = False


class ArtifactError(MeshcError):
    """A saved program is damaged, edited, or contains something that is not allowed."""


class FileError(MeshcError, OSError):
    """A file or folder could not be written (a full disk, for instance); what was there before is as it was."""


class StateError(MeshcError):
    """Parameters, optimizer or process group are not in the state that the call needs."""


class VerifyError(MeshcError):
    """A program does not mean what the model means; the message names the first wrong value."""


class DeadlockError(MeshcError):
    """Ranks wait for each other for ever, or take part in collectives that do not match."""


class PeerError(MeshcError):
    """Another rank failed first; the message is that rank's error."""


class RanksDifferError(PeerError, StateError):
    """Ranks have done otherwise than each other what all must do alike, which was found beside their calls: every rank raises it."""


def join_names(names: Sequence[str], most: int) -> str:
    """Names in a line, as messages have them: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def lines_of(faults: Sequence[str], most: int, indent: int = 4) -> str:
    """Faults a line each, indented behind the first; a last line says how many more there are."""
    return f"\n{' ' * indent}".join([*faults[:most], *[f"and {len(faults) - most} more"] * (len(faults) > most)])
