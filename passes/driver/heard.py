"""Record of the passes of a candidate, replayed to the hook only for the candidate that is taken."""

from __future__ import annotations

from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Hook


class Heard:
    """Passes that have run, each with the phase that it left."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, CompilationPhase]] = []

    def hook(self, name: str, phase: CompilationPhase) -> None:
        self.steps.append((name, phase))

    def tell(self, hook: Hook | None) -> None:
        if hook is not None:
            for name, phase in self.steps:
                hook(name, phase)

    def copied(self) -> Heard:
        other = Heard()
        other.steps = list(self.steps)
        return other

    def before(self, name: str) -> Heard:
        """What was heard until a pass ran."""
        other = Heard()
        other.steps = self.steps[: next((at for at, (heard, _) in enumerate(self.steps) if heard == name), None)]
        return other
