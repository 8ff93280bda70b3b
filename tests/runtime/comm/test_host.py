"""The second pool of a CPU rank: what lies there is counted, and gone when nobody has it."""

from __future__ import annotations

import torch

from meshc.runtime.comm import host

CPU = torch.device("cpu")


def test_copies_there_and_back() -> None:
    complex_ones = torch.randn(2, dtype=torch.complex64)
    for x in (torch.randn(3, 5).t(), torch.arange(6), torch.tensor([True, False]), complex_ones, torch.empty(0, 3)):
        there = host.to_host(x).wait()
        assert there.data_ptr() != x.data_ptr() or not x.numel()
        assert there.dtype == x.dtype and torch.equal(there, x) and there.is_contiguous()
        back = host.from_host(there, CPU).wait()
        assert torch.equal(back, x) and (back.data_ptr() != there.data_ptr() or not x.numel())


def test_what_replaces_a_value_lies_in_its_place() -> None:
    place = host.copy_to_host(torch.zeros(4), CPU)
    assert host.to_host(torch.ones(4), place).wait() is place and place.tolist() == [1.0] * 4


def test_bytes_are_counted_until_nobody_has_them() -> None:
    before = host.HELD.now
    host.HELD.begin()
    x = host.copy_to_host(torch.zeros(1000), CPU)
    view = x[10:20]
    y = host.copy_to_host(torch.zeros(500, dtype=torch.float64), CPU)
    assert (host.HELD.now - before, host.HELD.most - before) == (8000, 8000)
    del y, x
    assert host.HELD.now - before == 4000
    assert view.sum() == 0
    del view
    assert (host.HELD.now - before, host.HELD.most - before) == (0, 8000)
