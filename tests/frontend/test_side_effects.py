"""What a model's Python does beside computing: what a program leaves out is told by line, what is printed or logged is so once."""

from __future__ import annotations

import logging
import re
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import meshc
from meshc.frontend.side_effects import LEFT_OUT
from tests.asserting import Asserts
from tests.broad import broad

HISTORY: list[Tensor] = []
TABLE: dict[str, int] = {}
COUNT = 0
LOGGER = logging.getLogger(__name__)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.steps, self.scale, self.kept = 0, 2.0, []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x)


class CountsAll(Base):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return self.linear(x)


class Records(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.kept.append(h.detach())
        return h


class Remembers(Base):
    def forward(self, x: Tensor) -> Tensor:
        TABLE["rows"] = x.shape[0]
        return self.linear(x)


class Rebinds(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.linear(x)


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda module, args, output: HISTORY.append(output))


class Checkpointed(Base):
    def block(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


class Quiet(Base):
    """Nothing to tell: a buffer changed in place, an attribute that gets the value that it has, objects of the call's own."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 2.0
        self.seen.add_(1)
        rows = {"h": self.linear(x)}
        rows["scaled"] = rows["h"] * self.scale
        return rows["scaled"]


class Recurrent(Base):
    """A stock RNN keeps its weights in a list, which it makes anew of those that a trace has put in."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.linear(x)[:, None])
        return out


class Counted(nn.GRU):
    """Is torch's but for one line."""

    calls = 0

    def forward(self, *args: Any) -> Any:  # type: ignore[override]
        self.calls += 1
        return super().forward(*args)


def told(model: nn.Module) -> list[str]:
    """The warnings of a compilation about what is left out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        meshc.compile(model, meshc.Mesh("dp=2"), args=(torch.ones(4, 4),))
    return [str(one.message) for one in caught if LEFT_OUT in str(one.message)]


@pytest.mark.parametrize(
    "model, code",
    [
        (Counts, "self.steps += 1"),
        (CountsAll, "COUNT += 1"),
        (Records, "self.kept.append(h.detach())"),
        (Remembers, 'TABLE["rows"] = x.shape[0]'),
        (Rebinds, "self.seen = self.seen + 1"),
        (Checkpointed, "self.steps += 1"),
        (Hooked, "self.linear.register_forward_hook(lambda module, args, output: HISTORY.append(output))"),
    ],
)
def test_what_a_program_leaves_out_is_told_by_line(model: type[Base], code: str) -> None:
    made = model()
    (message,) = told(made)
    assert re.search(rf"\n  test_side_effects\.py:\d+: {re.escape(code)}\n", message), message
    assert message.count("test_side_effects.py:") == 1
    assert "what to do: return such a value as an output, or keep it in a buffer" in message
    assert (made.steps, made.kept, COUNT, HISTORY, TABLE) == (0, [], 0, [], {})


def test_assertions_of_what_tensors_hold_are_told_by_line() -> None:
    (message,) = told(Asserts())
    first, *lines, advice = message.splitlines()
    assert first == f"the model's code checks what tensors hold, {LEFT_OUT} does"
    wanted = ['assert (x > -1000).all(), "x is too small"', 'torch._assert_async(torch.isfinite(x).all(), "within a checkpointed region")']
    assert sorted(line.split(": ", 1)[1] for line in lines) == sorted(wanted)
    assert advice == "  what to do: check it before the call, or return the condition as an output and look at that"


def test_nothing_is_told_of_what_a_program_keeps() -> None:
    assert told(Quiet()) == []


@pytest.mark.parametrize("kind", [nn.LSTM, broad(nn.GRU), broad(nn.RNN)])
def test_nothing_is_told_of_what_torchs_own_modules_keep_for_themselves(kind: type[nn.RNNBase]) -> None:
    assert told(Recurrent(kind)) == []


class Blocks(Base):
    """torch enters modes of its own where it makes a block mask."""

    def forward(self, x: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, device=str(x.device))
        y = self.linear(x).view(1, 1, -1, 4)
        return flex_attention(y, y, y, block_mask=mask).view(-1, 4)


@pytest.mark.broad
def test_nothing_is_told_of_modes_that_torch_enters_and_leaves() -> None:
    assert told(Blocks()) == []


def test_a_line_of_the_users_in_a_module_of_torchs_is_told_alone() -> None:
    (message,) = told(Recurrent(Counted))
    assert re.search(r"\n  test_side_effects\.py:\d+: self\.calls \+= 1\n", message), message
    assert message.count(".py:") == 1


class Says(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        print("h", h, h.shape, [h.sum(), 3], sep="; ")
        print(f"{h.mean():.3f} and {tuple(x.shape)}")
        print("%5.2f of %s" % (h.sum(), "all") + str(x))  # noqa: UP031
        LOGGER.warning("norm %.2f at %s", h.norm(), "here")
        LOGGER.debug("not enabled %s", h)
        logging.warning("root %s", h)
        warnings.warn(f"careful with {h}", stacklevel=2)
        return h


def test_what_is_printed_and_logged_is_so_once(capsys: Any, caplog: Any) -> None:
    model = Says()
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING, logger=__name__):
        warnings.simplefilter("always")
        program = meshc.compile(model, meshc.Mesh("dp=2"), args=(torch.ones(4, 4),))
    tensor = "a tensor (float32[4, 4])"
    assert capsys.readouterr().out.splitlines() == [
        f"h; {tensor}; torch.Size([4, 4]); [a tensor (float32[]), 3]",
        "a tensor (float32[]) and (4, 4)",
        f"a tensor (float32[]) of all{tensor}",
    ]
    said = [record.getMessage() for record in caplog.records if record.name in (__name__, "root")]
    assert said == ["norm a tensor (float32[]) at here", f"root {tensor}"]
    (own,) = [one for one in caught if "careful" in str(one.message)]
    assert str(own.message) == f"careful with {tensor}" and own.filename == __file__
    notes = [note for note in program.compiled.notes if "carried out once" in note]
    names = ["print", "print", "print", f"{__name__}.warning", "warning", "warn"]
    assert [note.split(": ")[1].split(" was")[0] for note in notes] == names
    assert not [note for note in program.compiled.notes if LEFT_OUT in note]
