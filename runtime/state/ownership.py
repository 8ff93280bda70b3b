"""Owners of stores: from a live model, submodule or optimizer to its store, and the hooks that torch calls on them.

The hooks are plain functions that look up their owner, so that modules and optimizers can still be copied and pickled.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from meshc.errors import StateError, join_names
from meshc.optimizer.optimizer import parameters_of
from meshc.optimizer.spec import group_numbers
from meshc.runtime.agreement.compare import together
from meshc.runtime.failure.failed_rank import SETTLED_S, current_board
from meshc.runtime.failure.step_numbers import Stream
from meshc.runtime.state import traced_steps, whole_state
from meshc.runtime.state.forward_bar import ForwardBar, put_bar, take_bars
from meshc.runtime.state.whole_state import classify_caller, takes_dtensors, warn_optimizer_caller

if TYPE_CHECKING:
    from meshc.runtime.state.store import Store

_STORES: weakref.WeakKeyDictionary[object, Store] = weakref.WeakKeyDictionary()
"""The store of each compiled model, of each submodule that holds copies, and of each optimizer that a program updates."""

RUN: Final = "_compiled_call_impl"
"""Torch's attribute for the function that a module's call runs instead of its forward."""

_REPLACED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Names of parameters that a store has replaced, as long as the old parameters are referenced."""


_LOOPS: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that step a compiled module's parameters themselves (module mode)."""

_STREAMS: weakref.WeakKeyDictionary[torch.optim.Optimizer, Stream] = weakref.WeakKeyDictionary()
"""Streams of these optimizers' numbers, for the comparison between ranks."""


def store_of(owner: nn.Module | torch.optim.Optimizer) -> Store | None:
    return _STORES.get(owner)


def refuse_foreign_parameters(model: nn.Module) -> None:
    """Raises StateError for a model without a store that has parameters of a compiled model, live or replaced ones."""
    stores = {store for owner, store in _STORES.items() if isinstance(owner, nn.Module)}
    rows = [(name, store) for name, one in model.named_parameters() for store in stores if store.parameter_key(one)]
    if rows:
        others = sorted({type(store.model).__qualname__ for _, store in rows})
        raise StateError(
            f"these parameters are of a model that is compiled already ({', '.join(others)}): {join_names([name for name, _ in rows], 4)}\n"
            "  why: a program keeps the parameters of one model; another one's would be copies of them, which from then on train apart\n"
            "  what to do: put both into one nn.Module and compile that: each way in which its forward is called is a program of its own, "
            "over the\n  same parameters (docs/training.md, Several models)"
        )


def own_model(model: nn.Module, holders_of_copies: set[nn.Module], store: Store) -> None:
    """Ties a model to its store; `holders_of_copies` are the submodules whose tensors need `sync` before they are read."""
    for module in holders_of_copies | {model}:
        own_copies(module, store)
    if _check_caller not in model._state_dict_pre_hooks.values():  # a copy of a compiled model has them
        model.register_state_dict_pre_hook(_check_caller)
        model.register_state_dict_post_hook(_gather_model_state)
        model.register_load_state_dict_pre_hook(_shard_model_state)
        model.register_load_state_dict_post_hook(_after_model_load)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    # DistributedDataParallel would broadcast and reduce them; it reports that it has none
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    _refuse_replaced_parameters()


def own_copies(module: nn.Module, store: Store) -> None:
    """Marks a submodule whose tensors are copies, which need `sync` before they are read."""
    if _STORES.get(module) is not store:
        _STORES[module] = store
        module.register_state_dict_pre_hook(_sync)
        module.register_load_state_dict_pre_hook(_sync)


def runs_program(model: nn.Module, run: Callable[..., Any] | None = None) -> bool:
    """Whether calls of the model run a program; with `run`, whether they call that."""
    found = vars(model).get(RUN)
    return found is not None if run is None else found is run


def run_calls(model: nn.Module, run: Callable[..., Any]) -> None:
    """Makes calls of the model call `run`, except within `calls_allowed`. `forward` is unchanged, and copies of the model do not call
    `run`: torch's attribute for `nn.Module.compile` is not copied."""
    model._compiled_call_impl = run
    put_bar(model, ForwardBar(partial(_refuse_stale, weakref.ref(model))))


def _refuse_stale(model: weakref.ref[nn.Module]) -> None:
    """Raises StateError before a copy of outdated tensors: the copy could not refresh them."""
    owner = model()
    store = None if owner is None else _STORES.get(owner)
    stale = [] if store is None else [held.name for held in store.held.values() if held.stale and not held.of]
    if stale:
        raise StateError(
            f"a copy of this model would hold values from before the program's last step: {join_names(stale, 4)}\n"
            "  why: their storage is no layout of torch's, so what you see is a copy, brought up to date on demand\n"
            "  what to do: program.sync() on every rank, and then copy (average) the model"
        )


@contextmanager
def calls_allowed(model: nn.Module) -> Iterator[None]:
    """A context in which calls of the model run its own forward, without bars: for tracing, and for copies of the model."""
    modules = list(model.modules())
    bars = [(module, bar) for module in modules for bar in take_bars(module)]
    runs = [(module, run) for module in modules if (run := module.__dict__.pop(RUN, None)) is not None]
    try:
        yield
    finally:
        for module, bar in bars:
            put_bar(module, bar)
        for module, run in runs:
            run_calls(module, run)


@contextmanager
def runs_restored(model: nn.Module) -> Iterator[None]:
    """A context after which calls of the model, and of its submodules, run what they ran before."""
    before = {module: run for module in model.modules() if (run := vars(module).get(RUN)) is not None}
    try:
        yield
    finally:
        for module in model.modules():
            take_bars(module)
            vars(module).pop(RUN, None)
        for module, run in before.items():
            run_calls(module, run)


def own_optimizer(optimizer: torch.optim.Optimizer, store: Store) -> None:
    _STORES[optimizer] = store
    optimizer.register_state_dict_pre_hook(_sync)
    optimizer.register_state_dict_pre_hook(_check_optimizer_caller)
    optimizer.register_state_dict_post_hook(_gather_optimizer_state)
    optimizer.register_load_state_dict_pre_hook(_sync)
    optimizer.register_load_state_dict_pre_hook(_refuse_parts)
    optimizer.register_step_pre_hook(_sync)
    optimizer.register_load_state_dict_post_hook(_after_optimizer_load)


def mark_replaced(parameter: Tensor, name: str) -> None:
    """Makes an optimizer that steps this replaced parameter raise StateError."""
    _REPLACED[parameter] = name


def _sync(owner: object, *_: object) -> None:
    store = _STORES.get(owner)
    if store is not None and not store.filling:
        with together(current_board(), "sync"):
            store.changes.tell_stale()
            store.sync()


_sync.of_meshc = True  # type: ignore[attr-defined]  # no hook of a user's


def _check_caller(model: nn.Module, *_: object) -> None:
    store = _STORES.get(model)
    if store is None or store.filling:  # a copy of the model has the hook and plain parameters
        return
    who, board = classify_caller(model, _is_whole(store)), current_board()
    beside = threading.current_thread() is not threading.main_thread()
    if board is None or board.has_failure or beside or who == "program":  # after a failure was caught state may still be saved
        return
    with together(board, "state_dict"):
        if who == "all":
            store.changes.compare(SETTLED_S)
        else:
            store.changes.compare_if_asked()


def _check_optimizer_caller(optimizer: torch.optim.Optimizer) -> None:
    warn_optimizer_caller(optimizer, stepped_by_program=store_of(optimizer) is not None)


def _is_whole(store: Store) -> bool:
    return whole_state.is_fully_replicated(held.live for held in store.held.values() if not held.of)


def _gather_model_state(model: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    store = _STORES.get(model)
    if store is None or store.filling:
        return
    if not _is_whole(store):
        whole_state.gather_state(store, model, state, prefix)
    elif not takes_dtensors():
        whole_state.as_plain(store, state, prefix)


def _shard_model_state(model: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    store = _STORES.get(model)
    if store is not None and not store.filling:
        with together(current_board(), "load_state_dict"):
            whole_state.shard_state(store, state, prefix)


def _after_model_load(model: nn.Module, _: object) -> None:
    store = _STORES.get(model)
    if store is not None and not store.filling:
        with together(current_board(), "load_state_dict"):
            store.read_back("parameter", "buffer")


def _refuse_parts(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    with together(current_board(), "load_state_dict"):
        whole_state.refuse_parts_in(optimizer, state["state"])


def _after_optimizer_load(optimizer: torch.optim.Optimizer) -> None:
    store = _STORES.get(optimizer)
    if store is not None:
        with together(current_board(), "load_state_dict"):
            store.read_back("state")


@cache
def _refuse_replaced_parameters() -> object:
    return register_optimizer_step_pre_hook(_before_a_step), register_optimizer_step_post_hook(_after_a_step)


def _before_a_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    _check_parameters(optimizer)
    if store_of(optimizer) is None and optimizer not in _LOOPS and _stores_of(optimizer):
        _own_loops_optimizer(optimizer)
    _note_numbers(optimizer)


def _after_a_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if optimizer in _STREAMS:
        for store in _stores_of(optimizer):
            store.changes.after_step(optimizer)


def _own_loops_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Registers hooks on an optimizer that steps a compiled module's parameters in the user's loop."""
    _LOOPS.add(optimizer)
    optimizer.register_state_dict_pre_hook(_check_optimizer_caller)
    optimizer.register_state_dict_post_hook(_gather_optimizer_state)
    optimizer.register_load_state_dict_pre_hook(_refuse_parts)
    optimizer.register_load_state_dict_post_hook(_shard_optimizer_state)
    _shard_optimizer_state(optimizer)


def _note_numbers(optimizer: torch.optim.Optimizer) -> None:
    """Notes the optimizer's numbers; sends nothing: the board compares them at its next beat. Raises PeerError if ranks differ."""
    board = current_board()
    if board is None or store_of(optimizer) is not None:  # a program that updates compares them itself
        return
    stream = _STREAMS.get(optimizer)
    if stream is None:
        if optimizer not in _LOOPS:
            return
        stream = _STREAMS[optimizer] = board.numbers.stream("optimizer")
        traced_steps.take_over(optimizer)
    traced_steps.come_last(optimizer)
    board.check()
    given = [(f"{i}.{name}", number) for i, group in enumerate(optimizer.param_groups) for name, number in _numbers(optimizer, group)]
    stream.note(tuple(name for name, _ in given), tuple(number for _, number in given))
    for store in _stores_of(optimizer):
        store.changes.before_step(optimizer)


def _shard_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    with together(current_board(), "load_state_dict"):
        whole_state.shard_optimizer_state(optimizer)


def _gather_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    store = next(iter(_stores_of(optimizer)), None)
    if store is None:
        return state
    if not whole_state.is_fully_replicated(value for slots in state["state"].values() for value in slots.values()):
        return whole_state.gather_optimizer_state(store, state)
    return state if takes_dtensors() else whole_state.optimizer_as_plain(state)


def _stores_of(optimizer: torch.optim.Optimizer) -> list[Store]:
    """The stores of compiled modules that have some of the optimizer's parameters."""
    parameters = [*parameters_of([optimizer])]
    return [store for store in dict.fromkeys(_STORES.values()) if any(map(store.parameter_key, parameters))]


def _numbers(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> Iterator[tuple[str, float]]:
    """Numbers of a group by name, without those in device memory: reading one would wait for the device at each step."""
    for name, value in group_numbers(optimizer, group).items():
        if not isinstance(value, Tensor):
            yield name, value
        elif value.device.type == "cpu":
            yield name, value.item()


def _check_parameters(optimizer: torch.optim.Optimizer) -> None:
    if not len(_REPLACED):
        return
    names = [_REPLACED[p] for p in parameters_of([optimizer]) if p in _REPLACED]
    if names:
        raise StateError(
            f"this {type(optimizer).__qualname__} holds parameters that meshc.compile has replaced: {join_names(names, 4)}\n"
            "  why: compiling replaces a model's parameters by DTensors; stepping the old ones would train nothing\n"
            "  what to do: build the optimizer after meshc.compile, from model.parameters()"
        )
