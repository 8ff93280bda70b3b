"""An axis that does not divide the heads of an attention: asked for it pads them, by its name alone it takes as many as go."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshc
from tests.broad import broad
from tests.meaning.test_rings import Attends, trained


@pytest.mark.parametrize(
    "heads, plan, lies, mesh",
    [
        (5, None, "f32[2, 5, 2, 4]", "cp=4"),
        broad(6, None, "f32[2, 3, 4, 4]", "cp_seq=2,cp_heads=2"),
        broad(8, None, "f32[2, 2, 8, 4]", "cp=4"),
        (6, "ulysses", "f32[2, 2, 8, 4]", "cp=4"),
        broad(6, "cp: heads@attention > seq", "f32[2, 2, 8, 4]", "cp=4"),
    ],
)
def test_by_its_name_alone_an_axis_pads_no_heads(heads: int, plan: str | None, lies: str, mesh: str) -> None:
    """Five heads over four ranks are left alone, and their positions stay split; of six, two ranks have three each, and positions stay
    split along the rest; asked for they are padded."""
    model = Attends(4 * heads, heads, is_causal=True)
    program = trained(model, "cp=4", {"x": torch.randn(2, 8, 4 * heads)}, "gather", plan)
    assert f'attention_default: "({lies}' in str(program) and str(program.compiled.mesh) == mesh
    assert any("4 ranks do not divide 6 heads, 2 do" in note for note in program.compiled.notes) == ("cp_heads" in mesh)
    assert meshc.verify(program, dtype=torch.float64).ok


def test_key_value_heads_decide_and_other_axes_come_first() -> None:
    """Six heads of queries share two of keys: over cp=4 two ranks have one each; with two ranks of tp none is left, and it is a ring."""
    config = LlamaConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2, vocab_size=64
    )
    ids = torch.randint(64, (2, 8))
    for mesh, wanted in (("cp=4", "cp_seq=2,cp_heads=2"), ("tp=2,cp=4", "tp=2,cp=4")):
        model = LlamaForCausalLM(config)
        step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        program = meshc.compile(
            step,
            meshc.Mesh(mesh),
            kwargs={"input_ids": ids, "labels": ids},
            options=meshc.Options(sequence=meshc.SplitSequence(attention="ring")),
        )
        assert str(program.compiled.mesh) == wanted
        assert meshc.verify(program, dtype=torch.float64).ok


def test_a_second_program_of_the_model_has_the_same_axes() -> None:
    model = Attends(24, 6, is_causal=True)
    trained(model, "cp=4", {"x": torch.randn(2, 8, 24)}, "ring", None)
    program = meshc.compile(model, meshc.Mesh("cp=4"), kwargs={"x": torch.randn(2, 8, 24)})
    assert str(program.compiled.plan) == "cp_seq: seq\ncp_heads: heads@attention > seq"
