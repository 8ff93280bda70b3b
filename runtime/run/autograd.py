"""`torch.autograd.Function` of a program in module mode: forward at the call, backward on request, saved values for each call.

A call saves what the backward from all outputs reads, so that the forward program does not depend on which outputs receive gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from meshc.errors import StateError, join_names
from meshc.program.program import Instruction, Port
from meshc.runtime.run.session import BACKWARD, Session
from meshc.runtime.state.stored_tensor import UserTensors, copy_if_shared, memories_of, memory_of

_FORWARD: Final = Instruction("run", "forward")


class _WriteTracker:
    """Version counters of a call's parameters and inputs, to find writes by users. All counters are compared as one list, the only
    cost when nothing has changed."""

    def __init__(self, kept: UserTensors, inputs: Mapping[str, torch.Tensor]) -> None:
        """inputs: by key; torch keeps no version of inference tensors, so they are left out."""
        self._kept, self._inputs = kept, {key: value for key, value in inputs.items() if not value.is_inference()}
        self._then = kept.versions(self._inputs.values())

    def written_keys(self) -> set[str]:
        """Keys of tensors written to since, directly or through the DTensor that has their memory."""
        now, then = self._kept.versions(self._inputs.values()), self._then
        if now == then:
            return set()
        keys = [*self._kept.keys, *self._inputs]
        return {key for key, one, other in zip(keys, now, then, strict=True) if one != other}


class ForwardCall:
    """The state of one forward call until its backward."""

    def __init__(
        self, session: Session, inputs: Sequence[Port], scale: Mapping[str, float | None], times: Mapping[str, float],
        numbers: Mapping[str, float],
    ) -> None:  # fmt: skip
        """scale, times: factors of the gradients of outputs and of inputs, by the ports' names (`Program._scales`);
        numbers: the Python numbers that the call takes."""
        self.session = session
        self.step, self.calling = session.store.step, session.calling
        self.moves = session.store.moves
        self.inputs, self.scale, self.times, self.numbers = inputs, scale, times, numbers

    def keep(self, env: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], new: Mapping[int, str]) -> None:
        """Keeps what backward reads. inputs: by key; new: keys of the call's first values that do not stay, by storage address."""
        self._saved, self._new = {key: env[key] for key in self.session.saved_keys}, new
        self._memories = set(memories_of(self._saved.values()))
        self._given = _WriteTracker(self.session.user_tensors(), inputs)

    def values(self) -> dict[str, torch.Tensor]:
        """What backward reads of the call, by key."""
        return {**self.session.read_by_backward, **self._saved}

    def memories(self) -> set[int]:
        """Storage addresses of the saved values, and of all that stays from call to call."""
        return {*self.session.kept_memory, *self._memories}

    def reads(self, memory: int) -> bool:
        """Whether there are saved values at a storage address, or what the call began with."""
        return memory in self._memories or memory in self._new or memory in self.session.kept_memory

    def input_gradient(self, port: Port, own: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The gradient of an input, scaled; None if there is none."""
        found, times = own.get(f"gradient:input:{port.name}"), self.times.get(port.name, 1.0)
        return found if found is None or times == 1.0 else found * times

    def refuse_changed(self, read: Iterable[str]) -> None:
        """Raises StateError, as torch does, for a backward that would read values written to since the call. read: keys of its inputs."""
        written = self._given.written_keys()
        there = self.values() if written else {}
        memories = (memory_of(there[key]) for key in read if key in there)
        keys = (self._new.get(memory, self.session.kept_memory.get(memory)) for memory in memories)
        changed = [key.partition(":")[2] for key in dict.fromkeys(keys) if key is not None and key in written]
        if changed:
            raise StateError(
                f"these were changed in place between this call and its backward, which reads them: {join_names(changed, 4)}\n"
                "  why: the gradients would be those of other values than the call had; of a plain model torch refuses that too\n"
                "  what to do: optimizer.step(), and writing to inputs, behind the backward of all calls that were made before it"
            )


class ProgramFunction(torch.autograd.Function):
    """forward(call, tensors, parameters..., inputs that need gradients...) -> outputs."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, tensors: Sequence[torch.Tensor], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        session = call.session
        ctx.set_materialize_grads(False)
        env = session.values(tensors, call.numbers)
        env |= session.executor.constants
        given = {port.key: env[port.key] for port in session.inputs}
        memories = dict(zip(memories_of([env[key] for key in session.call_keys]), session.call_keys, strict=True))
        with session.executor.record_call(call.step), session.executor.failure_guard(call.step, "run forward"):
            session.executor.perform(_FORWARD, env)
        session.finish(env)
        call.keep(env, given, memories)
        ctx.call = call
        whole = [session.output(port, env[port.key]) for port in session.results]
        mine = memories_of([o for o in whole if not isinstance(o, DTensor)])
        taken, apart = set[int](), len(mine) == len(set(mine))
        outputs = tuple([o if isinstance(o, DTensor) else _wrap_output(o, call, taken, apart) for o in whole])
        ctx.mark_non_differentiable(*[o for port, o in zip(session.results, outputs, strict=True) if port.name not in session.tangents])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[object, ...]:
        call: ForwardCall = ctx.call
        session = call.session
        if torch.is_grad_enabled():
            raise StateError(
                "create_graph=True: a compiled module's gradients are made by a program, which has no derivative of its own\n"
                "  what to do: call backward (torch.autograd.grad) without create_graph; a loss that holds gradients, such as a penalty on "
                "them,\n  takes them within: torch.autograd.grad in the model's forward, or in the loss of a meshc.TrainStep"
            )
        _refuse_anomalies()
        if call.moves != session.store.moves:
            raise StateError(
                "experts have moved between this call and its backward, which would read others in their places\n"
                "  what to do: program.rebalance() before the call, or after the backward"
            )
        env = call.values()
        received = set()
        for port, grad in zip(session.results, grads, strict=True):
            tangent = session.tangents.get(port.name)
            if tangent is None or grad is None:
                continue
            scale = call.scale.get(port.name, 1.0)
            if scale is None:
                raise StateError(
                    f"backward from {port.name}, which carries this rank's part of the batch, needs to know what the local loss means.\n"
                    '  what to do: compile with options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean"))'
                    ' (what DDP means) or "sum"'
                )
            received.add(port.name)
            env[tangent.key] = session.tangent(tangent, grad if scale == 1.0 else grad * scale)
        taken = call.memories() | {memory_of(env[port.key]) for port in session.tangents.values() if port.key in env}
        assert session.backwards is not None
        with session.executor.failure_guard(call.step, "run backward"):
            session.note_run(BACKWARD, call.calling)
        with torch.no_grad():
            made = session.backwards.run(frozenset(received), env, call.step, call.refuse_changed)
            own = {key: copy_if_shared(env[key], taken) for key in made}
        found: list[object] = []
        for port in session.trained:
            gradient = session.gradients.get(port.name)
            here = gradient is not None and gradient.key in own
            found.append(session.parameter_gradient(gradient, own[gradient.key]) if gradient is not None and here else None)
        return (None, None, *found, *[call.input_gradient(port, own) for port in call.inputs])


def _refuse_anomalies() -> None:
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise StateError(
            "torch.autograd's anomaly mode looks for NaN in each gradient, which torch cannot do with DTensors, as these are\n"
            "  what to do: torch.autograd.set_detect_anomaly(True, check_nan=False), and hooks of parameters to look at gradients; or the\n"
            "  plain model on one device"
        )


def _wrap_output(output: torch.Tensor, call: ForwardCall, taken: set[int], apart: bool) -> torch.Tensor:
    """An output as the autograd function returns it. With memory of its own it may be changed in place: `logits /= 2`. If it is an input,
    another output or read by backward, it becomes a view, of which torch refuses that; a scalar is cloned: loops scale a loss in place.
    taken: storage addresses of the outputs before it; apart: no two outputs share memory."""
    memory = memory_of(output)
    if memory in taken or call.reads(memory):
        return output.view_as(output) if output.dim() else output.clone()
    taken.add(memory)
    if apart and not output._is_view():
        return output
    return output.new_empty(0).set_(output.untyped_storage(), output.storage_offset(), output.shape, output.stride())
