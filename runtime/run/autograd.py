"""A program in module mode as one differentiable function: forward now, backward when torch asks, each call with its own saved values.

What a call saves is what the backward from all outputs needs, so that the forward program does not depend on what comes later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from meshc.errors import StateError
from meshc.program.program import Instruction, Port
from meshc.runtime.run.session import Session


class Call:
    """The state of one forward call until its backward."""

    def __init__(self, session: Session, parameters: Sequence[Port], inputs: Sequence[Port], scale: Mapping[str, float | None]) -> None:
        self.session = session
        self.step = session.store.step
        self.moves = session.store.moves
        self.parameters = list(parameters)
        self.inputs = list(inputs)
        self.scale = dict(scale)
        self.saved: dict[str, torch.Tensor] = {}
        self.tangents = {port.name: port for port in session.program.inputs if port.kind == "tangent"}
        self.gradients = {port.name: port for port in session.program.outputs if port.kind == "gradient"}
        self.results = session.results


class _Context(Protocol):
    """What torch hands to a function of its autograd, with what `forward` leaves in it for `backward`."""

    call: Call

    def set_materialize_grads(self, value: bool) -> None: ...
    def mark_non_differentiable(self, *args: torch.Tensor) -> None: ...


class ProgramFunction(torch.autograd.Function):
    """forward(call, tensors, parameters..., inputs that need gradients...) -> outputs."""

    @staticmethod
    def forward(ctx: _Context, call: Call, tensors: Sequence[torch.Tensor], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        session = call.session
        ctx.set_materialize_grads(False)
        env = {**session.values(tensors, {}), **session.executor.constants}
        with session.executor.recording(call.step), session.executor.guarded(call.step, "run forward"):
            session.executor.perform(Instruction("run", "forward"), env)
        session.finish(env)
        call.saved = {key: env[key] for key in session.program.stages["backward"].inputs if key in env}
        ctx.call = call
        whole = [session.output(port, env[port.key]) for port in call.results]
        outputs = tuple(o if isinstance(o, DTensor) else _given(o) for o in whole)
        ctx.mark_non_differentiable(*[o for port, o in zip(call.results, outputs, strict=True) if port.name not in call.tangents])
        return outputs

    @staticmethod
    def backward(ctx: _Context, *grads: torch.Tensor | None) -> tuple[object, ...]:
        call = ctx.call
        session = call.session
        if torch.is_grad_enabled():
            raise StateError(
                "create_graph=True: a compiled module's gradients are made by a program, which has no derivative of its own\n"
                "  what to do: call backward (torch.autograd.grad) without create_graph; a loss that holds gradients, such as a penalty on "
                "them,\n  needs the model as it was before meshc.compile"
            )
        if call.moves != session.store.moves:
            raise StateError(
                "experts have moved between this call and its backward, which would read others in their places\n"
                "  what to do: program.rebalance() before the call, or after the backward"
            )
        env = dict(call.saved)
        received = set()
        for port, grad in zip(call.results, grads, strict=True):
            tangent = call.tangents.get(port.name)
            if tangent is None or grad is None:
                continue
            scale = call.scale.get(port.name, 1.0)
            if scale is None:
                raise StateError(
                    f"backward from {port.name}, which carries this rank's part of the batch, needs to know what the local loss means.\n"
                    '  what to do: compile with options=meshc.Options(local_loss="mean") (what DDP means) or "sum"'
                )
            received.add(port.name)
            env[tangent.key] = session.tangent(tangent, grad if scale == 1.0 else grad * scale)
        taken = {_memory(value) for value in env.values() if isinstance(value, torch.Tensor)}
        assert session.backwards is not None
        with torch.no_grad():
            made = session.backwards.run(frozenset(received), env, call.step)
            own = {key: _own(env[key], taken) for key in made}
        found: list[object] = []
        for port in call.parameters:
            gradient = call.gradients.get(port.name)
            here = gradient is not None and gradient.key in own
            found.append(session.parameter_gradient(gradient, own[gradient.key]) if gradient is not None and here else None)
        return (None, None, *found, *[own.get(f"gradient:input:{port.name}") for port in call.inputs])


def _given(output: torch.Tensor) -> torch.Tensor:
    """An output as torch takes it, which may be an input or another output: a view, which cannot be changed in place, since backward may
    read what it is of; one number by itself, as loops scale a loss in place."""
    return output.view_as(output) if output.dim() else output.clone()


def _own(gradient: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """A gradient in memory of its own: it becomes somebody's `.grad`, which is changed in place, and another's must not change with it."""
    if _memory(gradient) in taken:
        gradient = gradient.clone()
    taken.add(_memory(gradient))
    return gradient


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
