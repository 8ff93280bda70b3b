"""Run-time failures of operators of a loaded program, reported by file and line."""

from __future__ import annotations

from meshc.check.operators import first_line
from meshc.errors import ArtifactError
from meshc.program.program import Origin


def error_at_line(origin: Origin, name: str, error: Exception) -> ArtifactError:
    """ArtifactError with the file and line of the value `name`, which failed with `error`."""
    advice = "what to do: correct the inputs if the values at fault are theirs; otherwise compile and save the program again"
    return ArtifactError(f"{origin.fault(name, f'{name} could not be made: {first_line(error)}')}\n  {advice}")
