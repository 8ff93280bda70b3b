"""What is changed of torch and transformers while a model is traced is as before when it is over."""

from __future__ import annotations

import gc
import random
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import _pytree as of_fx
from torch.utils import _pytree as pytree

import meshc
from tests.broad import broad
from tests.cache_name import CACHE
from tests.zoo.run import case


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def compile_small() -> None:
    meshc.compile(Small().requires_grad_(False), meshc.Mesh("tp=2"), args=(torch.randn(2, 4),))


def test_what_the_user_has_compiled_stays_compiled() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(module)
        return module.forward

    @torch.compile(backend=backend)
    def mine(x: Tensor) -> Tensor:
        return x * 2 + 1

    mine(torch.ones(3))
    assert len(compiled) == 1
    compile_small()
    mine(torch.ones(3))
    assert len(compiled) == 1, "the call before compiled it, for the same shape"
    mine(torch.ones(5))
    assert len(compiled) == 2, "another size is another graph, or one for all sizes: what torch knew of the function is still known"
    sizes = [node.meta["example_value"].shape[0] for node in compiled[1].graph.nodes if hasattr(node.meta.get("example_value"), "shape")]
    assert not all(isinstance(size, int) for size in sizes)


def test_sizes_of_an_earlier_trace_do_not_open_those_of_the_next() -> None:
    for rows in (2, 6, 8):
        program = meshc.compile(Small().requires_grad_(False), meshc.Mesh("tp=2"), args=(torch.randn(rows, 4),))
        assert f"[{rows}, 4]" in str(program) or f"batch {rows}" in str(program)


def state(model: nn.Module) -> dict[str, Any]:
    """What a process has set, of what a trace might set."""
    found: dict[str, Any] = {
        "trees": set(pytree.SUPPORTED_NODES),
        "trees, by name": set(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE),
        "trees of fx": set(of_fx.SUPPORTED_NODES),
        "warnings": list(warnings.filters),
        "draws": (torch.get_rng_state().tolist(), random.getstate()),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "onednn": (torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "garbage": gc.get_threshold(),
        "settings": {name: repr(getattr(torch._dynamo.config, name)) for name in torch._dynamo.config.get_config_copy()},
        "hooks": {name: (len(child._forward_hooks), len(child._forward_pre_hooks)) for name, child in model.named_modules()},
        "attributes": {name: sorted(vars(child)) for name, child in model.named_modules()},
        "forwards": {name: type(child).forward for name, child in model.named_modules()},
    }
    for module in ("torch._dynamo", "torch._dynamo.functional_export", "torch.nn.attention.flex_attention", "transformers.masking_utils"):
        held = {name: id(value) for name, value in vars(sys.modules[module]).items() if callable(value) and not name.startswith("__")}
        found[module] = held
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable

    for kind in (SideEffects, BuiltinVariable, DebuggingVariable, LoggingLoggerVariable, torch.Tensor, nn.Module):
        found[kind.__name__] = {name: id(value) for name, value in vars(kind).items() if callable(value)}
    for module, table in (
        ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
        ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
        ("transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS"),
    ):
        held = getattr(sys.modules.get(module), table, {})
        found[table] = {name: held.get(name) for name in held}
    return found


@pytest.mark.parametrize("name", [broad("llama"), "mixtral"])
def test_a_process_is_as_before_when_a_stock_model_has_been_compiled(name: str) -> None:
    import torch.nn.attention.flex_attention
    from torch._dynamo import functional_export  # noqa: F401

    one = case(name)
    model = one.model.eval().requires_grad_(False)
    with torch.no_grad():
        inputs = {"input_ids": one.kwargs["input_ids"], "use_cache": True}
        other = case(name).model.eval().requires_grad_(False)
        meshc.compile(other, meshc.Mesh("tp=2"), kwargs=inputs)  # now what torch imports lazily is there
        before = state(model)
        program = meshc.compile(model, meshc.Mesh("tp=2"), kwargs=inputs)
        after = state(model)
    assert any(port.name.startswith(CACHE) for port in program.compiled.outputs), "its caches are outputs"
    for what, value in before.items():
        assert after[what] == value, what
