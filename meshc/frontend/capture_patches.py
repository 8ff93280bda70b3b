"""Substitutions during capture: contexts for all that is replaced while a model is traced, and what is settled in the graph afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from meshc.frontend import trace_errors
from meshc.frontend.batch_norms import averaged_norms, synced_norms
from meshc.frontend.data_assignments import set_data_in_place
from meshc.frontend.flex import traced_flex
from meshc.frontend.grouped_calls import grouped_calls
from meshc.frontend.inner_transforms import traced_transforms
from meshc.frontend.known_outcomes import known_outcomes, write_known_values
from meshc.frontend.libraries import traceable_libraries
from meshc.frontend.listed_experts import listed_experts
from meshc.frontend.mask_hints import unhinted_masks
from meshc.frontend.selected_rows import follow_selected_rows
from meshc.frontend.side_effects import TraceObservations, dropped_checks_note, leave_out_checks, observe_side_effects
from meshc.frontend.skipped_work import without_guards
from meshc.frontend.sources import source_of
from meshc.frontend.traced_adaptive import traced_adaptive
from meshc.frontend.traced_ctc import targets_in_rows, traced_ctc
from meshc.frontend.traced_distributions import traced_distributions
from meshc.frontend.traced_gradients import traced_gradients
from meshc.ir import trees
from meshc.replacements import replace_targets


@contextlib.contextmanager
def traceable_model(module: nn.Module) -> Iterator[None]:
    """A context in which a model's code runs in the form in which it is traced."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    with (
        traceable_libraries(module), trees.registration(), grouped_calls(), listed_experts(module), traced_flex(), traced_adaptive(),
        synced_norms(),
    ):  # fmt: skip
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)


@contextlib.contextmanager
def apply_capture_patches(opened: bool) -> Iterator[TraceObservations]:
    """A context with all substitutions in torch's tracer, which also records the side effects of Python. `opened`: sizes are dynamic, and
    guards on them are kept."""
    with contextlib.nullcontext() if opened else without_guards(), traced_ctc():
        with (
            unhinted_masks(), averaged_norms(), traced_distributions(), traced_gradients(), lstm_states(), each_tensor_once(),
            traced_transforms(), known_outcomes(), observe_side_effects() as seen,
        ):  # fmt: skip
            yield seen


def settle_graph(graph: GraphModule) -> list[str]:
    """Rewrites what a captured graph has of Python and of values alone, in place; returns notes. Raises CaptureError."""
    targets_in_rows(graph)
    notes = dropped_checks_note(graph, source_of)
    leave_out_checks(graph)
    write_known_values(graph)
    set_data_in_place(graph, source_of)
    follow_selected_rows(graph)
    trace_errors.refuse_values(graph, source_of)
    return notes


@contextlib.contextmanager
def lstm_states() -> Iterator[None]:
    """A context in which the last states of an `nn.LSTM` are traced with their real shapes. In torch 2.11, those of a layer have one dim of
    length 1 too many in a trace, with more than one sequence."""
    from meshc.private import decompositions

    layer = decompositions.one_layer_lstm

    def of_two_dims(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, states = layer(*args, **kwargs)
        return out, tuple(state.flatten(0, -2) for state in states)

    with replace_targets(lstm_layer=of_two_dims):
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

    with replace_targets(autograd_function_call=check_and_call):
        yield
