"""The compiled kernel of random numbers: its build, what there is without a compiler, and the bits of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshc.errors import MeshcError
from meshc.frontend.reference_random import ReferenceRandom
from meshc.ops import philox, random
from tests.ops.drawn import FLOATS, ops, seeded


def test_the_build_is_cached_and_named_by_its_source(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(philox, "FLAGS", ("-O0", *philox.FLAGS[1:]))  # which builds in no time

    def built() -> list[Any]:
        philox._compile_library()
        return sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "cache").glob("*.so"))

    first = built()
    assert len(first) == 1 and built() == first
    changed = tmp_path / "philox.cpp"
    changed.write_text(philox.SOURCE.read_text() + "\n// changed\n")
    monkeypatch.setattr(philox, "SOURCE", changed)
    assert len(built()) == 2 and first[0] in built()


def test_no_compiler_warns_once_with_the_price(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    philox.library.cache_clear()
    philox._warn_once.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="cost: about 60 ns") as caught:
            drawn = random.uniform(random.seed_step(0, 0), 0, (4,)), random.uniform(random.seed_step(0, 0), 0, (4,))
        assert len(caught) == 1
    finally:
        monkeypatch.undo()
        philox.library.cache_clear()
        philox._warn_once.cache_clear()
    assert torch.equal(drawn[0], random.uniform(random.seed_step(0, 0), 0, (4,)))


TILES = [((1000,), (1000,), (0,)), ((50, 60, 64), (7, 13, 32), (3, 4, 32)), ((50, 60, 70), (7, 13, 3), (3, 4, 5))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", TILES)
def test_cuda_draws_the_same_bits(shape: tuple[tuple[int, ...], ...]) -> None:
    here, there = seeded(), seeded().cuda()
    for dtype in FLOATS:
        assert torch.equal(ops.uniform(here, 1, *shape, dtype), ops.uniform(there, 1, *shape, dtype).cpu())
        assert torch.equal(ops.normal(here, 1, *shape, dtype), ops.normal(there, 1, *shape, dtype).cpu())
        x = torch.randn(shape[1]).to(dtype)
        ours, theirs = ops.dropout(x, here, 1, 0.1, *shape), ops.dropout(x.cuda(), there, 1, 0.1, *shape)
        assert torch.equal(ours[0], theirs[0].cpu()) and torch.equal(ours[1], theirs[1].cpu())
        assert torch.equal(ops.dropout_backward(x, ours[1], 0.1), ops.dropout_backward(x.cuda(), theirs[1], 0.1).cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_attention_dropout_needs_the_math_kernel() -> None:
    q = torch.randn(2, 3, 16, 16, device="cuda", dtype=torch.float16)
    with ReferenceRandom(0), pytest.raises(MeshcError, match="SDPBackend.MATH"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    with ReferenceRandom(0) as reference, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert reference.calls == 1
