"""Record of the passes of a candidate, replayed to the hook if the candidate is taken."""

from __future__ import annotations

from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Hook


class PassHistory:
    """Passes that have run, each with the phase that it returned."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, CompilationPhase]] = []

    def hook(self, name: str, phase: CompilationPhase) -> None:
        self.steps.append((name, phase))

    def replay(self, hook: Hook | None) -> None:
        if hook is not None:
            for name, phase in self.steps:
                hook(name, phase)

    def copy(self) -> PassHistory:
        other = PassHistory()
        other.steps = list(self.steps)
        return other

    def before_pass(self, name: str) -> PassHistory:
        """The passes before the pass `name`; all if it has not run."""
        other = PassHistory()
        other.steps = self.steps[: next((at for at, (heard, _) in enumerate(self.steps) if heard == name), None)]
        return other
