"""Substitutions during capture: one context for all functions of torch and transformers that are replaced while a graph is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from meshc.frontend.batch_norms import averaged_norms
from meshc.frontend.flex import traced_flex
from meshc.frontend.inner_transforms import traced_transforms
from meshc.frontend.known_outcomes import known_outcomes
from meshc.frontend.mask_hints import unhinted_masks
from meshc.frontend.side_effects import TraceObservations, observe_side_effects
from meshc.frontend.skipped_work import without_guards
from meshc.frontend.stock_experts import unsorted_experts
from meshc.frontend.stock_scans import traced_scans
from meshc.frontend.traced_adaptive import traced_adaptive
from meshc.frontend.traced_ctc import traced_ctc
from meshc.frontend.traced_distributions import traced_distributions
from meshc.frontend.traced_gradients import traced_gradients


@contextlib.contextmanager
def apply_capture_patches(opened: bool) -> Iterator[TraceObservations]:
    """A context with all substitutions, which also records the side effects of Python. `opened`: sizes are dynamic, and guards on them are
    kept."""
    with contextlib.nullcontext() if opened else without_guards(), unsorted_experts(), traced_scans(), traced_flex(), traced_ctc():
        with (
            unhinted_masks(), averaged_norms(), traced_distributions(), traced_gradients(), lstm_states(), each_tensor_once(),
            traced_adaptive(), traced_transforms(), known_outcomes(), observe_side_effects() as seen,
        ):  # fmt: skip
            yield seen


@contextlib.contextmanager
def lstm_states() -> Iterator[None]:
    """A context in which the last states of an `nn.LSTM` are traced with their real shapes. In torch 2.11, those of a layer have one dim of
    length 1 too many in a trace, with more than one sequence."""
    from meshc.private import decompositions

    layer = decompositions.one_layer_lstm

    def of_two_dims(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, states = layer(*args, **kwargs)
        return out, tuple(state.flatten(0, -2) for state in states)

    with mock.patch.object(decompositions, "one_layer_lstm", of_two_dims):
        yield


@contextlib.contextmanager
def each_tensor_once() -> Iterator[None]:
    """A context in which an autograd function that gets one tensor twice is refused: torch 2.11 traces the tensor's gradient once; later
    releases refuse it themselves."""
    from meshc.private import AutogradFunctionApplyVariable

    call = AutogradFunctionApplyVariable.call_function

    def check_and_call(self_: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = [one.realize() for one in args]
        nodes = [one.as_proxy().node for one in given if one.is_tensor() and one.requires_grad]
        if len(set(nodes)) < len(nodes):
            raise RuntimeError("autograd.Function.apply: duplicate tensor input")
        return call(self_, tx, args, kwargs)

    with mock.patch.object(AutogradFunctionApplyVariable, "call_function", check_and_call):
        yield
