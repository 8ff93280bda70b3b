"""What a plan may call the dims of stock routed experts: `experts` splits them by expert, `ffn` each of them inside."""

from __future__ import annotations

import pytest
import torch

from meshc.frontend import call_keys
from meshc.frontend.train_step import TracedFunction
from meshc.ir.graph import placeholders
from meshc.ir.mesh import Mesh
from meshc.options import Options
from meshc.passes.driver import compile_program
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request
from tests.broad import broad
from tests.zoo.experts import FAMILIES

IN_A_LOOP = ("switch_transformers", "nllb_moe")
"""Whose experts are modules: their weights are stacked while they are traced."""

ROWS_OF_ALL = ("dbrx",)
"""Whose weights have a row for each expert and hidden unit, one dim."""

EVERY_TIME = ("mixtral", "deepseek_v3", "gpt_oss", *IN_A_LOOP, *ROWS_OF_ALL)


def block(family: str) -> PlacedModel:
    """The first layer of experts alone, its router included, with names for its factors."""
    model = FAMILIES[family].case(family).model.eval()
    path = next(path for path, _ in model.named_modules() if path.endswith(".experts"))
    layer = model.get_submodule(path.rpartition(".")[0])
    traced = TracedFunction(layer, call_keys.call_module, layer.forward)
    x = torch.randn(2, 6, 32, dtype=next(layer.parameters()).dtype)
    args, kwargs = call_keys.canonical_call(traced, (x,), {})
    with torch.no_grad():
        return compile_program.place(
            Request(
                module=layer, function=traced.function, signature=traced.signature, args=args, kwargs=kwargs, mesh=Mesh("ep=2,tp=2"),
                options=Options().having(depth="whole"),
            )
        )  # fmt: skip


@pytest.mark.parametrize("family", [one if one in EVERY_TIME else broad(one) for one in FAMILIES])
def test_experts_are_experts_and_what_is_inside_them_is_ffn(family: str) -> None:
    found = block(family)
    ports = zip(found.joint.inputs, placeholders(found.joint.graph), strict=True)
    rows = {port.name: found.factors.dims[node, 0] for port, node in ports if port.kind == "parameter"}
    weights = {
        name: [[found.names.of[factor] for factor in dim] for dim in row]
        for name, row in rows.items()
        if name.startswith("experts.") and len(row) > 1 and not name.endswith("bias")
    }
    assert weights
    for name, dims in weights.items():
        assert sum(dim.count("ffn") for dim in dims) == 1, (name, dims)
        first = [] if family in IN_A_LOOP else ["experts", "ffn"] if family in ROWS_OF_ALL else ["experts"]
        assert not first or dims[0] == first, (name, dims)
    assert "experts" in found.names.of.values()
