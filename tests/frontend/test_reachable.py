"""What of Python a trace can read: what differs between two ranks is named, what a forward cannot show is not there, and what has run is
looked for."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import filelock
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import hub

import meshc
from meshc.frontend import reachable_code
from meshc.frontend.reachable import Reachable, difference, environment, reachable
from tests.models import llama

SCALE = 0.5
TABLE = {"shift": 1}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def tripled(x: Tensor) -> Tensor:
    return x * 3


class Config:
    def __init__(self) -> None:
        self.eps = 1e-5
        self.names = ["a", "b"]


class Base(nn.Module):
    window = 4

    def cut(self, x: Tensor) -> Tensor:
        return x[: self.window] + TABLE["shift"]

    def save(self) -> None:
        """Nobody's forward names it."""
        time.sleep(0)


class Model(Base):
    def __init__(self, width: int = 8, bound: float = 2.0) -> None:
        super().__init__()
        self.config = Config()
        self.up = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        self.mask = torch.ones(3)
        self.act = lambda x: x.clamp(max=bound)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(getattr(self, "cut")(scaled(self.norm(self.up(x)))))  # noqa: B009  a name in quotes


def changed(model: Model, do: Callable[[Model], Any]) -> str:
    """The first difference to a model to which something was done."""
    mine = reachable(model, {})
    assert mine.why == "" and difference(mine.places, reachable(copy.deepcopy(model), {}).places) == ""
    other = copy.deepcopy(model)
    do(other)
    theirs = reachable(other, {})
    assert theirs.why == ""
    return difference(theirs.places, mine.places)


def registered(model: Model, kind: str) -> None:
    getattr(model.up, f"register_{kind}")(lambda *given: None)


@pytest.mark.parametrize(
    "do, said",
    [
        (lambda m: setattr(m.norm, "eps", 1e-3), "model.norm.eps: this rank has 0.001, rank 0 has 1e-05"),
        (lambda m: setattr(m.config, "eps", 1e-3), "model.config.eps: this rank has 0.001, rank 0 has 1e-05"),
        (lambda m: m.config.names.append("c"), "model.config.names: this rank has ['a', 'b', 'c'], rank 0 has ['a', 'b']"),
        (lambda m: setattr(m, "up", nn.Linear(8, 8, bias=False)), "model.up.bias: this rank has None, rank 0 has the model's up.bias"),
        (lambda m: setattr(m, "up", nn.Identity()), "model.up: this rank has a torch.nn.modules.linear.Identity"),
        (lambda m: m.mask.fill_(2), "model.mask: this rank has torch.float32 [3], requires_grad=False, "),
        (lambda m: m.double(), "model.up.weight: this rank has the model's up.weight, torch.float64"),
        (lambda m: m.up.weight.requires_grad_(False), "[8, 8], requires_grad=False, rank 0 has the model's up.weight, torch.float32"),
        (lambda m: m.norm.eval(), "model.norm.training: this rank has False, rank 0 has True"),
        (lambda m: registered(m, "forward_hook"), "model.up, forward hook 0: this rank has function tests.frontend."),
        (lambda m: registered(m, "forward_pre_hook"), "model.up, forward pre hook 0: this rank has function"),
        (lambda m: setattr(m, "act", tripled), "model.act: this rank has function tests.frontend.test_reachable.tripled"),
        (lambda m: setattr(m, "act", Model(bound=3.0).act), "bound of its closure: this rank has 3.0, rank 0 has 2.0"),
        (lambda m: setattr(m, "act", functools.partial(torch.clamp, max=1)), "model.act: this rank has a functools.partial"),
        (lambda m: setattr(m, "act", operator.attrgetter("real")), "model.act: this rank has a operator.attrgetter"),
        (lambda m: setattr(m, "forward", tripled), "model.forward: this rank has function tests.frontend.test_reachable.tripled"),
        (lambda m: setattr(m, "unread", "mine"), "model.unread: this rank has 'mine', rank 0 has nothing there"),
    ],
)  # fmt: skip
def test_what_two_models_differ_in_is_named(do: Callable[[Model], Any], said: str) -> None:
    found = changed(Model(), do)
    assert said in found, found


@pytest.mark.parametrize(
    "place, name, value, said",
    [
        (Model, "window", 5, "test_reachable.Model.window: this rank has 5, rank 0 has nothing there"),
        (Base, "cut", lambda self, x: x, "test_reachable.Base.cut: this rank has function"),
        (__name__, "SCALE", 0.25, "test_reachable.SCALE: this rank has 0.25, rank 0 has 0.5"),
        (__name__, "TABLE", {"shift": 2}, "test_reachable.TABLE['shift']: this rank has 2, rank 0 has 1"),
        (__name__, "scaled", tripled, "test_reachable.scaled: this rank has function tests.frontend.test_reachable.tripled"),
        (nn.Linear, "forward", lambda self, x: x, "torch.nn.modules.linear.Linear.forward: this rank has function"),
        (torch.nn.functional, "relu", tripled, ""),
        (Base, "save", lambda self: None, ""),
    ],
)  # fmt: skip
def test_code_and_what_it_names_is_compared(monkeypatch: Any, place: Any, name: str, value: object, said: str) -> None:
    """A class's own value before that of its base, a method by the name in quotes, globals, what somebody has put into torch's classes; and
    nothing that no forward of this model names."""
    before = reachable(Model(), {}).places
    if isinstance(place, str):
        monkeypatch.setitem(globals(), name, value)
    else:
        monkeypatch.setattr(place, name, value, raising=False)
    found = difference(reachable(Model(), {}).places, before)
    assert said in found if said else found == ""


def test_code_is_compared_by_what_it_does_not_by_where_it_stands() -> None:
    one, same, other = (compile(text, "f.py", "exec") for text in ("x = 1 in {1, 2}", "\n\nx = 1 in {1, 2}", "x = 1 in {1, 3}"))
    assert reachable_code.digest(one) == reachable_code.digest(same) != reachable_code.digest(other)


def asks_for_rank(x: Tensor) -> Tensor:
    return x * dist.get_rank()


def asks_the_time(x: Tensor) -> Tensor:
    return x * time.time()


def reads_a_variable(x: Tensor) -> Tensor:
    return x * float(os.environ.get("OMP_NUM_THREADS", "1"))


def test_what_each_process_answers_for_itself_is_found_in_what_has_run() -> None:
    found = reachable(nn.Module(), {"a": asks_for_rank, "b": asks_the_time, "c": reads_a_variable, "d": scaled})
    assert "asks_for_rank (test_reachable.py:" in found.beyond([scaled.__code__, asks_for_rank.__code__])
    assert "which reads get_rank" in found.beyond([asks_for_rank.__code__]) and "which reads time" in found.beyond([asks_the_time.__code__])
    assert found.beyond([scaled.__code__, reads_a_variable.__code__, nn.Linear.forward.__code__]) == ""
    assert [*environment([reads_a_variable.__code__, scaled.__code__])] == ["the environment's OMP_NUM_THREADS"]
    assert "tripled (test_reachable.py:" in found.beyond([tripled.__code__]) and "not found" in found.beyond([tripled.__code__])


def guarded(by: float) -> Callable[[Tensor], Tensor]:
    @contextlib.contextmanager
    def guard(share: float) -> Iterator[None]:
        yield

    return guard(by)(scaled)


def test_a_function_in_a_context_is_known_by_what_the_context_is_made_of() -> None:
    """Its generator stands in the closure, and says nothing."""
    mine, same, other = (reachable(nn.Module(), {"a": guarded(by)}) for by in (0.5, 0.5, 0.25))
    assert mine.why == "" and difference(mine.places, same.places) == ""
    assert "this rank has (0.5,), rank 0 has (0.25,)" in difference(mine.places, other.places)
    assert scaled.__code__ in mine.code


@pytest.mark.parametrize(
    "one, other, said",
    [
        (operator.attrgetter("real"), operator.attrgetter("imag"), "this rank has ('real',), rank 0 has ('imag',)"),
        (operator.itemgetter(0, 1), operator.itemgetter(0, 2), "this rank has (0, 1), rank 0 has (0, 2)"),
        (operator.methodcaller("cut", 1), operator.methodcaller("cut", 2), "this rank has ('cut', 1), rank 0 has ('cut', 2)"),
        (operator.methodcaller("clamp", max=1), operator.methodcaller("clamp", max=2), "this rank has 1, rank 0 has 2"),
    ],
)
def test_what_operator_makes_is_known_by_what_it_was_made_of(one: Any, other: Any, said: str) -> None:
    mine, same, theirs = (reachable(nn.Module(), {"a": copy.copy(getter)}) for getter in (one, one, other))
    assert mine.why == "" and difference(mine.places, same.places) == ""
    assert said in difference(mine.places, theirs.places)


def test_an_attribute_that_a_getter_names_is_read_as_if_code_named_it(monkeypatch: Any) -> None:
    roots = {"a": operator.attrgetter("linear.save"), "b": operator.methodcaller("save"), "c": operator.itemgetter("save")}
    for root, read in zip(roots, (True, True, False), strict=True):
        before = reachable(Base(), {root: roots[root]}).places
        with monkeypatch.context() as patched:
            patched.setattr(Base, "save", lambda self: None)
            assert (difference(reachable(Base(), {root: roots[root]}).places, before) != "") == read, root


def test_what_cannot_be_compared_says_so() -> None:
    model = Model()
    model.rows = (row for row in range(3))
    assert reachable(model, {}).why.startswith("model.rows holds a generator")


def fetches(x: Tensor) -> Tensor:
    with filelock.FileLock("weights.lock"):
        return x


def test_packages_that_fetch_files_are_not_looked_into() -> None:
    """What they hold is each process's own. Code of theirs that a trace has run is not known."""
    found = reachable(nn.Module(), {"a": fetches, "b": filelock, "c": filelock.FileLock("weights.lock")})
    assert found.why == "" and found.beyond([fetches.__code__]) == ""
    assert "not found" in found.beyond([filelock.BaseFileLock.acquire.__code__])


def test_a_stock_model_whose_code_names_the_hub_can_be_compared() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    linear = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")} | {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
    config = Qwen3_5TextConfig(**sizes, **heads, **linear, layer_types=["linear_attention", "full_attention"])
    one, same = (reachable(Qwen3_5ForCausalLM(config), {}) for _ in range(2))
    assert one.why == "" and difference(one.places, same.places) == ""


def test_two_processes_have_one_key_of_a_model_whose_configuration_has_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's configuration leads to how configurations are fetched, by a function that names a number which each process draws."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_key_value_heads=1, layer_types=["full_attention"]))
    mine = reachable(model, {})
    assert mine.why == "" and mine.places["transformers.configuration_utils.cached_file"] == "function transformers.utils.hub.cached_file"
    monkeypatch.setattr(hub, "SESSION_ID", "another process's")
    assert difference(reachable(model, {}).places, mine.places) == ""
    assert "not found" in mine.beyond([hub.cached_files.__code__])


def reads_a_session(x: Tensor) -> Tensor:
    return x + len(hub.SESSION_ID)


def test_what_a_forward_reads_of_a_module_that_fetches_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reachable(nn.Module(), {"a": reads_a_session}).places
    monkeypatch.setattr(hub, "SESSION_ID", "shorter")
    assert "transformers.utils.hub.SESSION_ID" in difference(reachable(nn.Module(), {"a": reads_a_session}).places, before)


class Shared:
    """As Accelerate keeps what a process is, beside what all are."""

    _shared_state: ClassVar[dict[str, object]] = {}


def asks_shared(x: Tensor) -> Tensor:
    return x * Shared._shared_state["scale"]  # type: ignore[operator]


def asks_its_place(x: Tensor) -> Tensor:
    return x + Shared().process_index  # type: ignore[attr-defined]


def test_which_rank_this_is_does_not_count_where_a_package_keeps_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands beside it does, and code that asks for it is found by the name."""
    monkeypatch.setitem(reachable_code.OF_PROCESSES, f"{__name__}.Shared._shared_state", ("process_index",))
    shared: list[dict[str, object]] = [{"process_index": 0, "scale": 2}, {"process_index": 1, "scale": 2}, {"process_index": 1, "scale": 3}]
    places = []
    for state in shared:
        monkeypatch.setattr(Shared, "_shared_state", state)
        places.append(reachable(nn.Module(), {"a": asks_shared}).places)
    assert difference(places[1], places[0]) == ""
    assert "Shared._shared_state['scale']: this rank has 3" in difference(places[2], places[0])
    assert "reads process_index" in reachable(nn.Module(), {"a": asks_its_place}).beyond([asks_its_place.__code__])


def test_the_number_of_a_hook_does_not_count() -> None:
    """It is of all hooks of a process."""
    one, other = Model(), Model()
    for model in (one, other):
        model.kept = model.up.register_forward_hook(tripled)
    assert one.kept.id != other.kept.id
    assert difference(reachable(one, {}).places, reachable(other, {}).places) == ""


def test_a_stock_model_is_known_whole() -> None:
    """All that its trace runs has been come to, and nothing in it is each process's own."""
    case = llama(layers=1)
    step = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters()), loss=case.loss)
    found: Reachable = reachable(case.model, {"the loss": case.loss})
    program = meshc.compile(step, meshc.Mesh("dp=2"), kwargs=case.call_kwargs)
    code = program.lowered.model.code
    assert len(code) > 50 and found.why == "" and found.beyond(code) == ""
