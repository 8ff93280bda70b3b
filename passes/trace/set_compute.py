"""Compute: parameters stored in one dtype and computed with in another, where a compute line of the plan says so.

    precision layers.*: compute bf16, reduce f32

    w [bf16]                    becomes       w [f32];  w1 = aten._to_copy(w, bf16)              what is gathered is bfloat16
    grad_w = mm(..) [bf16]                    g = meshc.widen_sum(mm(..), f32)                   ranks add in float32
                                              grad_w = aten._to_copy(g, f32)

The model is traced with parameters in the dtype that it computes in, so that code which asks for a weight's dtype is told that one; here
they get that of their storage back, before anything else reads the graph. It means what fully_shard with
`MixedPrecisionPolicy(param_dtype, reduce_dtype)` means around the outermost modules that a line names (torch/distributed/fsdp/
_fully_shard/_fsdp_state.py, at 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.fx import Graph, Node

from meshc.errors import PlanError, join_names
from meshc.frontend.compute_dtypes import ComputeDtypes
from meshc.frontend.double_copy import wide_dtype
from meshc.ir import Record, Source, record, set_record, spmd
from meshc.ir.graph import ancestors_of, call, output_of, placeholders, set_results
from meshc.ir.likeness import like
from meshc.ops import norm as _norm  # noqa: F401 - registers meshc::widen_sum
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced_model import Joint
from meshc.plan.plan_faults import did_you_mean, refuse_faults
from meshc.plan.precision_lines import DTYPES, ComputeLine
from meshc.program.packing import is_view

aten, meshc = torch.ops.aten, torch.ops.meshc


def compute_dtypes(module: nn.Module, lines: Sequence[ComputeLine], request: Request) -> ComputeDtypes:
    """What compute lines say of a module's parameters and of its submodules' inputs. Raises PlanError for lines that do not fit."""
    if not lines:
        return ComputeDtypes()
    chosen = {path: _line_of(lines, path) for path, _ in module.named_modules()}
    said: dict[str, ComputeLine] = {}
    others: dict[int, tuple[str, ComputeLine | None]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        line = _line_of(lines, name.rpartition(".")[0])
        first, theirs = others.setdefault(id(parameter), (name, line))
        if theirs != line and (theirs is None or line is None or theirs.dtypes != line.dtypes):
            _refuse_tied(first, name, theirs or line)
        if line is not None and first == name and parameter.is_floating_point():
            said[name] = line
    _refuse_unused(lines, said, [path for path in chosen if path])
    _refuse_masters(module, said, request)
    _refuse_autocast(said, request)
    return ComputeDtypes(
        {name: DTYPES[line.compute] for name, line in said.items()},
        {name: DTYPES[line.reduce] for name, line in said.items() if line.reduce not in ("", line.compute)},
        {
            path: DTYPES[line.compute]
            for path, line in chosen.items()
            if line is not None and (not path or chosen.get(path.rpartition(".")[0]) != line)
        },
    )  # fmt: skip


def _line_of(lines: Sequence[ComputeLine], path: str) -> ComputeLine | None:
    return next((line for line in reversed(lines) if line.covers(path)), None)


def _refuse_tied(one: str, other: str, line: ComputeLine | None) -> None:
    where = "" if line is None else f"{line.where}: "
    raise PlanError(
        f"{where}{one} and {other} are one parameter, and it would be computed with in one dtype here and in another there\n"
        "  what to do: lines that name both of its modules alike, or neither"
    )


def _refuse_unused(lines: Sequence[ComputeLine], said: Mapping[str, ComputeLine], paths: Sequence[str]) -> None:
    used = {line.where for line in said.values()}
    hidden = {line.where for line in lines if line.where not in used and any(map(line.covers, (name.rpartition(".")[0] for name in said)))}
    faults = {
        line.where: f"{line.where}: later lines say otherwise of all modules that it names: leave it out"
        if line.where in hidden
        else f"{line.where}: no such module has parameters{did_you_mean(line.pattern, paths)}; name modules as model.named_modules() does, "
        "with * for any text"
        for line in lines
        if line.where not in used
    }
    refuse_faults("the plan does not fit this model", list(faults.values()))


def _refuse_masters(module: nn.Module, said: Mapping[str, ComputeLine], request: Request) -> None:
    """Raises PlanError where parameters are not in the dtype in which a line has them stored and updated."""
    parameters, faults = dict(module.named_parameters()), dict[str, str]()
    masters = request.options.training.master_weights and request.train
    for name, line in said.items():
        mine = parameters[name].dtype
        kept = torch.float32 if masters and mine.itemsize == 2 else mine
        if line.master and kept != DTYPES[line.master]:
            faults[line.where] = (
                f"{line.where}: {name} is {str(mine).removeprefix('torch.')}, and parameters are stored and updated as the model has them: "
                f"build the model in {str(DTYPES[line.master]).removeprefix('torch.')}, or leave `master {line.master}` out"
                + "; of a TrainStep of a model in 16 bits, Options(training=Training(master_weights=True))" * (line.master == "f32")
            )
    refuse_faults("the plan does not fit this model", list(faults.values()))


def _refuse_autocast(said: Mapping[str, ComputeLine], request: Request) -> None:
    around = {dtype for _, dtype in request.autocast}
    faults = [line.where for line in said.values() if line.compute != "f32" and around - {DTYPES[line.compute]}]
    if faults:
        given = join_names(sorted(str(dtype).removeprefix("torch.") for dtype in around), 2)
        raise PlanError(
            f"{faults[0]}: the call is under autocast to {given}, which would cast these values again\n"
            "  what to do: compile without autocast, or autocast to the line's dtype, which keeps norms and losses in float32"
        )


def store_parameters(joint: Joint, computed: ComputeDtypes, module: nn.Module, double: bool) -> Joint:
    """The joint graph with parameters, and gradients, in the dtypes of their storage."""
    if not computed.parameters:
        return joint
    stored = {name: wide_dtype(parameter.dtype, double) for name, parameter in module.named_parameters()}
    graph, inputs = joint.graph, []
    last = placeholders(graph)[-1]
    for port, node in zip(joint.inputs, placeholders(graph), strict=True):
        if port.kind == "parameter" and stored.get(port.name, port.dtype) != port.dtype:
            made, readers = record(node), list(node.users)
            with graph.inserting_before(last.next):
                cast = call(graph, like(made, source=_module_of(port.name)), aten._to_copy.default, node, dtype=made.dtype)
            for reader in readers:
                reader.replace_input_with(node, cast)
            set_record(node, like(made, dtype=stored[port.name]))
            port = replace(port, dtype=stored[port.name])
        inputs.append(port)
    outputs, results = [], []
    for port, node in zip(joint.outputs, joint.results(), strict=True):
        if port.kind == "gradient" and stored.get(port.name, port.dtype) != port.dtype:
            base = Record(record(node).shape, record(node).dtype, source=_module_of(port.name), phase="backward")
            with graph.inserting_before(output_of(graph)):
                if port.name in computed.sums and computed.sums[port.name] != port.dtype:
                    wider = wide_dtype(computed.sums[port.name], double)
                    node = call(graph, like(base, dtype=wider), meshc.widen_sum.default, node, wider)
                if record(node).dtype != stored[port.name]:
                    node = call(graph, like(base, dtype=stored[port.name]), aten._to_copy.default, node, dtype=stored[port.name])
            port = replace(port, dtype=stored[port.name])
        outputs.append(port)
        results.append(node)
    set_results(graph, results)
    return replace(joint, inputs=tuple(inputs), outputs=tuple(outputs))


def notes_on_narrow_sums(graph: Graph) -> list[str]:
    """A note on gradients of a rank that are summed over ranks ahead of the cast which their line wants ahead of the sum."""

    def passes(node: Node) -> bool:
        return is_view(node) or node.target in (aten.add.Tensor, aten.clone.default)

    found: dict[str, None] = {}
    for widened in graph.find_nodes(op="call_function", target=meshc.widen_sum.default):
        before = ancestors_of(widened.all_input_nodes, through=passes)
        if any(node.target in (spmd.all_reduce, spmd.reduce_scatter) and node.args[1] != [spmd.MICROBATCH] for node in before):
            found[record(widened).source.module or "the model itself"] = None
    said = "precision: gradients of {} are summed over ranks in the dtype in which they are computed: the sum is read by more than them"
    return [said.format(join_names([*found], 4))] if found else []


def _module_of(parameter: str) -> Source:
    return Source(module=parameter.rpartition(".")[0])
