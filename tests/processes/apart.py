"""Ranks that go apart without a failure: one is late, has no more data, or saves beside its next steps. Each function is one launch."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import meshc
from meshc.runtime.failure import watch
from meshc.runtime.run import session
from tests.models import Case, mlp
from tests.processes.reference import sgd
from tests.processes.session import device_mesh


def step_of(case: Case, mesh: Any) -> meshc.Program:
    return meshc.compile(meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss), mesh, kwargs=case.call_kwargs)


def evaluate(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.1)


def late(_: str) -> None:
    """Rank 1 comes late to the compilation and to the third call: it is named twice, and the run goes on."""
    mesh, case = device_mesh("dp=2"), mlp()
    if dist.get_rank() == 1:
        evaluate(4)
    program = step_of(case, mesh)
    for number in range(4):
        if number == 2 and dist.get_rank() == 1:
            evaluate(5)
        program(**case.call_kwargs)
    print("finished", flush=True)


def out_of_data(_: str) -> None:
    """Rank 1 has two batches, the others four."""
    mesh, case = device_mesh("dp=2"), mlp()
    program = step_of(case, mesh)
    for _number in range(2 if dist.get_rank() == 1 else 4):
        program(**case.call_kwargs)
    if dist.get_rank() == 1:
        evaluate(4)


def destroyed(_: str) -> None:
    """Likewise, and rank 1 stays when it has destroyed its process group."""
    mesh, case = device_mesh("dp=2"), mlp()
    program = step_of(case, mesh)
    for _number in range(2 if dist.get_rank() == 1 else 4):
        program(**case.call_kwargs)
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        evaluate(12)
        print("finished", flush=True)


def extra(_: str) -> None:
    """Rank 0 evaluates once more than rank 1, which is at a barrier of its own by then, and gives up after a while."""
    mesh, case = device_mesh("dp=2"), mlp()
    program = meshc.compile(case.model.requires_grad_(False), mesh, kwargs=case.kwargs)
    program(**case.kwargs)
    if dist.get_rank() == 0:
        program(**case.kwargs)
    else:
        threading.Timer(8.0, os._exit, (0,)).start()
    dist.barrier()


def another_call(_: str) -> None:
    """Rank 0 evaluates while rank 1 takes its next step: both programs are there."""
    mesh, case = device_mesh("dp=2"), mlp()
    program = step_of(case, mesh)
    with torch.no_grad():
        case.model(**case.kwargs)
    program(**case.call_kwargs)
    with torch.no_grad():
        case.model(**case.kwargs) if dist.get_rank() == 0 else program(**case.call_kwargs)


def interrupted(_: str) -> None:
    """A Ctrl-C comes to all ranks in the third step, and its state is saved behind it; another to rank 1, in a step that rank 0 does not
    come to."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    mesh, case = device_mesh("dp=2"), mlp()
    program = step_of(case, mesh)
    work, calls = session.Session.work, itertools.count(1)

    def at_work(self: session.Session, *args: Any) -> Any:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return work(self, *args)

    setattr(session.Session, "work", at_work)  # noqa: B010 - as in ending.py
    try:
        while True:
            program(**case.call_kwargs)
    except KeyboardInterrupt:
        state = program.state_dict(full=True)
    finally:
        dist.barrier()
    print("saved", program.store.step, "model" in state, flush=True)
    if dist.get_rank() == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        program(**case.call_kwargs)
    evaluate(60)


def wrong_argument(_: str) -> None:
    """Rank 1 misspells an argument that is looked at before anything else."""
    mesh, case = device_mesh("dp=2"), mlp()
    inputs = "globle" if dist.get_rank() == 1 else "global"
    meshc.compile(meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss), mesh, inputs=inputs)(
        **case.call_kwargs
    )


def busy_elsewhere(_: str) -> None:
    """Rank 1 raises between two steps, while rank 0 is in code of its own that does not end."""
    mesh, case = device_mesh("dp=2"), mlp()
    step_of(case, mesh)(**case.call_kwargs)
    if dist.get_rank() == 1:
        raise ValueError("the planted error")
    evaluate(60)
    print("finished", flush=True)


def saves_beside(folder: str) -> None:
    """What `async_save` writes beside three further steps is the state that it was given, and steps are what they are without it."""
    mesh, case = device_mesh("dp_shard=2"), mlp(torch.float64)
    program = step_of(case, mesh)
    for _number in range(2):
        program(**case.call_kwargs)
    then = {name: value.full_tensor().clone() for name, value in case.model.state_dict().items()}
    saved = dcp.async_save({"program": program}, checkpoint_id=folder)
    losses = [program(**case.call_kwargs).item() for _number in range(3)]
    saved.result(timeout=60)
    dcp.load({"program": program}, checkpoint_id=folder)
    for name, value in case.model.state_dict().items():
        assert torch.equal(value.full_tensor(), then[name]), name
    assert [program(**case.call_kwargs).item() for _number in range(3)] == losses, losses
    print("finished", flush=True)


def run(name: str, argument: str = "") -> None:
    watch.LATE_S = 1.5
    dist.init_process_group("gloo")
    ways = (late, out_of_data, destroyed, extra, another_call, interrupted, wrong_argument, busy_elsewhere, saves_beside)
    next(way for way in ways if way.__name__ == name)(argument)
    sys.stdout.flush()
