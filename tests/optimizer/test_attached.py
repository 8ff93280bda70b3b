"""The state that a compiled optimizer has, as torch's own has it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import Parameter

from meshc.errors import StateError
from meshc.optimizer import optimizer as mo
from tests.optimizer.stepped import parameters


def test_attach_state():
    old = parameters()
    optimizer = torch.optim.AdamW([{"params": old[:2], "lr": 0.1, "note": "kept"}, {"params": old[2:]}])
    spec = mo.describe(optimizer)
    new = [Parameter(p.detach() + 1) for p in old]
    states = {p: {slot.name: slot.initial(p) for slot in spec.slots_of(p)} for p in old[:3]}
    lists = [group["params"] for group in optimizer.param_groups]
    mo.attach_state(optimizer, dict(zip(old, new, strict=True)), states)
    assert [group["params"] for group in optimizer.param_groups] == [new[:2], new[2:]]
    assert all(group["params"] is held for group, held in zip(optimizer.param_groups, lists, strict=True))
    assert optimizer.param_groups[0]["note"] == "kept"
    assert set(map(id, optimizer.state)) == set(map(id, new[:3])) and optimizer.state[new[0]]["exp_avg"] is states[old[0]]["exp_avg"]
    for p in new:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[new[3]]["step"].item() == 1.0
    with pytest.raises(StateError, match="1 parameters .* are not in its groups"):
        mo.attach_state(optimizer, {old[0]: new[0]}, {})


def test_attached_state_has_torchs_layout():
    optimizer = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    spec = mo.describe(optimizer)
    params = optimizer.param_groups[0]["params"]
    names = [slot.name for slot in spec.slots_of(params[0])]
    assert names == ["momentum_buffer", mo.FIRST]
    mo.attach_state(optimizer, {}, {p: {slot.name: slot.initial(p) for slot in spec.slots_of(p)} for p in params})
    assert {name for state in optimizer.state.values() for name in state} == {"momentum_buffer"}


def test_schedulers_do_not_warn_after_a_compiled_step():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    mo.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    unmarked = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters(), lr=0.1), 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        unmarked.step()
