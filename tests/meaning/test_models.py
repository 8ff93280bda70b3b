"""The test models themselves: they run, train every parameter, and are the same on every call."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.models import FACTORIES, FLOAT32_INSIDE, IGNORED, Case, bert, nanogpt


def run(case: Case) -> torch.Tensor:
    torch.manual_seed(0)
    loss = case.loss_of(case.model(**case.kwargs))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_parameter_gets_a_gradient(name: str, dtype: torch.dtype) -> None:
    case = FACTORIES[name](dtype)
    loss = run(case)
    assert loss.shape == ()
    assert loss.dtype == (torch.float32 if name in FLOAT32_INSIDE else dtype)
    for parameter_name, parameter in case.model.named_parameters():
        assert parameter.dtype == dtype
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", FACTORIES)
def test_a_case_is_the_same_on_every_call(name: str) -> None:
    first, second = FACTORIES[name](torch.float64), FACTORIES[name](torch.float64)
    assert run(first).item() == run(second).item()
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("name, classes", [("llama", 65), ("gpt2", 65), ("bert", 67), ("nanogpt", 65)])
def test_an_untrained_language_model_knows_nothing(name: str, classes: int) -> None:
    """The loss of a model that finds every token equally likely is the logarithm of their number."""
    assert run(FACTORIES[name](torch.float64)).item() == pytest.approx(math.log(classes), abs=0.15)


def test_gpt2_and_bert_keep_their_stock_dropout() -> None:
    for name in ("gpt2", "bert"):
        case = FACTORIES[name]()
        torch.manual_seed(0)
        first = case.loss_of(case.model(**case.kwargs))
        assert first.item() != case.loss_of(case.model(**case.kwargs)).item()


def test_nanogpt_head_is_tied_unless_told_otherwise() -> None:
    tied, untied = nanogpt().model, nanogpt(tied=False).model
    assert tied.lm_head.weight is tied.wte.weight
    assert untied.lm_head.weight is not untied.wte.weight


def test_padded_bert_ignores_its_padding() -> None:
    case = bert(torch.float64, padded=True)
    case.model.eval()
    mask = case.kwargs["attention_mask"]
    assert mask.sum().item() == 6 * 12 - (0 + 1 + 2 + 3 + 0 + 1)
    changed = {**case.kwargs, "input_ids": torch.where(mask.bool(), case.kwargs["input_ids"], 5)}
    before, after = case.model(**case.kwargs).logits, case.model(**changed).logits
    kept = mask.bool()
    torch.testing.assert_close(before[kept], after[kept])


def test_language_model_labels_are_ignored_unevenly() -> None:
    """Rows with different numbers of labels: only then does a mean of the ranks' means differ from the mean."""
    for name in ("llama", "gpt2", "bert"):
        counts = (FACTORIES[name]().kwargs["labels"] != IGNORED).sum(1)
        assert counts.unique().numel() > 1


def test_loss_of_a_model_without_one() -> None:
    case = FACTORIES["mlp"](torch.float64)
    expected = F.cross_entropy(case.model(case.kwargs["x"]), case.target_kwargs["target"])
    assert case.loss_of(case.model(**case.kwargs)).item() == expected.item()
