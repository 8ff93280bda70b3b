"""State that a line of the plan keeps from one training step to the next, beside the optimizer's: ports, values, where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch.fx import Node

from meshc.errors import PlanError
from meshc.frontend.capture import SEED_STEP
from meshc.ir import record
from meshc.ir.graph import placeholders, set_results
from meshc.passes.depth.slice_layers import slice_layers
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.passes.trace.appender import Appender
from meshc.passes.trace.gradients import group_of
from meshc.program.program import Port


class StepState:
    """Writes into a joint graph. `updates`: nodes that update a parameter's state, with its name."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.add = Appender(joint.graph, "update")
        self.updates = dict(joint.updates)
        self._inputs: list[Port] = []
        self._outputs: list[tuple[Port, Node]] = []

    @cached_property
    def seed_step(self) -> Node:
        """The seed and step of random numbers, shared with the model if it draws any."""
        entered = zip(self.joint.inputs, placeholders(self.joint.graph), strict=False)  # what is added stands behind
        found = next((node for port, node in entered if port.kind == "random"), None)
        if found is None:
            self._inputs.append(Port("random", SEED_STEP, (2,), torch.int64))
            found = self.add.placeholder(SEED_STEP, (2,), torch.int64)
        return found

    def enter(self, name: str, slot: str, shape: tuple[int, ...], dtype: torch.dtype) -> Node:
        """A slot of a parameter's state, as the step before has left it; zero at first."""
        self._inputs.append(Port("state", f"{name}/{slot}", shape, dtype, of=name))
        return self.add.placeholder(f"{name}/{slot}", shape, dtype)

    def leave(self, name: str, slot: str, value: Node) -> None:
        """A slot as this step leaves it."""
        made = record(value)
        assert made.dtype is not None
        self._outputs.append((Port("state", f"{name}/{slot}", made.shape, made.dtype, of=name), value))

    def write_results(self) -> Joint:
        """The joint graph with this state."""
        joint = self.joint
        set_results(joint.graph, [*joint.results(), *(node for _, node in self._outputs)])
        outputs = (*joint.outputs, *(port for port, _ in self._outputs))
        return replace(joint, inputs=(*joint.inputs, *self._inputs), outputs=outputs, updates=self.updates)


def refuse_without_steps(traced: TracedModel, where: str, what: str, instead: str) -> None:
    """Raises PlanError in what has no steps of its own. `what`: is made from one to the next."""
    request = traced.request
    if request.scales_loss:
        raise PlanError(
            f"{where}: {what} from one training step to the next, and a step that the scaler skips leaves all state as it is\n"
            f"  what to do: TrainStep without scaler=, in float32 or under autocast to bfloat16, or {instead}"
        )
    if request.train and traced.parts is None and not request.adds:
        return
    raise PlanError(
        f"{where}: {what} from one training step to the next, of which a call of a program is one\n"
        f"  what to do: {instead}, for a module, an inference, program.accumulate(...), or batch_mix=\"mean_of_parts\";\n"
        "  else compile meshc.TrainStep(model, optimizer=...)"
    )


def has_gradient(traced: TracedModel, name: str) -> bool:
    return any(port.kind == "gradient" and port.name == name for port in traced.operators().outputs)


def is_held(traced: TracedModel, name: str) -> bool:
    """Whether the optimizer holds a parameter; also without an optimizer."""
    spec = traced.request.optimizer
    if spec is None:
        return True
    with slice_layers(traced.request.module, traced.depth):
        return group_of(spec, dict(traced.request.module.named_parameters(remove_duplicate=False))[name]) is not None
