"""`meshc.verify`: report of all ranks, simulated in one process, compared with the model on one device; VerifyError if values are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph

from meshc.api.compile_arguments import Arguments
from meshc.cost.flops import is_product
from meshc.errors import CaptureError, CompileError, InputError, VerifyError, join_names
from meshc.frontend import call_keys
from meshc.frontend.expert_bias import count_choices
from meshc.frontend.loss_scaling import SCALE as LOSS_SCALE
from meshc.frontend.loss_scaling import copy_scaler
from meshc.frontend.module_watch import ModuleWatch
from meshc.frontend.one_device import one_device
from meshc.ir import op_name, operands, records, trees
from meshc.ir.keys import key_of
from meshc.ir.mesh import Mesh
from meshc.ops import block_codes
from meshc.ops.random import seed_step
from meshc.ops.state_rounding import round_state
from meshc.optimizer.optimizer import Optimizers, describe, numbers, parameters_of
from meshc.optimizer.slots import fresh_copy
from meshc.optimizer.spec import CODES, SCALE, OptimizerSpec
from meshc.passes.driver.compile_program import compile_program, trace
from meshc.passes.phases.choices import NamedChoices
from meshc.passes.phases.factors import Factors
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.request import Request
from meshc.program import instance
from meshc.program.microbatch_split import MicrobatchSplit
from meshc.program.program import PlainProgram, Port
from meshc.rules.rule import dtype_of
from meshc.runtime.failure.failed_rank import announce
from meshc.runtime.simulator import reference_comparison as verification
from meshc.runtime.simulator.first_wrong_value import first_wrong
from meshc.runtime.simulator.plain_copy import plain_copy, widen_inputs
from meshc.runtime.simulator.reference_compression import CompressedGradients
from meshc.runtime.simulator.reference_dtypes import ReferenceDtypes
from meshc.runtime.simulator.reference_masks import ReferenceMasks
from meshc.runtime.simulator.reference_model import Reference
from meshc.runtime.simulator.reference_stages import RoundedStages
from meshc.runtime.state.ownership import calls_allowed

if TYPE_CHECKING:
    from meshc.api.handle import Program

ROUNDED: Final = (
    "the update, by gradients that are compressed: in less than double precision the order of a sum decides how an element is rounded\n"
    "  what to do: program.prove(), or verify a float32 copy of a model in 16 bits, whose arithmetic is double there"
)

SCALES: Final = ("meshc.block_scale", "meshc.peak_of", "meshc.scale_of_history", "meshc.next_history")
"""Operators whose results are float32 whatever the model computes in."""

Inputs: TypeAlias = Mapping[str, object] | Sequence[object] | None


def verify(program: Program, inputs: Inputs = None, dtype: torch.dtype | None = None) -> verification.Report:
    """Simulate all ranks in this process and compare with the model itself on one device.

    inputs   keyword inputs of one call (a mapping), or positional ones (a sequence), whole; default: random ones of the compiled shapes
    dtype    torch.float64 captures a float64 copy under the same plan, and compares what each of three steps leaves behind; a model that
             has no such copy, since it makes float32 tensors by itself, is compared in float32, and the report's `single` says why.
             The default under precision, compress and sparse lines: roundings of float32 decide what an 8-bit number is rounded to, and
             which of two weights is larger, by which results differ. A model that rounds to 8 bits itself is compared in float32, too,
             within what such a rounding may move

    A step's outputs, gradients and buffers are compared, the losses of three steps, and what the first leaves behind: the optimizer's
    state, the gradient norm, with SGD the update of each parameter. In float64 that, and the parameters, after all three.

    Under a process group every rank calls it: weights are gathered, rank 0 computes while the others wait, and all return the same report
    or raise the same error. Raises VerifyError that names the first value that is wrong.
    """
    announce()
    if dtype not in (None, torch.float32, torch.float64):
        raise InputError(f"verify(dtype={dtype}): use torch.float64, or leave it out")
    if dtype is None and _changes_numbers(program):
        dtype = torch.float64
    store, world = program.compilations.store, program.world
    if store is None:
        return _verify(program, None, _call_inputs(inputs, program), dtype == torch.float64)
    with program.guarded("verify"):
        text = "none" if inputs is None else call_keys.describe_inputs(*_as_arguments(inputs))
        world.agree("verify", {"what they verify": f"inputs {text}; dtype {dtype}"})
        with world.refusable():
            store.refuse_unfilled()
        call = _plain(_call_inputs(inputs, program))
        values = store.state_dict(full=True).get("model")

        def work() -> dict[str, object]:
            report = _verify(program, values, call, dtype == torch.float64)
            moved = [(kind, name, value) for (kind, name), value in report.moved.items()]
            told = {name: getattr(report, name) for name in ("tolerance", "amplified", "single", "left_out")}
            return {**told, "rows": report.rows, "moved": moved}

        found = world.from_rank_0(work)
    rows = [(kind, name, error) for kind, name, error in found["rows"]]
    moved = {(kind, name): moved for kind, name, moved in found["moved"]}
    return verification.Report(found["tolerance"], found["amplified"], rows, moved, single=found["single"], left_out=found["left_out"])


def _as_arguments(inputs: Mapping[str, object] | Sequence[object]) -> Arguments:
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def _plain(inputs: Arguments) -> Arguments:
    """The inputs with DTensors gathered and all tensors on the host. All ranks call it."""

    def plain(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
            return leaf
        whole = leaf.full_tensor().detach() if isinstance(leaf, DTensor) else leaf.detach()
        return whole.cpu().requires_grad_(leaf.requires_grad)

    found: Arguments = trees.map_leaves(plain, inputs)
    return found


def _verify(program: Program, values: Mapping[str, torch.Tensor] | None, call: Arguments, double: bool) -> verification.Report:
    """The work, on one rank. `values` are whole parameters and buffers by name, None if the module has its own."""
    with _as_compiled(program.compilations.last.made.request.autocast):
        rounded = [*dict.fromkeys(_rounds_itself(program.lowered.placed.factors))] if double else []
        if rounded:
            report = _verify_there(program, values, call, False, [])
            report.single = f"the model rounds to 8 bits itself, by scales that are float32 in any case: {join_names(rounded, 3)}"
            return report
        if not double:
            return _verify_there(program, values, call, False, [])
        singles: list[str] = []
        try:
            return _verify_there(program, values, call, True, singles)
        except (CaptureError, CompileError) as error:
            why = " ".join(line.strip() for line in str(error).splitlines()[:2])
        except VerifyError:
            if not singles:
                raise
            why = f"the model computes in float32 in its copy in double precision too: {join_names(singles, 3)}"
        report = _verify_there(program, values, call, False, [])
        report.single = why
        return report


@contextmanager
def _as_compiled(autocast: Sequence[tuple[str, torch.dtype]]) -> Iterator[None]:
    """The autocast regions that were around the compilation, whatever is around the caller."""
    regions = dict(autocast)
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, dtype=regions.get(device), enabled=device in regions))
        yield


class Twins:
    """What a request is compiled to for a comparison: without its optimizer, and, when that is asked for, with one. Both are of one trace.

    key      what it was compiled from, to be compared with `same`
    singles  lines of the model that compute in single precision
    """

    def __init__(self, key: tuple[object, ...], request: Request) -> None:
        self.key = key
        self._traced = trace(request) if request.train else None
        self.plain, lowered = compile_program(request, traced=self._traced)
        self.graph = lowered.joint.graph
        self.singles = [*dict.fromkeys(_in_single(lowered.placed.factors))]
        self._updating: PlainProgram | None = None

    def same(self, key: tuple[object, ...]) -> bool:
        return self.key[0] is key[0] and self.key[1:] == key[1:]

    def updating(self, spec: OptimizerSpec) -> PlainProgram:
        if self._updating is None:
            assert self._traced is not None
            self._updating, _ = compile_program(replace(self._traced.request, optimizer=spec), traced=self._traced)
            self._traced = None
        return self._updating


_OPEN: Final[WeakKeyDictionary[Program, Twins]] = WeakKeyDictionary()
"""Of programs of open sizes, which are verified at several, what they were compared by last."""


def reference_of(program: Program, values: Mapping[str, torch.Tensor] | None, call: Arguments, double: bool) -> Reference:
    """A copy of the model on one device, with these values and inputs, for a program of it to be compared with."""
    store, module, lowered = program.compilations.store, program.asked.module, program.lowered
    with calls_allowed(module):
        twin = plain_copy(module, values, double)
    args, kwargs = widen_inputs(call, double)
    function = one_device(program.asked.function(kwargs), program.options.experts.limit)
    of_python, seed = program.compilations.last.reads.numbers(), store.seed if store else 0
    scaling = None if program.step is None else program.step.scaling
    scaler = torch.amp.GradScaler("cpu", enabled=False) if scaling is None else copy_scaler(scaling)
    if scaling is not None:
        of_python = {**of_python, LOSS_SCALE: 1.0}
    lines = {name: weight.line for name, weight in lowered.placed.traced.sparsity.items()}
    computes = lowered.plan.computes
    eight_bits = any(True for _ in _rounds_itself(lowered.placed.factors))
    return Reference(
        twin, function, args, kwargs, seed, double, lowered.parts, None, lowered.request.hooks, of_python, lowered.placed.traced.precision,
        ReferenceMasks(twin, lines) if lines else None, _compressions(program), eight_bits, _rounded_stages(program, twin),
        ReferenceDtypes(twin, computes) if computes else None, scaler,
    )  # fmt: skip


def _compressions(program: Program) -> CompressedGradients | None:
    """What the plan's compress line makes of gradients, on one device."""
    found = program.lowered.placed.traced.compressed
    if not found:
        return None
    rows = {name: [(cut.lead, cut.parts, cut.rest) for cut in one.cut] for name, one in found.items()}
    return CompressedGradients({name: one.format for name, one in found.items()}, rows)


def _rounded_stages(program: Program, twin: nn.Module) -> RoundedStages | None:
    """What the plan's compress line makes of values that cross stages, on one device."""
    lines, splits = program.lowered.plan.stage_compressions, program.lowered.request.options.pipeline.splits
    return RoundedStages(twin, splits or (), lines[0].format) if lines else None


def _changes_numbers(program: Program) -> bool:
    """Whether the plan has lines that change what is computed."""
    traced = program.lowered.placed.traced
    return bool(traced.precision or traced.sparsity or traced.compressed or traced.plan.stage_compressions)


def _verify_there(
    program: Program, values: Mapping[str, torch.Tensor] | None, call: Arguments, double: bool, singles: list[str]
) -> verification.Report:
    """`singles` gets the lines of the model that compute in single precision all the same."""
    ask, reference = program.lowered.request, reference_of(program, values, call, double)
    twin, inputs = reference.module, (reference.args, reference.kwargs)
    computed = {p.dtype for p in twin.parameters()} | _arithmetic_dtypes(program.lowered.placed.factors)
    least = verification.FEW_BITS if (_changes_numbers(program) or reference.eight_bits) and not double else 0.0
    report = verification.Report(max(verification.tolerance_of(computed, double), least))
    mesh = Mesh.from_axes(program.mesh.axes, device="cpu", ranks=program.mesh.ranks)
    shapes = dict(program.asked.shapes(inputs))
    examples = (ask.args, dict(ask.kwargs)) if program.general.dynamic else inputs
    base: dict[str, Any] = dict(
        module=twin, mesh=mesh, double=double, fixed={}, inputs="global", outputs="plain", **_compiler_choices(program),
        **({"optimizer": None} if program.step is not None else {"grad": ask.grad}),
    )  # fmt: skip
    with torch.set_grad_enabled(ask.grad):
        request = program.compilations.request(examples, **base)
        stepping = program.step.optimizers if program.step else None
        held = program.asked.context_key(ModuleWatch(twin).state(), program.compilations.spec, stepping)
        key, again = (program.general, double, held), _OPEN.get(program)
        if again is None or not again.same(key):
            again = Twins(key, request)
            if program.general.dynamic:
                _OPEN[program] = again
        singles.extend(again.singles)
        plain = instance.program_for_shapes(again.plain, shapes)
        compare = verification.compare_module if program.step is None else verification.compare_gradients
        verification.run_comparison(report, reference, partial(compare, plain))
        _raise_if_wrong(report, plain, instance.graph_at(again.graph, again.plain, shapes), program.lowered.parts, reference)
        if reference.compressed is not None and report.tolerance > verification.TOLERANCE[torch.float64]:
            report.left_out = ROUNDED
        elif program.step is not None:

            def update(reference: Reference, report: verification.Report) -> None:
                verify_update(program, again.updating, shapes, twin, reference, report, double)

            verification.run_comparison(report, reference, update)
    if not report.ok:
        raise VerifyError(f"the program does not mean what the model means:\n{report}")
    return report


def _compiler_choices(program: Program) -> dict[str, object]:
    """What the compiler has chosen, of axes left open and of a pipeline; it might choose otherwise for float64, and for a CPU."""
    choices, pipeline = program.lowered.placed.choices, program.general.pipeline
    asked = program.lowered.request
    found: dict[str, object] = {"plan": asked.plan, "numbers": asked.numbers, **_chunks(program.lowered)}
    if choices is not None:
        found["searched"] = NamedChoices.of(choices)
    if pipeline is None:
        return found
    schedule = program.options.pipeline.schedule or pipeline.schedule.name
    return dict(**found, schedule=schedule, microbatches=program.general.microbatches, gather_once=program.lowered.request.gather_once)


def _chunks(lowered: LoweredProgram) -> dict[str, object]:
    """Option `chunks` with the number of chunks of the head, if chosen for a memory budget."""
    if lowered.request.options.budget is None or lowered.plan.chunks:
        return {}
    return {"chunks": 1 if lowered.placed.chunked is None else lowered.placed.chunked.count}


def _arithmetic_dtypes(factors: Factors) -> set[torch.dtype]:
    """The dtypes of arithmetic operators; casts and changes of layout do not count."""
    instances = factors.instances.values()
    return {r.dtype for instance in instances if instance.rule.kind != "layout" for r in records(instance.node) if r.dtype is not None}


def _in_single(factors: Factors) -> Iterator[str]:
    for node, found in factors.instances.items():
        single = any(one.dtype == torch.float32 for one in records(node))
        if single and found.rule.kind != "layout" and op_name(node) not in SCALES:
            yield f"{op_name(node)} at {records(node)[0].source or 'the model itself'}"


def _rounds_itself(factors: Factors) -> Iterator[str]:
    """The lines of a model, not of the plan, that round values to 8-bit floats."""
    for node in factors.instances:
        eight = [one.dtype is not None and one.dtype.is_floating_point and one.dtype.itemsize == 1 for one in records(node)]
        given = {dtype_of(operand) for operand in operands(node)}
        rounds = any(dtype.itemsize > 1 for dtype in given) or is_product(node)
        if any(eight) and rounds and getattr(node.target, "namespace", "") != "meshc":
            yield f"{op_name(node)} at {records(node)[0].source or 'the model itself'}"


def _raise_if_wrong(
    report: verification.Report, compiled: PlainProgram, graph: Graph, parts: MicrobatchSplit | None, reference: Reference
) -> None:
    if report.ok:
        return
    values = verification.input_values(compiled, reference, 0)
    values.update({p.key: torch.ones(p.shape, dtype=p.dtype) for p in compiled.inputs if p.kind == "tangent"})
    first = first_wrong(compiled, graph, values, report.tolerance * 10, parts)
    raise VerifyError(f"the program does not mean what the model means; the first wrong value is {first or 'not found'}\n{report}")


def verify_update(
    program: Program,
    compiled_for: Callable[[OptimizerSpec], PlainProgram],
    shapes: Mapping[str, Sequence[int]],
    twin: nn.Module,
    reference: Reference,
    report: verification.Report,
    double: bool,
) -> None:
    """Some steps with a copy of the user's optimizer, of what is compiled for it, for inputs of these shapes."""
    assert program.step is not None
    names = {id(p): name for name, p in program.asked.module.named_parameters()}
    mine = dict(twin.named_parameters())
    original = program.step.optimizers
    theirs = {id(p): mine[names[id(p)]] if id(p) in names else nn.Parameter(p.detach().clone()) for p in parameters_of([original])}
    optimizer = Optimizers(tuple(fresh_copy(member, theirs) for member in original.members))
    for group in optimizer.param_groups:  # rates that are tensors: the optimizer rounds to their dtype
        group.update(widen_inputs({name: value for name, value in group.items() if name != "params"}, double))
    spec = describe(optimizer, program.asked.options.training)
    compiled = instance.program_for_shapes(compiled_for(spec), shapes)
    updated = {id(p) for group in spec.groups for p in group.params}
    slots = {f"{name}/{slot.name}": slot for name, p in mine.items() if id(p) in updated for slot in spec.slots_of(p)}

    def state(port: Port) -> torch.Tensor:
        slot = slots.get(port.name)
        return torch.zeros(port.shape, dtype=port.dtype) if slot is None else slot.initial(mine[port.of].detach())

    def keep(step: int) -> None:
        """State in fewer bits: rounded by the draws that the program rounds it by."""
        held = {id(p): state for member in optimizer.members for p, state in member.state.items()}
        for name, slot in slots.items():
            parameter, draw = name.removesuffix(f"/{slot.name}"), seed_step(reference.seed, step)
            value = None if slot.computed is None else held.get(id(mine[parameter]), {}).get(slot.plain)
            if value is not None and slot.part == CODES:
                made = block_codes.encode_by_draw(value, slot.signed, draw, f"{parameter}/{slot.plain}")
                value.copy_(block_codes.decode(*made, slot.signed, value.dtype))
            elif value is not None and not slot.part:
                value.copy_(round_state(value.to(torch.float32), draw, name))

    def widen_state(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Decoded state of the slots that are stored as 8-bit codes, by name."""
        values: dict[str, torch.Tensor] = {}
        for name, slot in slots.items():
            codes, plain = key_of("state", name), key_of("state", name.removesuffix(CODES))
            if slot.part == CODES and codes in found:
                values[plain] = block_codes.decode(found[codes], found[plain + SCALE], slot.signed, slot.computed or torch.float32)
        return values

    # an update turns roundings of a 16-bit gradient into whole steps of Adam, so later losses differ by percents
    steps = 1 if report.tolerance > verification.TOLERANCE[torch.float32] else 3
    with count_choices(twin, program.options.experts.bias_update) as counts:

        def after(step: int) -> None:
            keep(step)
            if counts is not None:
                counts.update()

        verification.compare_steps(
            compiled,
            reference,
            optimizer,
            state,
            lambda: numbers(optimizer),
            program.step.clip_grad_norm,
            report,
            keep=after,
            widened=widen_state,
            steps=steps,
            parameters=double,
            clip_value=program.step.clip_grad_value,
        )


def _call_inputs(inputs: Inputs, program: Program) -> Arguments:
    if inputs is not None:
        return program.asked.by_name(_as_arguments(inputs))
    generator = torch.Generator().manual_seed(0)

    def random(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).requires_grad_(leaf.requires_grad)
        return torch.randint(0, 2, tuple(leaf.shape), generator=generator, dtype=torch.int64).to(leaf.dtype)

    ask = program.compilations.last.made.request
    return trees.map_leaves(random, (ask.args, dict(ask.kwargs)))
