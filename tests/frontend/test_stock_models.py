"""What stock `transformers` models need to be traced."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import meshc
from meshc.frontend.libraries import stock_models
from meshc.ir import trees
from tests.broad import broad
from tests.captured import Captured
from tests.zoo.recurrent import FAMILIES as RECURRENT
from tests.zoo.run import case


def test_a_cache_of_states_comes_back_as_it_left() -> None:
    """A state-space model's cache, layer by layer, and a decoder's beside its encoder's."""
    model = case("mamba").model.eval()
    stock_models.learn_caches()
    with torch.no_grad():
        made = model(torch.randint(3, 65, (2, 5))).cache_params
    leaves, spec = trees.flatten(made)
    again = trees.unflatten(leaves, spec)
    assert isinstance(again, DynamicCache) and len(again.layers) == 2 and len(leaves) == 4
    for before, after in zip(made.layers, again.layers, strict=True):
        assert torch.equal(before.conv_states[0], after.conv_states[0])
        assert torch.equal(before.recurrent_states[0], after.recurrent_states[0])
        assert before.has_previous_state == after.has_previous_state
    pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert isinstance(trees.unflatten(*trees.flatten(pair)), EncoderDecoderCache)


def test_a_restored_cache_of_states_goes_on_as_the_model_left_it() -> None:
    model = case("mamba").model.eval()
    stock_models.learn_caches()
    with torch.no_grad():
        ids = torch.randint(3, 65, (2, 6))
        whole = model(ids).logits[:, -1]
        made = model(ids[:, :5]).cache_params
        again = trees.unflatten(*trees.flatten(made))
        torch.testing.assert_close(model(ids[:, 5:], cache_params=again).logits[:, -1], whole)


@pytest.mark.parametrize("name", ["qwen3_next", "zamba"])
def test_a_cache_of_states_and_of_keys_goes_on_as_the_model_left_it(name: str) -> None:
    """Of Qwen3-Next a layer has either, of Zamba some have both."""
    model = RECURRENT[name].case(name).model.eval()
    stock_models.learn_caches()
    with torch.no_grad():
        ids = torch.randint(3, 65, (2, 6))
        whole = model(ids).logits[:, -1]
        made = model(ids[:, :5], use_cache=True).past_key_values
        again = trees.unflatten(*trees.flatten(made))
        assert [type(layer) for layer in again.layers] == [type(layer) for layer in made.layers]
        torch.testing.assert_close(model(ids[:, 5:], past_key_values=again).logits[:, -1], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "collected"), [broad("llama", "hidden_states"), broad("mixtral", "router_logits")])
def test_what_a_model_collects_that_was_called_before_is_there_once(name: str, collected: str) -> None:
    """A call leaves its hooks in the inner model; a mixture's loss of balance is of what they collect."""
    one = case(name)
    model, how = one.model.eval(), {**one.call_kwargs, f"output_{collected}": True, "use_cache": False}
    wanted = model(**how)
    hooks = [list(module._forward_hooks) for module in model.modules()]
    program = meshc.compile(model, meshc.Mesh("dp=2"), kwargs=how)
    found = [port for port in program.compiled.outputs if port.name.startswith(f"{collected}.")]
    assert len(found) == len(wanted[collected]) and hooks == [list(module._forward_hooks) for module in model.modules()]


def test_flags_among_the_inputs_are_no_inputs_of_the_program() -> None:
    """CLIP's `return_loss=True` stands between its tensors and after them."""
    program = Captured(case("clip"), train=True, double=False).program("tp=2")
    assert [port.name for port in program.inputs if port.kind == "input"] == ["input_ids", "pixel_values"]
