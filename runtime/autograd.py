"""A program in module mode as one differentiable function: forward now, backward when torch asks, each call with its own saved values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import Node

from meshc.errors import StateError
from meshc.program import Instruction, Port, Stage
from meshc.runtime.session import Session


class Call:
    """The state of one forward call until its backward."""

    def __init__(self, session: Session, parameters: Sequence[Port], inputs: Sequence[Port], scale: Mapping[str, float | None]) -> None:
        self.session = session
        self.step = session.store.step
        self.parameters = list(parameters)
        self.inputs = list(inputs)
        self.scale = dict(scale)
        self.saved: dict[str, Any] = {}
        self.tangents = {port.name: port for port in session.program.inputs if port.kind == "tangent"}
        self.gradients = {port.name: port for port in session.program.outputs if port.kind == "gradient"}
        self.results = session.results


class ProgramFunction(torch.autograd.Function):
    """forward(call, tensors, parameters..., inputs that need gradients...) -> outputs."""

    @staticmethod
    def forward(ctx: Any, call: Call, tensors: Sequence[torch.Tensor], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        session = call.session
        ctx.set_materialize_grads(False)
        env = {**session.values(tensors, {}), **session.executor.constants}
        with session.executor.guarded(call.step, "run forward"):
            session.executor.perform(Instruction("run", "forward"), env)
        session.finish(env)
        call.saved = {key: env[key] for key in session.program.stages["backward"].inputs if key in env}
        ctx.call = call
        outputs = tuple(session.output(port, env[port.key]) for port in call.results)
        ctx.mark_non_differentiable(*[o for port, o in zip(call.results, outputs, strict=True) if port.name not in call.tangents])
        return tuple(o.view_as(o) if not isinstance(o, DTensor) else o for o in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        session = call.session
        env = dict(call.saved)
        for port, grad in zip(call.results, grads, strict=True):
            tangent = call.tangents.get(port.name)
            if tangent is None:
                continue
            scale = call.scale.get(port.name, 1.0)
            if scale is None and grad is not None:
                raise StateError(
                    f"backward from {port.name}, which carries this rank's part of the batch, needs to know what the local loss means.\n"
                    '  what to do: compile with options=meshc.Options(local_loss="mean") (what DDP means) or "sum"'
                )
            if grad is None:
                grad = torch.zeros(session.shape(tangent), dtype=tangent.dtype, device=session.device)
            env[tangent.key] = session.tangent(tangent, grad if scale in (None, 1.0) else grad * scale)
        with torch.no_grad(), session.executor.guarded(call.step, "run backward"):
            session.executor.perform(Instruction("run", "backward"), env)
        received = {
            call.tangents[port.name].key
            for port, grad in zip(call.results, grads, strict=True)
            if grad is not None and port.name in call.tangents
        }
        behind = tangents_behind(session.program.stages["backward"])
        found: list[Any] = []
        for port in call.parameters:
            gradient = call.gradients.get(port.name)
            reached = gradient is not None and behind[gradient.key] & received
            found.append(session.parameter_gradient(gradient, env[gradient.key]) if gradient is not None and reached else None)
        for port in call.inputs:
            gradient = call.gradients.get(f"input:{port.name}")
            found.append(env[gradient.key] if gradient is not None and behind[gradient.key] & received else None)
        return (None, None, *found)


def tangents_behind(stage: Stage) -> dict[str, set[str]]:
    """Which tangents each output of a backward stage depends on. A parameter behind none of those received keeps no gradient at all, as in
    torch, where an optimizer then leaves it alone; a zero gradient would let weight decay and momentum move it."""
    keys = dict(zip(stage.graph.find_nodes(op="placeholder"), stage.inputs, strict=True))
    behind: dict[Node, set[str]] = {}
    for node in stage.graph.nodes:
        if node.op == "placeholder":
            behind[node] = {keys[node]} if keys[node].startswith("tangent:") else set()
        else:
            behind[node] = set().union(*(behind[operand] for operand in node.all_input_nodes))
    (output,) = stage.graph.find_nodes(op="output")
    return {key: behind[node] for key, node in zip(stage.outputs, output.args[0], strict=True)}
