"""What a model or a loss reads of Python and somebody changes between calls: losses of a loop are plain PyTorch's, on one rank."""

from __future__ import annotations

import copy
import enum
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import meshc
from meshc.frontend.read_places import ATTRIBUTE, MODEL, ReadPlace
from meshc.frontend.read_values import Number, Reads

X, TARGET = torch.linspace(-1, 1, 24).reshape(6, 4), torch.linspace(1, 0, 24).reshape(6, 4)
STEPS = 6
SCALE = 1.0
WEIGHTS = {"out": 1.0}
TABLE = [1.0, 0.5]
BY_CLASS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def as_it_is(x: Tensor) -> Tensor:
    return x


def threefold(x: Tensor) -> Tensor:
    return x * 3


class Kind(enum.Enum):
    FIRST = 1
    SECOND = 2


class Scales:
    by = 1.0


class OwnScales(Scales):
    """What it has of its base may stand in itself one day."""


class DeepScales(OwnScales):
    """What it has stands in the third of its classes."""


class FlatScales:
    by = 3.0


class Differences:
    """Made in a loss."""

    def __init__(self, out: Tensor, target: Tensor) -> None:
        self.rows = out - target

    def error(self) -> Tensor:
        return (self.rows**2).mean()


SCALES = OwnScales()


@dataclass
class Config:
    alpha: float = 1.0
    doubled: bool = False
    rows: list[float] = field(default_factory=lambda: [1.0, 2.0])


class Net(nn.Module):
    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)
        self.temperature, self.step, self.config, self.act = 1.0, 0, Config(), as_it_is

    def inner(self, x: Tensor) -> Tensor:
        return x + self.offset

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(self.linear(x)) / self.temperature * self.config.alpha
        h = self.act(self.drop(h)) * (1 + min(1.0, self.step / 4))
        return h * 2 if self.config.doubled else h


Loss = Callable[[Tensor, Tensor], Tensor]
Change = Callable[[Any, int], object]
"""Of a model, before the step of a number."""
CASES: dict[str, tuple[Callable[[], tuple[Loss, Change]], int]] = {}
"""By name: what makes a loss and a change, and how many programs are compiled for STEPS steps."""


def case(programs: int) -> Callable[[Callable[[], tuple[Loss, Change]]], None]:
    def add(make: Callable[[], tuple[Loss, Change]]) -> None:
        CASES[make.__name__] = make, programs

    return add


def error(out: Tensor, target: Tensor) -> Tensor:
    return ((out - target) ** 2).mean()


@case(3)
def a_closure() -> tuple[Loss, Change]:
    beta = 0.0

    def change(model: Any, step: int) -> None:
        nonlocal beta
        beta = float(step)

    return lambda out, target: error(out, target) + beta * out.abs().mean(), change


@case(4)
def a_closure_that_decides_a_branch() -> tuple[Loss, Change]:
    beta = 0.0

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return error(out, target) + beta * out.abs().mean() if beta > 3 else error(out, target)

    def change(model: Any, step: int) -> None:
        nonlocal beta
        beta = float(step)

    return loss, change


@case(3)
def a_global() -> tuple[Loss, Change]:
    return lambda out, target: error(out, target) * SCALE, lambda model, step: globals().update(SCALE=1.0 + step)


@case(3)
def a_dicts_entry() -> tuple[Loss, Change]:
    return lambda out, target: error(out, target) * WEIGHTS["out"], lambda model, step: WEIGHTS.update(out=1.0 + step)


@case(6)
def a_dicts_keys() -> tuple[Loss, Change]:
    weights = {"": 1.0}
    return lambda out, target: error(out, target) * sum(weights.values()), lambda model, step: weights.update({str(step): 1.0})


@case(3)
def a_lists_item() -> tuple[Loss, Change]:
    return lambda out, target: error(out, target) * sum(TABLE), lambda model, step: TABLE.__setitem__(1, 1.0 + step)


@case(3)
def a_default() -> tuple[Loss, Change]:
    def loss(out: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
        return error(out, target) * scale

    return loss, lambda model, step: setattr(loss, "__defaults__", (1.0 + step,))


@case(3)
def a_partial() -> tuple[Loss, Change]:
    def scaled(out: Tensor, target: Tensor, scale: float) -> Tensor:
        return error(out, target) * scale

    loss = functools.partial(scaled, scale=1.0)
    return loss, lambda model, step: loss.keywords.update(scale=1.0 + step)


@case(3)
def an_attribute() -> tuple[Loss, Change]:
    return error, lambda model, step: setattr(model, "temperature", model.temperature * 0.9)


@case(3)
def a_count_of_steps() -> tuple[Loss, Change]:
    return error, lambda model, step: setattr(model, "step", step)


@case(3)
def a_whole_number_beside_whole_numbers() -> tuple[Loss, Change]:
    count = 1

    def change(model: Any, step: int) -> None:
        nonlocal count
        count = 1 + step

    return lambda out, target: error(out, target) + (out[:, 0] * (torch.arange(len(out)) * count)).mean(), change


@case(3)
def another_config() -> tuple[Loss, Change]:
    return error, lambda model, step: setattr(model, "config", Config(1.0 + step))


@case(1)
def another_config_of_the_same_values() -> tuple[Loss, Change]:
    return error, lambda model, step: setattr(model, "config", copy.deepcopy(model.config))


@case(2)
def a_flag() -> tuple[Loss, Change]:
    return error, lambda model, step: setattr(model.config, "doubled", step % 2 == 1)


@case(3)
def a_class() -> tuple[Loss, Change]:
    return error, lambda model, step: setattr(Net, "offset", float(step))


@case(2)
def a_method_of_the_class() -> tuple[Loss, Change]:
    first = Net.inner
    return error, lambda model, step: setattr(Net, "inner", first if step % 2 else lambda self, x: x * 2)


@case(4)
def what_a_class_has_of_its_base() -> tuple[Loss, Change]:
    return lambda out, target: error(out, target) * SCALES.by, lambda model, step: setattr(OwnScales, "by", 1.0 + step)


@case(2)
def a_class_with_fewer_bases() -> tuple[Loss, Change]:
    scales: Any = DeepScales()
    kinds = DeepScales, FlatScales
    return lambda out, target: error(out, target) * scales.by, lambda model, step: setattr(scales, "__class__", kinds[step % 2])


@case(2)
def a_method_of_what_a_loss_makes() -> tuple[Loss, Change]:
    first = Differences.error

    def change(model: Any, step: int) -> None:
        Differences.error = first if step % 2 else lambda self: self.rows.abs().mean()  # type: ignore[method-assign]

    return lambda out, target: Differences(out, target).error(), change


@case(2)
def a_method_of_the_model() -> tuple[Loss, Change]:
    return error, lambda model, step: setattr(model, "inner", types.MethodType(lambda self, x: x * 2, model))


@case(2)
def a_function() -> tuple[Loss, Change]:
    return error, lambda model, step: setattr(model, "act", threefold if step % 2 else as_it_is)


@case(2)
def a_functions_code() -> tuple[Loss, Change]:
    return error, lambda model, step: setattr(as_it_is, "__code__", threefold.__code__)


@case(6)
def a_tensor_in_place() -> tuple[Loss, Change]:
    return lambda out, target: (BY_CLASS * (out - target) ** 2).mean(), lambda model, step: BY_CLASS[1:].add_(0.5)


@case(6)
def another_tensor() -> tuple[Loss, Change]:
    weight = torch.ones(4)

    def change(model: Any, step: int) -> None:
        nonlocal weight
        weight = weight + 1

    return lambda out, target: (weight * (out - target) ** 2).mean(), change


@case(6)
def a_number_that_a_layer_takes_itself() -> tuple[Loss, Change]:
    loss = nn.SmoothL1Loss(beta=1.0)
    return loss, lambda model, step: setattr(loss, "beta", 1.0 + step)


class Frozen(dict[str, float]):
    """A configuration as diffusers has them: its entries are attributes too."""

    def __init__(self, **entries: float) -> None:
        super().__init__(**entries)
        vars(self).update(entries)


@case(1)
def entries_of_a_configuration_that_nothing_reads() -> tuple[Loss, Change]:
    """Saving a model writes its name there."""
    config: Any = Frozen(scale=2.0, other=1.0)
    return lambda out, target: error(out, target) * config.scale, lambda model, step: config.update({f"note {step}": 1.0})


@case(3)
def an_entry_of_a_configuration() -> tuple[Loss, Change]:
    config = Frozen(other=1.0, scale=2.0)
    return lambda out, target: error(out, target) * config["scale"], lambda model, step: config.update(scale=2.0 + step)


@case(6)
def entries_of_a_configuration_that_a_loop_goes_over() -> tuple[Loss, Change]:
    config = Frozen(scale=2.0)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        total = error(out, target)
        for name in config:
            total = total * config[name]
        return total

    return loss, lambda model, step: config.update({f"scale {step}": 1.5})


@case(2)
def the_order_of_keys() -> tuple[Loss, Change]:
    by_kind = {Kind.FIRST: 1.0, Kind.SECOND: 2.0}

    def change(model: Any, step: int) -> None:
        swapped = {Kind.SECOND: 1.0, Kind.FIRST: 2.0} if step % 2 else {Kind.FIRST: 1.0, Kind.SECOND: 2.0}
        by_kind.clear()
        by_kind.update(swapped)

    return lambda out, target: error(out, target) * by_kind[Kind.FIRST], change


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


HELD = dict(WEIGHTS), list(TABLE), BY_CLASS.clone(), Net.inner, as_it_is.__code__, Differences.error


@pytest.fixture
def restore() -> Iterator[Callable[[], None]]:
    """Puts back what cases change of this file."""

    def put() -> None:
        globals().update(SCALE=1.0)
        WEIGHTS.update(HELD[0])
        TABLE[:] = HELD[1]
        BY_CLASS.copy_(HELD[2])
        Net.inner, as_it_is.__code__, Net.offset, Differences.error = HELD[3], HELD[4], 0.0, HELD[5]  # type: ignore[method-assign]
        if "by" in vars(OwnScales):
            del OwnScales.by

    yield put
    put()


def built() -> Any:
    torch.manual_seed(0)
    return Net()


def plain(loss: Loss, change: Change) -> list[float]:
    model: Any = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        if step:
            change(model, step)
        value = loss(model(X), TARGET)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(value.item())
    return found


def compiled(mesh: DeviceMesh, loss: Loss, change: Change) -> tuple[list[float], meshc.Program]:
    model: Any = built()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), loss=loss)
    program = meshc.compile(step, mesh, args=(X, TARGET))
    found = []
    for number in range(STEPS):
        if number:
            change(model, number)
        found.append(program(X, TARGET).item())
    return found, program


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:meshc compiles again", "ignore:.*keeps changing")
def test_a_loop_is_plain_pytorchs(mesh: DeviceMesh, restore: Callable[[], None], name: str) -> None:
    make, programs = CASES[name]
    wanted = plain(*make())
    restore()
    found, program = compiled(mesh, *make())
    assert found == pytest.approx(wanted, rel=1e-5)
    assert len(program.compilations.kept) == programs


def in_module_mode(mesh: DeviceMesh) -> tuple[Any, meshc.Program]:
    model = built()
    return model, meshc.compile(model, mesh, args=(X,))


@pytest.mark.filterwarnings("ignore:meshc compiles again")
def test_a_model_that_is_called_in_a_loop_of_its_users(mesh: DeviceMesh) -> None:
    """Two calls before their backwards: each has the number that it was called with."""
    twin, (model, program) = built(), in_module_mode(mesh)
    losses = {}
    for name, net, call in (("plain", twin, twin), ("compiled", model, program)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        losses[name] = []
        for step in range(1, 6):
            net.temperature = float(step)
            first = call(X)
            net.temperature = step + 0.5
            second = call(X)
            (error(first, TARGET) + error(second, TARGET)).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append((first.mean().item(), second.mean().item()))
    assert [*np.ravel(losses["compiled"])] == pytest.approx([*np.ravel(losses["plain"])], rel=1e-5)
    assert len(program.compilations.kept) == 3


def test_a_change_says_what_has_changed_and_how(mesh: DeviceMesh) -> None:
    model, program = in_module_mode(mesh)
    model.config.alpha = 2.0
    with pytest.warns(UserWarning, match=r"^meshc compiles again, because of what the model's code reads: model.config.alpha: 1.0 -> 2.0$"):
        program(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program(X)


def test_a_change_before_the_first_call_of_its_kind_is_no_reason(mesh: DeviceMesh) -> None:
    """Inputs of another size are compiled for in any case."""
    model, program = in_module_mode(mesh)
    model.config.alpha = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program(X[:4])
    with pytest.warns(UserWarning, match="model.config.alpha: 1.0 -> 2.0"):
        program(X)


@pytest.mark.filterwarnings("ignore:meshc compiles again")
def test_what_keeps_changing_and_is_no_input_is_said_with_its_line(mesh: DeviceMesh) -> None:
    model, program = in_module_mode(mesh)
    for value, said in ((0.2, "compiles again"), (0.3, "model.drop.p keeps changing, and cannot be an input of the program")):
        model.drop.p = value
        with pytest.warns(UserWarning, match=said):
            program(X)


def test_how_many_values_are_looked_at_is_said(mesh: DeviceMesh) -> None:
    _, program = in_module_mode(mesh)
    assert program.timings["values looked at in a call"] == len(program.compilations.last.reads) > 10


def test_a_number_that_is_an_input_is_saved_with_its_value_and_may_be_scheduled(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, program = in_module_mode(mesh)
    with torch.no_grad(), pytest.warns(UserWarning, match="compiles again"):
        for value in (1.0, 2.0, 3.0, 4.0):
            model.temperature = value
            program(X)
        program.save(tmp_path / "saved")
    info = program.general.info
    assert info["numbers"] == {"model.temperature": 4.0}
    assert [port.name for port in program.general.inputs if port.kind == "number"] == ["model.temperature"]
    assert "model_temperature" in str(program)


def test_verify_takes_numbers_as_they_are(mesh: DeviceMesh) -> None:
    model, program = in_module_mode(mesh)
    with pytest.warns(UserWarning, match="compiles again"):
        for value in (1.0, 2.0, 3.0, 4.0):
            model.temperature = value
            program(X)
    assert meshc.verify(program).ok


def test_numbers_that_are_inputs_stand_in_their_order_whatever_a_process_hashes_them_to() -> None:
    """Ranks compare them as one row."""
    model = nn.Linear(2, 2)
    for name in "abcdefgh":
        setattr(model, name, 1.0)
    numbers = [Number(f"model.{name}", ReadPlace(MODEL, ((ATTRIBUTE, name),)), whole=False) for name in "hgfeabcd"]
    reads = Reads([one.place for one in numbers], model, model.forward, numbers)
    reads.values()
    assert [*reads.numbers()] == [f"model.{name}" for name in "hgfeabcd"]
