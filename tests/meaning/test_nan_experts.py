"""A NaN among tokens that are routed to experts stays with the tokens that it is in."""

from __future__ import annotations

from math import nan

import pytest
import torch

import meshc
from meshc.runtime.simulator.simulation import simulate
from tests.broad import broad
from tests.zoo.experts import FAMILIES, shallow


@pytest.mark.parametrize("family", ["olmoe", broad("deepseek_v3")])
@pytest.mark.parametrize("mesh", ["ep=3", broad("dp=2,ep=2"), broad("ep=4")])
def test_a_nan_stays_in_its_row(family: str, mesh: str) -> None:
    """Its router's weights are NaN and its choices whatever the largest of NaN is; tokens of other rows go through the same experts."""
    found = shallow(family) if family == "olmoe" else FAMILIES[family].case(family)
    model = found.model.double().eval()
    ids = found.kwargs["input_ids"].clone()
    ids[ids == 9] = 10
    ids[1, 4] = 9
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = nan  # type: ignore[operator, index]
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"  # type: ignore[union-attr]
        wanted = model(input_ids=ids).logits
    with torch.no_grad():
        program = meshc.compile(model, meshc.Mesh(mesh), kwargs={"input_ids": ids})
    spec = program.compiled
    values = {f"parameter:{name}": p.detach() for name, p in model.named_parameters()}
    values |= {f"buffer:{name}": b for name, b in model.named_buffers()} | {"input:input_ids": ids}
    made = simulate(spec, {p.key: values[p.key] for p in spec.inputs if p.kind != "constant"})["output:logits"]  # type: ignore[arg-type]
    assert wanted[1, 4:].isnan().all() and not wanted[0].isnan().any()
    torch.testing.assert_close(made, wanted, equal_nan=True)
