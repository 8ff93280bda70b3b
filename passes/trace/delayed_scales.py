"""Delayed scales: made of the largest magnitudes of the steps before, which are state of a step, in formats that have a history.

    q = meshc.quantize(x, s, "e4m3")          s = meshc.scale_of_history(state:w/meshc.activation_peaks, 2, "e4m3")
                                              state:w/meshc.activation_peaks = meshc.next_history(.., meshc.peak_of(x, [0, 1]))

A scale is known before what it rounds, so no reduction stands between the two, and microbatches wait for nothing: the largest magnitudes of
all operands are reduced behind the step, together. A product with a weight has three histories, beside the state of the weight: of the
weight, of what is multiplied by it, and of the gradient of their product. Source: Transformer Engine's `DelayedScaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from meshc.errors import PlanError
from meshc.ir import record
from meshc.ir.formats import Format, Role
from meshc.ops import quantize as _quantize  # noqa: F401 - registers its operators
from meshc.optimizer.spec import PEAKS
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.passes.trace.step_state import StepState, has_gradient, is_held
from meshc.passes.trace.weight_products import PRODUCTS, WeightProduct

meshc = torch.ops.meshc


class PeakHistories:
    """Histories of the largest magnitudes of operands, by the parameter and the role of the first product that reads each."""

    def __init__(self, joint: Joint) -> None:
        self.state = StepState(joint)
        self.histories: dict[tuple[str, Role], tuple[Node, Node]] = {}
        """A history, and this step's largest magnitude; of a weight what was rounded, at which its update looks (behind all products, whose
        first says how a parameter is stored)."""

    def scale(self, emit: Callable[..., Node], x: Node, dims: Sequence[int], element: str, of: tuple[str, Role], form: Format) -> Node:
        """The scale of x for this step. `emit(target, *args)`: adds a node where x is rounded."""
        if of not in self.histories:
            name, role = of
            history = self.state.enter(name, PEAKS[role], (form.history,), torch.float32)
            self.histories[of] = history, x if role == "weight" else emit(meshc.peak_of.default, x, [*dims])
        return emit(meshc.scale_of_history.default, self.histories[of][0], len(dims), element)

    def write_results(self) -> Joint:
        """The joint graph with histories that go on; the same if there are none."""
        add, updates = self.state.add, self.state.updates
        peaks = {of: peak for of, (_, peak) in self.histories.items()}
        for (name, role), x in peaks.items():  # all of them ahead of the first that is read, so that they are reduced together
            if role == "weight":
                peaks[name, role] = add.call(meshc.peak_of.default, x, [*range(len(record(x).shape))])
                updates[peaks[name, role]] = name
        for (name, role), (history, _) in self.histories.items():
            made = add.call(meshc.next_history.default, history, peaks[name, role])
            updates[made] = name
            self.state.leave(name, PEAKS[role], made)
        return self.state.write_results()


def why_no_history(traced: TracedModel, product: WeightProduct, all_products: Sequence[WeightProduct]) -> str:
    """Why a product has no delayed scales; "" if it may have them."""
    names = product.parameters
    if len(names) > 1 or product.is_of_runs or PRODUCTS[product.node.target]:
        return "histories are kept for products of two matrices, of which one is a parameter"
    if sum(names[0] in one.parameters for one in all_products) > 1:
        return f"{names[0]} is read by several products, whose scales would have one history"
    if not has_gradient(traced, names[0]):
        return f"histories are kept beside the optimizer's state, and {names[0]} has no gradient"
    if not is_held(traced, names[0]):
        raise PlanError(
            f"{names[0]} has products with delayed scales, whose histories are kept beside the optimizer's state, and no optimizer "
            "holds it\n  what to do: another format for its module, such as `float8 tensor`, or give it to the optimizer"
        )
    return ""
