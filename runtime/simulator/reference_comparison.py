"""Verification of a program on simulated ranks against the model on one device: each tensor's error and bound, the first wrong value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from tabulate import tabulate

from meshc.errors import VerifyError
from meshc.frontend.clipping import Clip, clip_
from meshc.frontend.double_copy import double_by_default
from meshc.frontend.gradient_hooks import apply_hooks as run_hooks
from meshc.frontend.loss_scaling import SCALE, SKIPPED, copy_scaler
from meshc.ir import trees
from meshc.ir.keys import key_of, kind_of, name_of
from meshc.ops.random import seed_step
from meshc.optimizer.optimizer import AnyOptimizer, members_of
from meshc.program.program import PlainProgram, Port
from meshc.runtime.simulator import update_comparison
from meshc.runtime.simulator.plain_copy import ModelSnapshot
from meshc.runtime.simulator.reference_model import Reference
from meshc.runtime.simulator.sensitivity import MOST, RUNS, TIMES
from meshc.runtime.simulator.simulation import simulate
from meshc.runtime.simulator.tensor_error import FLOOR, error, peak_of

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # by the dtype that is computed in
LOW = {dtype for dtype in TOLERANCE if dtype.itemsize < 4}
FEW_BITS = 2e-2
"""Where values are rounded to 8 bits, unless all is in float64: what is one rounding of float32 apart may be 1/16 apart after that."""
NORM = key_of("metric", "grad_norm")
MOST_OF_FEW_BITS = 0.25
"""Error that no sensitivity explains in any case: values of 8 bits have steps of 1/8 or 1/4, and a sum that lacks a part is off by more."""
AMPLIFIED = 100
"""Factor on the bound for parameters not updated by SGD: Adam divides a gradient by its own size plus eps, so the rounding of a gradient
that is zero in exact arithmetic (a key's bias) is multiplied by lr / eps."""
SQUARED = 10  # likewise for optimizer state: a second moment is a gradient's square


def tolerance_of(dtypes: Iterable[torch.dtype | None], double: bool) -> float:
    """The bound for a model that computes in `dtypes`: that of the lowest precision among them."""
    return max((TOLERANCE[dtype] for dtype in dtypes if dtype in LOW), default=TOLERANCE[torch.float64 if double else torch.float32])


@dataclass
class Report:
    """Largest error per tensor, in the order compared. Bounds are `tolerance`, for updated parameters `amplified` times that.

    moved   by kind and name, movement of the model's own result on one device under roundings; measured if a usual bound was exceeded
    single  why float32 was used for a comparison requested in float64
    left_out what was not compared, and why
    """

    tolerance: float
    amplified: float = AMPLIFIED
    rows: list[tuple[str, str, float]] = field(default_factory=list)
    moved: dict[tuple[str, str], float] = field(default_factory=dict)
    single: str = ""
    left_out: str = ""
    wanted: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    played: list[dict[str, torch.Tensor]] = field(default_factory=list, repr=False, compare=False)

    def simulate_program(self, program: PlainProgram, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The program's results for these values; kept while a comparison runs."""
        self.played.append(simulate(program, values))
        return self.played[-1]

    @property
    def worst(self) -> float:
        return max((error if error == error else float("inf") for _, _, error in self.rows), default=0.0)

    @property
    def ok(self) -> bool:
        return all(error <= self.error_bound(kind, name) for kind, name, error in self.rows)

    def error_bound(self, kind: str, name: str = "") -> float:
        """The bound for a tensor: the usual one of its kind, or TIMES the movement of the model's own result, limited by MOST."""
        usual = self.tolerance * (self.amplified if kind.startswith("parameter") else SQUARED if kind.startswith("state") else 1)
        explained = TIMES * self.moved.get((kind, name), 0.0)
        return max(usual, explained if _follows(kind) else min(explained, MOST * self.tolerance, MOST_OF_FEW_BITS))

    def add(self, kind: str, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
        """Compares tensors of one kind, under one floor. Raises VerifyError if their names differ."""
        if set(found) != set(wanted):
            extra, missing = sorted(set(found) - set(wanted)), sorted(set(wanted) - set(found))
            raise VerifyError(f"{kind}: the program gives {extra} beyond the model, and lacks {missing}")
        largest = max((peak_of(value) for value in wanted.values()), default=0.0)
        for name, value in wanted.items():
            self.rows.append((kind, name, error(found[name], value, FLOOR * largest)))
            self.wanted[kind, name] = value.detach().clone()

    def __str__(self) -> str:
        shown = sorted(self.rows, key=lambda row: -row[2])[:12]
        heads = ("kind", "tensor", "error", "one device moves", "allowed")[: 5 if self.moved else 3]
        cells = [
            (kind, name, f"{value:.2e}", f"{self.moved.get((kind, name), 0.0):.1e}", f"{self.error_bound(kind, name):.1e}")[: len(heads)]
            for kind, name, value in shown
        ]
        first = f"{len(self.rows)} tensors compared, largest error {self.worst:.2e} (allowed {self.tolerance:.0e})\n"
        first += f"compared in float32 and not in float64: {self.single}\n" if self.single else ""
        first += f"not compared: {self.left_out}\n" if self.left_out else ""
        return first + self._first_error_text() + self._sensitivity_text() + tabulate(cells, headers=heads)

    def _first_error_text(self) -> str:
        """Text of the first error over its bound: later ones may follow from it, and be larger."""
        wrong = [(kind, name, value) for kind, name, value in self.rows if not value <= self.error_bound(kind, name)]
        return f"the first that is too far off, by {wrong[0][2]:.2e}: {wrong[0][0]}, {wrong[0][1]}\n" if wrong else ""

    def _sensitivity_text(self) -> str:
        """Text on errors over the usual bound that the model's sensitivity explains."""
        over = [
            (kind, name) for kind, name, value in self.rows if value > self.error_bound(kind) and not value > self.error_bound(kind, name)
        ]
        lost = [key for key, moved in self.moved.items() if TIMES * moved > MOST * self.tolerance]
        text = ""
        if over:
            text += (
                f"{len(over)} are over the usual bound and within {TIMES} times what roundings alone move the model's own results on one "
                "device: the model is sensitive there, the program is not at fault\n"
            )
        if lost:
            wider = "verify(dtype=torch.float64), or " * (self.tolerance > TOLERANCE[torch.float64])
            text += f"{len(lost)} move so far on one device that a fault could hide there; what to do: {wider}larger batches\n"
        return text


def _follows(kind: str) -> bool:
    """Whether tensors of a kind depend on an update: updated parameters, losses, all of a step behind the first."""
    return kind.startswith(("loss of step", "parameter after step")) or re.search(r"step 0*[1-9]\d*$", kind) is not None


class SensitivityReport(Report):
    """A comparison of a perturbed run of the model with its first run; records the movement in the first report."""

    def __init__(self, first: Report) -> None:
        super().__init__(first.tolerance, first.amplified)
        self.first = first
        self._again = iter(first.played)

    def simulate_program(self, program: PlainProgram, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The program's results of the first run, which are not compared again."""
        return next(self._again)

    def add(self, kind: str, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
        first = {name: self.first.wanted[kind, name] for name in wanted}
        largest = max((peak_of(value) for value in first.values()), default=0.0)
        for name, value in wanted.items():
            self.first.moved[kind, name] = max(error(value, first[name], FLOOR * largest), self.first.moved.get((kind, name), 0.0))


def run_comparison(report: Report, reference: Reference, run: Callable[[Reference, Report], None]) -> None:
    """Runs a comparison; beyond the usual bounds, also measures how the model's own results move under roundings, in at most RUNS runs."""
    start = ModelSnapshot(reference.module)
    with double_by_default(reference.double):
        run(reference, report)
        if not report.ok and (report.tolerance <= TOLERANCE[torch.float32] or reference.eight_bits):
            after = ModelSnapshot(reference.module)
            _measure_sensitivity(start, reference, report, run)
            _restore(reference, after)
    report.played.clear()


def _measure_sensitivity(start: ModelSnapshot, reference: Reference, report: Report, run: Callable[[Reference, Report], None]) -> None:
    for seed in range(RUNS):
        _restore(reference, start)
        run(replace(reference, perturbed=seed), SensitivityReport(report))
        if report.ok:
            return


def _restore(reference: Reference, held: ModelSnapshot) -> None:
    for leaf in trees.leaves((reference.args, reference.kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.is_leaf:
            leaf.grad = None
    held.put_back()


def input_values(program: PlainProgram, reference: Reference, step: int) -> dict[str, torch.Tensor]:
    """Global values of parameters, buffers, inputs and the random seed, by key; state is zero."""
    parameters = dict(reference.module.named_parameters())
    buffers = dict(reference.module.named_buffers())
    inputs = reference.inputs(program)
    values: dict[str, torch.Tensor] = {}
    for port in program.inputs:
        if port.kind == "parameter":
            values[port.key] = parameters[port.name].detach()
        elif port.kind == "buffer":
            values[port.key] = buffers[port.name].detach().clone()
        elif port.kind == "input":
            values[port.key] = inputs[port.name].detach()
        elif port.kind == "random":
            values[port.key] = seed_step(reference.seed, step)
        elif port.kind == "state":
            values[port.key] = torch.zeros(port.shape, dtype=port.dtype)
        elif port.kind == "number" and port.name in reference.numbers:
            values[port.key] = torch.tensor(reference.numbers[port.name], dtype=torch.float64)
    return values


def compare_gradients(program: PlainProgram, reference: Reference, report: Report) -> None:
    """Compares the loss and gradients of a step program without an optimizer with the model's; a loss that is scaled has the scale 1."""
    reference = replace(reference, scaler=torch.amp.GradScaler("cpu", enabled=False))
    found = report.simulate_program(program, input_values(program, reference, 0))
    before = ModelSnapshot(reference.module)
    reference.module.zero_grad(set_to_none=True)
    reference.forget_steps()
    loss, metrics = reference.train(0)
    reference.refine_gradients()
    report.add("output", _kind(found, "output"), {program_output(program): loss})
    _compare_metrics(found, metrics, report)
    gradients = _gradients(reference)
    given = _kind(found, "gradient")
    given = {name: value for name, value in given.items() if name in gradients or bool(value.any())}
    report.add("gradient", given, {name: value for name, value in gradients.items() if name in given or bool(value.any())})
    _compare_buffers(found, reference, report)
    reference.module.zero_grad(set_to_none=True)
    before.put_back()


def _compare_buffers(found: Mapping[str, torch.Tensor], reference: Reference, report: Report, kind: str = "buffer") -> None:
    given = _kind(found, "buffer")
    mine = dict(reference.module.named_buffers())
    report.add(kind, given, {name: mine[name] for name in given})


def _compare_metrics(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], report: Report, when: str = "") -> None:
    """Compares metrics of the user's loss function, each under its own floor: they have no common size."""
    for name, value in wanted.items():
        report.add(f"metric{when}", {name: found[key_of("metric", name)]}, {name: value})


def program_output(program: PlainProgram) -> str:
    return next(port.name for port in program.outputs if port.kind == "output")


def _kind(values: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {name_of(key): value for key, value in values.items() if kind_of(key) == kind}


def compare_steps(
    program: PlainProgram,
    reference: Reference,
    optimizer: AnyOptimizer,
    state: Callable[[Port], torch.Tensor],
    numbers: Callable[[], list[dict[str, float]]],
    clip: Clip,
    report: Report,
    *,
    keep: Callable[[int], None] = lambda step: None,
    widened: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = lambda found: {},
    steps: int = 3,
    parameters: bool = False,
    clip_value: float | None = None,
) -> None:
    """Compares some steps: losses; after the first step also buffers, optimizer state, the gradient norm, and for SGD the updates of
    parameters, which mean little for other optimizers in single precision. With `parameters` (float64) all of these after each step.
    `keep(step)` does to the optimizers' state what the program does to its own after a step. `widened`: state that the program stores in 8
    bits, as optimizers have it, by key."""
    members, reference = members_of(optimizer), replace(reference, scaler=copy_scaler(reference.scaler))
    plain, scales = all(isinstance(member, torch.optim.SGD) for member in members), reference.scaler.is_enabled()
    if plain:
        report.amplified = 1
    reference.forget_steps()
    values = {**input_values(program, reference, 0), **{p.key: state(p) for p in program.inputs if p.kind == "state"}}
    for step in range(steps):
        values.update({p.key: seed_step(reference.seed, step) for p in program.inputs if p.kind == "random"})
        row = {key_of("number", f"{i}.{name}"): value for i, group in enumerate(numbers()) for name, value in group.items()}
        row[key_of("number", SCALE)] = reference.scaler.get_scale()
        values.update({p.key: torch.tensor(row[p.key], dtype=torch.float64) for p in program.inputs if p.key in row})
        found = report.simulate_program(program, values)
        reference.module.zero_grad(set_to_none=True)
        before = {name: value.clone() for name, value in _parameters(reference).items()} if plain else {}
        loss, metrics = reference.train(step)
        if reference.compressed is not None:
            reference.compressed.replace_gradients(reference.module)
        run_hooks(reference.module, reference.hooks, reference.seed, step)
        skipped = scales and not all(bool(gradient.isfinite().all()) for gradient in _gradients(reference).values())
        for member in members:
            reference.scaler.unscale_(member)
        reference.refine_gradients()
        norm = clip_(reference.module, clip, clip_value)
        for member in members:
            reference.scaler.step(member)
        reference.scaler.update()
        reference.end_step()
        keep(step)
        report.add(f"loss of step {step}", _kind(found, "output"), {program_output(program): loss})
        _compare_metrics(found, metrics, report, f" of step {step}")
        values.update({key: value for key, value in found.items() if kind_of(key) in ("parameter", "state", "buffer")})
        if step and not parameters:
            continue
        for slot, (given, wanted) in update_comparison.state_pairs(found | dict(widened(found)), reference.module, members):
            report.add(f"state {slot} after step {step}", given, wanted)
        for slot, (given, wanted) in update_comparison.pairs_beside(found, reference.state_beside(found)):
            report.add(f"state {slot} after step {step}", given, wanted)
        given, mine = _kind(found, "parameter"), _parameters(reference)
        if plain:
            report.add(f"update of step {step}", *update_comparison.update_pairs(before, given, mine))
        if scales:
            skips = {SKIPPED: found[key_of("metric", SKIPPED)].sign()}
            report.add(f"whether step {step} is skipped", skips, {SKIPPED: torch.tensor(float(skipped))})
        if norm is not None and NORM in found and not skipped:  # of infinities, a norm is one or NaN, as the order of a sum has it
            report.add(f"gradient norm of step {step}", {"grad_norm": found[NORM]}, {"grad_norm": norm.detach()})
        if parameters:
            report.add(f"parameter after step {step}", given, {name: mine[name] for name in given})
        _compare_buffers(found, reference, report, f"buffer after step {step}")


def _gradients(reference: Reference) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in reference.module.named_parameters() if parameter.grad is not None}


def _parameters(reference: Reference) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in reference.module.named_parameters(remove_duplicate=False)}


def compare_module(program: PlainProgram, reference: Reference, report: Report) -> None:
    """Compares a program in module mode: outputs, and gradients for seeded random cotangents of each differentiable output."""
    generator = torch.Generator().manual_seed(0)
    values = input_values(program, reference, 0)
    for port in program.inputs:
        if port.kind == "tangent":
            values[port.key] = torch.randn(port.shape, generator=generator, dtype=torch.float64).to(port.dtype)
    found = report.simulate_program(program, values)
    reference.module.zero_grad(set_to_none=True)
    tangents = {port.name: values[port.key] for port in program.inputs if port.kind == "tangent"}
    names = [port.name for port in program.outputs if port.kind == "output"]
    with reference.at(0):
        leaves = [leaf for leaf in trees.leaves(reference.call_model()) if isinstance(leaf, torch.Tensor)]
        outputs = dict(zip(names, leaves, strict=True))
        wanted = {name: leaf.detach().clone() for name, leaf in outputs.items()}
        if tangents:
            torch.autograd.backward([outputs[name] for name in tangents], list(tangents.values()))
            reference.dense_gradients()
            reference.refine_gradients()
    report.add("output", _kind(found, "output"), wanted)
    if tangents:
        given = _kind(found, "gradient")
        mine = _gradients(reference)
        lacking = {name: value for name, value in mine.items() if name not in given and bool(value.any())}
        mine |= {key_of("input", name): leaf.grad for name, leaf in reference.inputs(program).items() if leaf.grad is not None}
        report.add("gradient", given, lacking | {name: mine.get(name, torch.zeros_like(value)) for name, value in given.items()})
    _compare_buffers(found, reference, report)
