"""meshc's lists of what autocast casts are torch's, and each policy is what torch's kernels do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshc.frontend.autocast_policy import DISPATCH_KEYS, INSIDE, POLICIES, Policy
from tests.passes.trace.autocast import BF16, F32, as_in_capture


@pytest.fixture(autouse=True)
def _as_in_capture() -> Iterator[None]:
    with as_in_capture():
        yield


class Seen(Exception):
    """What reached an operator: its tensors' dtypes and its dtype arguments."""


class AtTheOperator(TorchDispatchMode):
    """Stops where the autocast kernel hands over to the operator."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "prim" or function is torch.ops.aten.to.dtype:
            return function(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        floating = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
        raise Seen(floating, {leaf for leaf in leaves if isinstance(leaf, torch.dtype)})


def argument(kind: str, tensor: Callable[[], Tensor]) -> Any:
    """Some value of a schema's type; an autocast kernel looks at tensors only."""
    if kind in ("Tensor", "Optional[Tensor]"):
        return tensor()
    if kind == "List[Tensor]":
        return [tensor(), tensor()]
    if kind == "List[Optional[Tensor]]":
        return [torch.ones(2, dtype=torch.int64)]
    if kind.startswith("Optional"):
        return None
    scalars = {"int": 1, "number": 1, "SymInt": 1, "float": 1.0, "bool": False, "str": "dimname::same"}  # a name of a dim must be qualified
    return scalars[kind] if kind in scalars else [scalars[kind.removeprefix("List[").removesuffix("]")]]


def reaches(device: str, name: str, dtype: torch.dtype) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """The dtypes with which torch's autocast kernel calls operator `name` when all its operands are `dtype`, in a bfloat16 region."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with FakeTensorMode():
        values = [(a, argument(str(a.type), lambda: torch.empty(2, dtype=dtype, device=device))) for a in function._schema.arguments]
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, BF16)
        try:
            with torch._C._AutoDispatchBelowAutograd(), AtTheOperator():
                function(*[v for a, v in values if not a.kwarg_only], **{a.name: v for a, v in values if a.kwarg_only})
        except Seen as seen:
            return seen.args  # type: ignore[return-value]
        finally:
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])
    raise AssertionError(f"{name} was not called")


BEHAVIOUR = {
    # operands reach the operator as (from float32, from bfloat16), and with these dtype arguments
    ((BF16, BF16), ()): Policy.LOWER,
    ((F32, F32), ()): Policy.FLOAT32,
    ((F32, BF16), (F32,)): Policy.FLOAT32_RESULT,
    ((F32, BF16), ()): Policy.WIDEST,
}


@pytest.mark.parametrize("device", POLICIES)
def test_canary_the_lists_are_torchs(device: str) -> None:
    """If this fails after an update of torch: see TORCH_LIBRARY_IMPL(aten, Autocast...) in aten/src/ATen/autocast_mode.cpp."""
    key = DISPATCH_KEYS[device]
    registered = {name for name in torch._C._dispatch_get_all_op_names() if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}
    registered.discard("aten::_cudnn_rnn")  # in CUDA builds; Policy.CUDNN stands for it
    registered = {name for name in registered if not name.startswith("torchvision::")}  # a library's own, where it has been imported
    assert {name for name, policy in POLICIES[device].items() if policy is not Policy.CUDNN} == registered
    assert not INSIDE[device].keys() & POLICIES[device].keys()


@pytest.mark.parametrize("device", POLICIES)
def test_canary_each_policy_is_what_torchs_kernel_does(device: str) -> None:
    wrong = {}
    for name, policy in POLICIES[device].items():
        if policy is Policy.CUDNN:
            continue
        if policy is Policy.REFUSED:
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                reaches(device, name, F32)
            continue
        (high, asked), (low, _) = reaches(device, name, F32), reaches(device, name, BF16)
        assert len(high) == len(low) == 1, name
        behaviour = BEHAVIOUR.get(((*high, *low), tuple(asked)))
        if behaviour is not policy:
            wrong[name] = behaviour
    assert wrong == {}
