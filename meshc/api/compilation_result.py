"""Result of one compilation on this rank, from own passes or data of rank 0; programs and results as bytes for other ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load, save

from meshc.errors import StateError
from meshc.frontend import dependencies, output_tree_data, read_places, read_values
from meshc.frontend.dependencies import Dependencies, ProcessValues
from meshc.frontend.output_tree import OutputTree
from meshc.frontend.read_places import ReadPlace
from meshc.frontend.read_values import Number
from meshc.ir.mesh import Mesh
from meshc.lazy_module import LazyModule
from meshc.optimizer.optimizer import OptimizerSpec
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.request import Request
from meshc.pipelining.pipeline_candidate import PipelineCandidate
from meshc.plan.plan_candidate import PlanCandidate
from meshc.program.program import PlainProgram, TracedGraph
from meshc.runtime.state.ownership import calls_allowed
from meshc.text import libraries, printer, program_description

if TYPE_CHECKING:
    from meshc.passes.depth import multiplicity
    from meshc.passes.driver import compile_program as driver
else:
    driver, multiplicity = LazyModule("meshc.passes.driver.compile_program"), LazyModule("meshc.passes.depth.multiplicity")

_LENGTH_BYTES: Final = 8


@dataclass(frozen=True)
class CompilationResult:
    """
    program  the program; with dynamic sizes what serves them all
    request  the request of the passes
    tree     the structure of the outputs
    tried    what was searched for a pipeline
    weighed  plans that were compared for axes that were left open
    seconds  by pass; of rank 0's, if the program is rank 0's
    reads    what of Python the program was made of, beside inputs and the model's tensors
    numbers  what of Python are inputs of it;  kept_fixed  why those that were to be are none
    compared  where ranks have looked whether they would have made the same
    lowered  result of the passes; None if they have not run here
    given    whether rank 0's program, whoever has it, is what all ranks run (`meshc.api.shared_compilation`)
    """

    program: PlainProgram
    request: Request
    tree: OutputTree
    tried: tuple[PipelineCandidate, ...] = ()
    weighed: tuple[PlanCandidate, ...] = ()
    seconds: Mapping[str, float] | None = None
    reads: tuple[ReadPlace, ...] = ()
    numbers: tuple[Number, ...] = ()
    kept_fixed: str = ""
    compared: tuple[ReadPlace, ...] = ()
    lowered: LoweredProgram | None = None
    given: bool = False

    @staticmethod
    def from_passes(program: PlainProgram, lowered: LoweredProgram) -> CompilationResult:
        """The result of this rank's own passes."""
        reads = multiplicity.whole_places(lowered.depth, lowered.request.module, lowered.model.reads)
        tree, seconds = lowered.model.output_tree, dict(lowered.seconds)
        numbers = tuple(lowered.model.numbers.values())
        return CompilationResult(program, lowered.request, tree, lowered.tried, lowered.weighed, seconds, reads, numbers, lowered=lowered)

    @staticmethod
    def from_data(program: PlainProgram, request: Request, told: Mapping[str, Any], seconds: Mapping[str, float]) -> CompilationResult:
        """The result of another process's passes; `told`: its `extra_data()`. Raises NotPlainData for what this process does not have."""
        tried = tuple(PipelineCandidate(**{**row, "cuts": tuple(row["cuts"])}) for row in told["tried"])
        weighed = tuple(PlanCandidate(**row) for row in told["weighed"])
        reads, numbers = read_places.places_from_json(told["reads"]), read_values.numbers_from_json(told["numbers"])
        program, tree = _adopt_program(program, request.mesh), output_tree_data.tree_from_json(told["tree"])
        return CompilationResult(program, request, tree, tried, weighed, seconds, reads, numbers, told["kept_fixed"])

    def extra_data(self) -> dict[str, object]:
        """All of the result but program and request, as data for JSON."""
        return {
            "tree": output_tree_data.tree_to_json(self.tree), "tried": [asdict(each) for each in self.tried],
            "weighed": [asdict(each) for each in self.weighed], "reads": read_places.places_to_json(self.reads),
            "numbers": read_values.numbers_to_json(self.numbers), "kept_fixed": self.kept_fixed,
        }  # fmt: skip

    def with_traced_graph(self, program: PlainProgram) -> PlainProgram:
        """The program with the graph that the passes made it of, for who writes it; without one where they have not run here."""
        lowered = self.lowered
        return program if lowered is None else replace(program, traced=TracedGraph(lambda: lowered.joint.as_stage()))

    def dependencies(self) -> Dependencies:
        """Python values and code that the program depends on. The passes must have run on this rank."""
        assert self.lowered is not None
        seen, inputs = self.lowered.model.seen, {one.place for one in self.numbers}
        read = multiplicity.whole_places(self.lowered.depth, self.request.module, seen.places)
        return dependencies.trace_dependencies(read, inputs, seen.code, seen.without_place, process_values(self.request))

    def compared_values(self) -> dict[str, str]:
        """Values of this rank's Python that ranks have compared, as readable text."""
        return process_values(self.request).texts(self.compared)

    def with_adopted_optimizer(self, optimizer: OptimizerSpec | None) -> CompilationResult:
        """The same for what an optimizer has become when it was adopted."""
        lowered = None if self.lowered is None else self.lowered.with_optimizer(optimizer)
        return replace(self, request=replace(self.request, optimizer=optimizer), lowered=lowered)

    def lower_here(self) -> LoweredProgram:
        """What the passes leave of it, for who looks into it on a rank where they have not run: that takes a compilation. Raises
        StateError if the model has become another."""
        return self.compile_here()[1]

    def compile_here(self) -> tuple[PlainProgram, LoweredProgram]:
        """The program as passes of this rank give it, with what they leave of it. Raises StateError likewise."""
        if self.lowered is not None:
            return self.program, self.lowered
        with calls_allowed(self.request.module), torch.set_grad_enabled(self.request.grad):
            program, lowered = driver.compile_program(self.request)
        if printer.hash_program(program) != printer.hash_program(self.program):
            raise StateError(
                "this rank has its program from rank 0, and compiling it here for a look inside gives another one\n"
                "  why: the model, or what its forward reads, has changed since\n"
                "  what to do: look at it on rank 0 (program.lowered, factors, dump), or right after meshc.compile"
            )
        return program, lowered


def process_values(request: Request) -> ProcessValues:
    """This process's values at the Python places of a request."""
    return ProcessValues(request.module, request.function, request.args, request.kwargs)


def pack_program(program: PlainProgram, **more: object) -> bytes:
    """A program, and the JSON values `more`, as bytes. Raises ArtifactError for a program that has no text."""
    head = {"program": program_description.describe_program(program), "texts": program_description.texts(program, comments=False), **more}
    text = json.dumps(head).encode()
    constants = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in program.constants.items()}
    return len(text).to_bytes(_LENGTH_BYTES, "big") + text + save(constants)


def unpack_program(data: bytes, mesh: Mesh) -> tuple[PlainProgram, dict[str, Any]]:
    """The program, on this mesh unless axes of it are taken apart, and the rest. Raises ArtifactError for an operator that this process
    does not have."""
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    head = json.loads(data[_LENGTH_BYTES:begin])
    with libraries.trust_libraries():
        program = program_description.read_description(
            head["program"], lambda name: (head["texts"][name], f"rank 0's {name}"), lambda: load(data[begin:]), "rank 0's program"
        )
    return _adopt_program(program, mesh), head


def _adopt_program(program: PlainProgram, mesh: Mesh) -> PlainProgram:
    """A program of another process as this one's, whose errors name lines of the model."""
    stages = {name: replace(stage, origin=None) for name, stage in program.stages.items()}
    return replace(program, stages=stages, mesh=mesh if program.mesh == mesh else program.mesh)
