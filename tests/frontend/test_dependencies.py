"""What of Python a program depends on: what another process has otherwise is named, what no code has read is not there, and code that asks
for what is its process's own is found."""

from __future__ import annotations

import functools
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.frontend import traced_code
from meshc.frontend.dependencies import Dependencies, ProcessValues
from meshc.frontend.portable_values import portable
from tests.models import llama

SCALE = 0.5
TABLE = {"shift": 1, "unread": 2}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def tripled(x: Tensor) -> Tensor:
    return x * 3


class Config:
    def __init__(self) -> None:
        self.eps = 1e-5
        self.rows = [1.0, 2.0]
        self.held = {"a": 1.0, "b": 2.0}
        self.names = {"one", "two"}


class Shifted:
    """Made in forward."""

    def __init__(self, x: Tensor) -> None:
        self.x = x + 0

    def value(self) -> Tensor:
        return self.x


class Base(nn.Module):
    window = 4

    def cut(self, x: Tensor) -> Tensor:
        return Shifted(x[: self.window] + TABLE["shift"]).value()

    def save(self) -> None:
        """Nobody's forward names it."""
        time.sleep(0)


class Model(Base):
    def __init__(self, width: int = 8, bound: float = 2.0) -> None:
        super().__init__()
        self.config = Config()
        self.up, self.norm, self.drop = nn.Linear(8, width), nn.LayerNorm(width), nn.Dropout(0.0)
        self.gate: nn.Module = nn.GELU()
        self.mask = torch.ones(8)
        self.act = lambda x: x.clamp(max=bound)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(self.drop(self.norm(self.up(x)))) * self.mask * sum(self.config.held.values()) * self.config.rows[0]
        return cast(Tensor, self.act(getattr(self, "cut")(scaled(x + self.config.eps))))  # noqa: B009  a name in quotes


def compiled(model: nn.Module, *args: object) -> Any:
    with torch.no_grad():
        return meshc.compile(model.requires_grad_(False), meshc.Mesh("dp=2"), args=args or (torch.ones(4, 8),)).compilations.last.made


def here(made: Any, model: nn.Module | None = None) -> ProcessValues:
    """Of a program's model, or of one in its place."""
    request = made.request
    return ProcessValues(model or request.module, request.function, request.args, request.kwargs)


@pytest.fixture(scope="module")
def of_one() -> tuple[Any, Dependencies]:
    """Of a model that nobody changes, as another process reads it."""
    found = compiled(Model())
    read = Dependencies.from_json(found.dependencies().to_json())
    assert read.why == "" and [*read.differences(here(found))] == []
    return found, read


def differences(one: tuple[Any, Dependencies], other: nn.Module) -> list[str]:
    return [*one[1].differences(here(one[0], other.requires_grad_(False)))]


def hooked(model: Model) -> None:
    model.up.register_forward_hook(lambda *given: None)


@pytest.mark.parametrize(
    "do, said",
    [
        (lambda m: setattr(m.norm, "eps", 1e-3), "model.norm.eps: 0.001 here, and 1e-05 there"),
        (lambda m: setattr(m.config, "eps", 1e-3), "model.config.eps: 0.001 here, and 1e-05 there"),
        (lambda m: setattr(m.drop, "p", 0.5), "model.drop.p: 0.5 here, and 0.0 there"),
        (lambda m: m.config.rows.__setitem__(0, 3.0), "model.config.rows[0]: 3.0 here, and 1.0 there"),
        (lambda m: m.config.held.update(c=3.0), "the keys of model.config.held: ('a', 'b', 'c') here, and ('a', 'b') there"),
        (lambda m: setattr(m, "gate", nn.Identity()), "model.gate: a torch.nn.modules.linear.Identity here, and a torch.nn.modules"),
        (lambda m: m.mask.fill_(2), "model.mask: torch.float32 [8] "),
        (hooked, "model.up._forward_hooks: 1 hooks here, and 0 hooks there"),
        (lambda m: setattr(m, "act", tripled), "model.act: function tests.frontend.test_dependencies.tripled"),
        (lambda m: setattr(m, "act", Model(bound=3.0).act), "Model.__init__.<locals>.<lambda>): 3.0 here, and 2.0 there"),
        (lambda m: setattr(m, "act", functools.partial(torch.clamp, max=1)), "model.act: a functools.partial here, and function tests"),
        (lambda m: setattr(m, "forward", tripled), "whether model has a forward of its own: True here, and False there"),
        (lambda m: setattr(m, "unread", "mine"), ""),
        (lambda m: setattr(m, "unread", iter([1])), ""),
        (lambda m: m.config.rows.__setitem__(1, 3.0), ""),
        (lambda m: setattr(m.config, "names", {"two", "one"}), ""),
        (lambda m: m.up.weight.data.fill_(2), ""),
    ],
)  # fmt: skip
def test_what_another_process_has_otherwise_is_named(
    of_one: tuple[Any, Dependencies], do: Callable[[Model], Any], said: str
) -> None:
    other = Model()
    assert differences(of_one, other) == []
    do(other)
    found = differences(of_one, other)
    assert any(said in line for line in found) if said else found == [], found


@pytest.mark.parametrize(
    "place, name, value, said",
    [
        (Model, "window", 5, "'window' in tests.frontend.test_dependencies.Model: True here, and False there"),
        (Model, "cut", lambda self, x: x, "'cut' in tests.frontend.test_dependencies.Model: True here, and False there"),
        (Base, "cut", lambda self, x: x, "Base.cut: function tests.frontend.test_dependencies.<lambda>"),
        (Shifted, "value", lambda self: self.x * 2, "Shifted.value: function tests.frontend.test_dependencies.<lambda>"),
        (__name__, "SCALE", 0.25, "test_dependencies.SCALE: 0.25 here, and 0.5 there"),
        (__name__, "TABLE", {"shift": 2}, "test_dependencies.TABLE['shift']: 2 here, and 1 there"),
        (__name__, "TABLE", {"shift": 1, "unread": 5}, ""),
        (__name__, "scaled", tripled, "test_dependencies.scaled: function tests.frontend.test_dependencies.tripled"),
        (nn.functional, "layer_norm", tripled, "layer_norm: function tests.frontend.test_dependencies.tripled"),
        (nn.functional, "relu", tripled, ""),
        (Base, "save", lambda self: None, ""),
    ],
)  # fmt: skip
def test_code_and_what_it_names_is_compared(
    of_one: tuple[Any, Dependencies], monkeypatch: Any, place: Any, name: str, value: object, said: str
) -> None:
    """A class's own value before that of its base, a method by the name in quotes, that of a class of which forward makes one, globals,
    what somebody has put into torch's modules; and nothing that no forward of this model names."""
    model = Model()
    if isinstance(place, str):
        monkeypatch.setitem(globals(), name, value)
    else:
        monkeypatch.setattr(place, name, value, raising=False)
    found = differences(of_one, model)
    assert any(said in line for line in found) if said else found == [], found


def test_code_is_compared_by_what_it_does_not_by_where_it_stands() -> None:
    one, same, other = (compile(text, "f.py", "exec") for text in ("x = 1 in {1, 2}", "\n\nx = 1 in {1, 2}", "x = 1 in {1, 3}"))
    assert traced_code.digest(one) == traced_code.digest(same) != traced_code.digest(other)


class Asks(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def asks_for_rank(x: Tensor) -> Tensor:
    return x * (2 if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0 else 1)


def reads_a_variable(x: Tensor) -> Tensor:
    return x * float(os.environ.get("A_USERS_SCALE", "1"))


def test_what_each_process_answers_for_itself_is_found_in_what_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "asks_for_rank (test_dependencies.py:" in (why := compiled(Asks(asks_for_rank)).dependencies().why) and "reads get_rank" in why
    found = compiled(Asks(reads_a_variable))
    read = found.dependencies()
    assert read.why == "" and read.environment == {"A_USERS_SCALE": "not set"}
    monkeypatch.setenv("A_USERS_SCALE", "2")
    assert "the variable A_USERS_SCALE: 2 here, and not set there" in [*read.differences(here(found))]


def test_code_behind_decorators_is_found() -> None:
    def counted(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: function(x)

    for function in (counted(counted(scaled)), functools.wraps(scaled)(counted(scaled)), functools.partial(scaled)):
        read = compiled(Asks(function)).dependencies()
        assert read.why == "" and any(text.startswith("function tests.frontend.test_dependencies.scaled ") for text in read.values.values())


class Kind(types.SimpleNamespace):
    pass


def test_values_have_one_text_in_all_processes() -> None:
    assert portable({"b", "a"}) == portable({"a", "b"}) == "a set of [\"'a'\", \"'b'\"]"
    assert portable(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
    assert portable(torch.nn.attention.SDPBackend.MATH) == "<SDPBackend.MATH: 0>"
    assert portable(Kind(a=1)) == portable(Kind(a=2)) == "a tests.frontend.test_dependencies.Kind"  # what it holds has places of its own
    assert portable(iter([1])) == "a list_iterator" and portable(Model()) == "a tests.frontend.test_dependencies.Model"
    assert portable(sys) == "sys" and portable(scaled).startswith("function tests.frontend.test_dependencies.scaled ")
    assert portable(Model().save).startswith("function tests.frontend.test_dependencies.Base.save ")


def test_a_stock_model_is_known_whole() -> None:
    """All that its trace runs stands somewhere, and nothing in it is each process's own; of layers that are left out of the trace, too."""
    case = llama(layers=6)
    step = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters()), loss=case.loss)
    found = meshc.compile(step, meshc.Mesh("dp=2"), kwargs=case.call_kwargs).compilations.last.made
    assert found.lowered is not None and len(found.lowered.model.seen.code) > 50
    read = found.dependencies()
    assert read.why == ""
    case.model.model.layers[4].post_attention_layernorm.variance_epsilon = 0.5
    said = [*read.differences(here(found))]
    assert said == ["model.model.layers.4.post_attention_layernorm.variance_epsilon: 0.5 here, and 1e-06 there"]
