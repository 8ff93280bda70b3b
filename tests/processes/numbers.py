"""Ranks that step with other numbers than the others, or in two threads: each function in a launch of its own, and what this rank got."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import meshc
from meshc.runtime.failure.failed_rank import world_board
from tests.models import Case, mlp, nanogpt
from tests.processes.reference import adamw, sgd
from tests.processes.session import device_mesh

DEFAULTS = meshc.Options()


def trained(mesh: Any, options: meshc.Options = DEFAULTS) -> tuple[meshc.Program, torch.optim.Optimizer, Case]:
    case = mlp()
    optimizer = sgd(case.model.parameters())
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss)
    return meshc.compile(step, mesh, kwargs=case.call_kwargs, options=options), optimizer, case


def for_ever(step: Callable[[], Any]) -> None:
    """Until this rank is told; a minute at most."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        step()


def another_rate(mesh: Any) -> None:
    """Rank 1 forgets its learning rate in step 3."""
    program, optimizer, case = trained(mesh)
    for _ in range(2):
        program(**case.call_kwargs)
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.2
    for_ever(lambda: program(**case.call_kwargs))


def a_scheduler_on_one_rank(mesh: Any) -> None:
    """Three steps, over before anybody has read a beat."""
    program, optimizer, case = trained(mesh)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(3):
        program(**case.call_kwargs)
        if dist.get_rank() == 0:
            scheduler.step()


def with_weight(mesh: Any) -> tuple[Callable[[], torch.Tensor], dict[str, float]]:
    """A step whose loss is weighed by what stands in a dict."""
    case, weights = mlp(), {"beta": 0.0}
    optimizer = sgd(case.model.parameters())
    loss = case.loss
    assert loss is not None
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=lambda out, target: loss(out, target) * (1 + weights["beta"]))
    program = meshc.compile(step, mesh, kwargs=case.call_kwargs)
    return lambda: program(**case.call_kwargs), weights


def a_weight_of_the_loss(mesh: Any) -> None:
    """Ranks change it together, to and fro; then rank 1 alone."""
    step, weights = with_weight(mesh)
    for weights["beta"] in (0.0, 1.0, 0.0):
        step()
    if dist.get_rank() == 1:
        weights["beta"] = 1.0
    for_ever(step)


def a_new_weight_of_the_loss(mesh: Any) -> None:
    step, weights = with_weight(mesh)
    step()
    weights["beta"] = 1.0 + dist.get_rank()
    for_ever(step)


def a_weight_that_is_an_input(mesh: Any) -> None:
    step, weights = with_weight(mesh)
    for weights["beta"] in (0.0, 1.0, 2.0, 3.0):
        step()
    weights["beta"] = 4.0 + dist.get_rank()
    for_ever(step)


def saved_after_another_rate(mesh: Any) -> None:
    """For one step, before the state is saved: nothing is given away."""
    program, optimizer, case = trained(mesh)
    for step in range(3):
        optimizer.param_groups[0]["momentum"] = 0.5 if step == 1 and dist.get_rank() == 1 else 0.9
        program(**case.call_kwargs)
    program.state_dict(full=True)


def another_rate_in_module_mode(mesh: Any) -> None:
    """The user's own optimizer; the numbers differ where it is built."""
    case = mlp()
    program = meshc.compile(case.model, mesh, kwargs=case.kwargs)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3 * (1 + dist.get_rank()))

    def step() -> None:
        case.loss_of(program(**case.kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for_ever(step)


def a_draw_on_one_rank(mesh: Any) -> None:
    """Rank 0 alone begins a layer anew, behind the second step."""
    program, _, case = trained(mesh)
    for _ in range(2):
        program(**case.call_kwargs)
    if dist.get_rank() == 0:
        torch.nn.init.normal_(next(case.model.parameters()))
    for_ever(lambda: program(**case.call_kwargs))


def another_size(mesh: Any) -> None:
    """Rank 1 goes on with batches of 4 rows; both have both programs, whose gradients are of equal shapes."""
    program, _, case = trained(mesh, meshc.Options(debugging=meshc.Debugging(check_inputs=0)))
    batches = [{name: value[:rows] for name, value in case.call_kwargs.items()} for rows in (6, 4)]
    for batch in (batches[0], batches[1]) * 5:
        program(**batch)
    for_ever(lambda: program(**batches[dist.get_rank()]))


def two_threads(mesh: Any) -> None:
    """A thread calls the program while the main thread does."""
    program, _, case = trained(mesh)
    stopped: list[BaseException] = []

    def call() -> None:
        try:
            for_ever(lambda: program(**case.call_kwargs))
        except meshc.MeshcError as error:
            stopped.append(error)

    thread = threading.Thread(target=call, name="the second")
    thread.start()
    try:
        for_ever(lambda: program(**case.call_kwargs))
    finally:
        thread.join(20)
        print(*[f"the second: {type(error).__name__}: {error}" for error in stopped], flush=True)


def a_save_beside_a_step(mesh: Any) -> None:
    """A thread gathers the state while the main thread trains."""
    program, _, case = trained(mesh)
    program(**case.call_kwargs)
    thread = threading.Thread(target=lambda: for_ever(lambda: program.state_dict(full=True)), daemon=True)
    thread.start()
    for_ever(lambda: program(**case.call_kwargs))


def all_is_well(mesh: Any) -> None:
    """Schedulers on both ranks, another shape, a loaded state, a second program with random numbers, ranks that are late: no word."""
    program, optimizer, case = trained(mesh)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    random = nanogpt(layers=1, dropout=0.1)
    drawing = meshc.compile(random.model, mesh, kwargs=random.kwargs)
    for step in range(20):
        rows = 4 if step % 5 == 4 else 6
        program(**{name: value[:rows] for name, value in case.call_kwargs.items()})
        with torch.no_grad():
            drawing(**random.kwargs)
        scheduler.step()
        if step == 13:
            time.sleep(1.5 * dist.get_rank())
        if step == 7:
            program.load_state_dict(copy.deepcopy(program.state_dict()))
    module = mlp()
    called = meshc.compile(module.model, mesh, kwargs=module.kwargs)
    own = adamw(module.model.parameters())
    for _ in range(30):
        module.loss_of(called(**module.kwargs)).backward()
        own.step()
    board = world_board()
    board.settle(20)
    streams = board.numbers.to_say()
    assert len(streams) == 7, streams  # two shapes, which of them calls have, the second program, the optimizer; runs, and changes
    assert board.numbers.has_compared([1 - dist.get_rank()], streams), streams


WAYS: tuple[Callable[[Any], None], ...] = (
    another_rate, a_weight_of_the_loss, a_new_weight_of_the_loss, a_weight_that_is_an_input, a_scheduler_on_one_rank,
    saved_after_another_rate, another_rate_in_module_mode, another_size, two_threads, a_draw_on_one_rank, a_save_beside_a_step, all_is_well,
)  # fmt: skip


def run(name: str) -> None:
    dist.init_process_group("gloo")
    mesh = device_mesh(f"dp={dist.get_world_size()}")
    try:
        next(way for way in WAYS if way.__name__ == name)(mesh)
    except meshc.MeshcError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(3)
    print("no error", flush=True)
