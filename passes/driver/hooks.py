"""Hooks after each pass of a compilation, as the environment requests: a log, a dump, a verification."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import torch
from torch.fx import Graph, GraphModule

from meshc import environment
from meshc.errors import VerifyError
from meshc.frontend.capture import TorchGraph
from meshc.ir import spmd
from meshc.passes.driver.compile_program import compile_program, whole_view
from meshc.passes.dump import dumper
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.pipeline import GROW, PRECISION, SPARSITY, UPDATE
from meshc.program.microbatch_split import MicrobatchSplit
from meshc.program.program import PlainProgram, Port
from meshc.proof.outcome import ProgramProof
from meshc.proof.program_proof import prove
from meshc.text.printer import print_program, print_stage

_dumped: Final[Counter[Path]] = Counter()
"""Compilations of this process dumped so far, by folder."""


class Checker(Protocol):
    """Check of a program under construction against the first graph of its operators. Raises if the program no longer means the same."""

    def begin_again(self) -> None:
        """From here on another program is checked: the whole model, after the one of a few of its layers."""

    def check_calls(self, name: str, model: TorchGraph, device: str) -> None:
        """Checks the graph of torch's calls that the pass `name` has left. `device`: type of the mesh's devices."""

    def check_graph(
        self, name: str, graph: Graph, inputs: Sequence[Port], outputs: Sequence[Port], constants: Mapping[str, torch.Tensor]
    ) -> None:
        """Checks the global view that the pass `name` has left."""

    def check_program(self, name: str, program: PlainProgram, parts: MicrobatchSplit | None) -> None:
        """Checks the program of each rank, as far as it is lowered after the pass `name`."""


def hook(checker: Checker) -> Hook | None:
    """The hook for the passes of one compilation, as the environment requests; None if it requests nothing."""
    wanted: list[Hook] = []
    level, folder = environment.log_level(), environment.dump_folder()
    if level:
        wanted.append(_logger(level))
    if folder is not None:
        wanted.append(dumper(_next_folder(folder)))
    if environment.verifying():
        wanted.append(_verifier(checker, environment.verifying() == "proof"))  # last, so that a refused program is on disk
    if not wanted:
        return None

    def call(name: str, phase: CompilationPhase) -> None:
        for one in wanted:
            one(name, phase)

    return call


def _next_folder(folder: Path) -> Path:
    """The folder itself for the first compilation of a process, `2`, `3`, ... inside it for the next ones."""
    key = folder.resolve()
    _dumped[key] += 1
    return folder if _dumped[key] == 1 else folder / str(_dumped[key])


def _verifier(checker: Checker, by_proof: bool) -> Hook:
    """Hook that checks the program after each pass that has changed it, so that an error names the right pass. With `by_proof` programs of
    ranks are proved; graphs are compared by their values in any case."""
    checked = ""

    def verify(name: str, phase: CompilationPhase) -> None:
        nonlocal checked
        if name == GROW.name and phase.depth is not None:
            _begin_whole(checker, phase)
        text = _run_by(phase)
        if text in ("", checked):
            return  # unchanged
        if name in (SPARSITY.name, PRECISION.name) or (name == UPDATE.name and phase.plan.sparsities):
            checker.begin_again()  # lines of the plan change what is computed
        try:
            if isinstance(phase, LoweredProgram) and by_proof:
                _refuse_unproved(phase)
            elif isinstance(phase, LoweredProgram):
                checker.check_program(name, phase.as_program(), phase.parts)
            elif isinstance(phase, PlacedModel | TracedModel) and (joint := phase.joint) is not None:
                checker.check_graph(name, joint.graph, joint.inputs, joint.outputs, joint.constants)
            elif isinstance(phase, TracedModel):
                checker.check_calls(name, phase.model, phase.mesh.device_type)
        except Exception as error:
            kind = "" if isinstance(error, VerifyError) else f"{type(error).__name__}: "
            raise VerifyError(f"after the pass {name} the program no longer means what the model means\n  {kind}{error}") from error
        checked = text

    return verify


def _refuse_unproved(phase: LoweredProgram) -> None:
    """Raises VerifyError where a program is not proved, as far as it is lowered."""
    proof = _proof(phase)
    if proof is not None and not proof.holds:
        raise VerifyError(f"{proof}\n  or: MESHC_VERIFY=values compares the numbers after each pass")


def _proof(phase: CompilationPhase) -> ProgramProof | None:
    """The proof that the program of each rank, as far as it is lowered, is the traced graph; None before there is one, and of a program in
    microbatches until these are stages with a schedule."""
    if not isinstance(phase, LoweredProgram):
        return None
    program, joint = phase.as_program(), phase.joint
    if not program.schedule and program.pipeline is None and program.microbatches > 1:
        return None
    return prove(replace(program, dynamic=phase.placed.traced.dynamic), joint.as_stage(), joint.constants)


class _FirstUnproved(Exception):
    """Ends a compilation behind the pass that its argument names."""


def first_unproved_pass(request: Request) -> str:
    """The pass behind which the program of a request is no longer proved, found by compiling it again; "" if none is."""

    def hook(name: str, phase: CompilationPhase) -> None:
        proof = _proof(phase)
        if proof is not None and not proof.holds:
            raise _FirstUnproved(name)

    try:
        compile_program(request, hook)
    except _FirstUnproved as found:
        return str(found)
    return ""


def _begin_whole(checker: Checker, phase: CompilationPhase) -> None:
    """Restarts `checker` at `grow` with the whole model, traced layer by layer, and compares the grown global view with it."""
    assert isinstance(phase, LoweredProgram)
    checker.begin_again()
    for name, joint in (("capture", whole_view(phase.request)), (GROW.name, phase.joint)):
        checker.check_graph(name, joint.graph, joint.inputs, joint.outputs, joint.constants)


def _run_by(phase: CompilationPhase) -> str:
    """The text of the program in `phase`: torch's calls, the graph of operators, or the stages and their schedule."""
    if isinstance(phase, LoweredProgram):
        return print_program(phase.as_program())
    if isinstance(phase, PlacedModel | TracedModel) and (joint := phase.joint) is not None:
        return print_stage(joint.as_stage("main"))
    if isinstance(phase, TracedModel):
        return "\n".join(str(body.graph) for body in phase.model.module.modules() if isinstance(body, GraphModule))
    return ""


def _logger(level: str) -> Hook:
    told = 0

    def log(name: str, phase: CompilationPhase) -> None:
        nonlocal told
        left = f", leaves {_size(phase)}" if level == "debug" else ""
        print(f"meshc: {name} {phase.seconds.get(name, 0.0):.2f} s{left}", file=sys.stderr)
        for note in phase.notes[told:]:
            print(f"meshc:   {note}", file=sys.stderr)
        told = len(phase.notes)

    return log


def _size(phase: CompilationPhase) -> str:
    if isinstance(phase, LoweredProgram):
        nodes = [node for stage in phase.stages.values() for node in stage.graph.nodes]
        count = sum(spmd.is_collective(node.target) for node in nodes)
        return f"{len(nodes)} values a rank in {len(phase.stages)} stages, {count} collectives"
    assert isinstance(phase, PlacedModel | TracedModel)
    traced = phase.traced if isinstance(phase, PlacedModel) else phase
    graph = phase.joint.graph if phase.joint is not None else traced.model.module.graph
    return f"{len(graph.nodes)} values"
