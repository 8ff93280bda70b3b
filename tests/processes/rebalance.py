"""Experts that move between real ranks while a model trains: nothing but where they lie changes. A check a function."""

from __future__ import annotations

import copy
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshc
from meshc.frontend.expert_placement import COPIES, SLOTS
from tests.models import Case
from tests.processes.session import run_checks
from tests.zoo.experts import FAMILIES

LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
UNEVEN = {LAYERS[0]: [9.0, 7.0, 2.0, 1.0], LAYERS[1]: torch.tensor([1, 2, 0, 0])}
"""Loads by which experts 0 and 1, which lie on one rank by number, are parted; of the first layer [0, 3] and [1, 2] then lie together."""
MOVABLE = {"expert_placement": "movable"}


def _case(family: str = "mixtral") -> Case:
    found = FAMILIES[family].case(family)
    found.model.double()
    return found


def _adamw(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "eps": 1e-6, "amsgrad": True, **how})


def _step(model: nn.Module, mesh: Any, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> meshc.Program:
    step = meshc.TrainStep(model, optimizer=optimizer or _adamw(model), loss=lambda output: output.loss)
    return meshc.compile(step, mesh, options=meshc.Options(**{**MOVABLE, **options}))


class _Twin:
    """The model on one device, whose experts are called one by one."""

    def __init__(self, found: Case, layers: Sequence[str] = LAYERS) -> None:
        self.model = copy.deepcopy(found.model)
        self.model.config._experts_implementation = "eager"  # type: ignore[union-attr]  # torch's products of runs know no float64
        self.optimizer, self.inputs = _adamw(self.model), found.call_kwargs
        self.chosen: dict[str, Tensor] = {}
        for path in layers:
            self.model.get_submodule(path).register_forward_pre_hook(lambda _, args, path=path: self._count(path, args[1]))

    def _count(self, path: str, choice: Tensor) -> None:
        self.chosen[path] = choice.flatten().bincount(minlength=self.model.get_submodule(path).down_proj.shape[0])  # type: ignore[union-attr, operator, index]

    def step(self) -> Tensor:
        loss = self.model(**self.inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _one_step(program: meshc.Program, twin: _Twin) -> None:
    torch.testing.assert_close(program(**twin.inputs), twin.step())
    for path in twin.chosen:
        assert torch.equal(program.metrics["experts"][path].tokens, twin.chosen[path]), path


def _close(mine: Tensor, theirs: Tensor, name: str) -> None:
    """To what a router in float32 leaves of float64; a step of the optimizer is 1e-2, and experts differ by as much."""
    torch.testing.assert_close(mine.detach().double(), theirs.detach().double(), rtol=1e-5, atol=2e-6, msg=name)


def _same(program: meshc.Program, twin: _Twin) -> None:
    """Parameters and Adam's state as a checkpoint has them, and as the live DTensors show them."""
    state: Any = program.state_dict(full=True)
    model: Any = program.traced.module
    assert not any(SLOTS in name for name in program.state_dict()["model"])
    lives = {name: parameter for name, parameter in model.named_parameters() if parameter.device_mesh.size() == dist.get_world_size()}
    live = {name: parameter.full_tensor().detach() for name, parameter in lives.items()}  # the others are of a pipeline's stage
    for name, parameter in twin.model.named_parameters():
        _close(live.get(name, parameter), parameter, name)
        if dist.get_rank() == 0:
            _close(state["model"][name], parameter, name)
            for slot, value in twin.optimizer.state[parameter].items():
                _close(state["optim"]["state"][name][slot], value, f"{name}/{slot}")


def _here(program: meshc.Program, name: str) -> Tensor:
    return program.store.buffer(f"parameter:{name}")


def moved(mesh: Any) -> None:
    """Losses, choices, parameters and Adam's state are one device's before experts move, after they have moved, and after they are back."""
    found = _case()
    twin, program = _Twin(found), _step(found.model, mesh)
    _one_step(program, twin)
    text, name = str(program), f"{LAYERS[0]}.down_proj"
    whole = twin.model.get_parameter(name).detach()
    _close(_here(program, name), whole[2 * dist.get_rank() :][:2], name)
    report = program.rebalance(UNEVEN)
    assert [(one.before, one.after, one.moved) for one in report.layers] == [
        (pytest.approx(16 / 9.5), pytest.approx(10 / 9.5), 2), (2.0, pytest.approx(4 / 3), 2),
    ]  # fmt: skip
    _close(_here(program, name), whole[[0, 3] if dist.get_rank() == 0 else [2, 1]], name)
    row = sum(value.numel() for value in (whole[0], twin.model.get_parameter(f"{LAYERS[0]}.gate_up_proj")[0]))
    assert report.layers[0].bytes == 8 * 4 * row, report  # a parameter, and three moments of Adam
    lines = [line.split() for line in str(report).splitlines()]
    assert lines[0][-6:] == "moved in 2 of 2 layers".split() and [LAYERS[0], "4", "2", "1.68", "1.05", "2"] == lines[3][:6], report
    for _ in range(2):
        _one_step(program, twin)
    _same(program, twin)
    assert not program.rebalance({LAYERS[0]: [1, 2, 4, 3]}, least=0.3).moved
    assert program.rebalance({LAYERS[0]: [1, 0, 1, 0], LAYERS[1]: [1, 0, 1, 0]}).layers[0].after == 1.0
    _one_step(program, twin)
    _same(program, twin)
    assert str(program) == text, "experts that move change no program"


def copied(mesh: Any) -> None:
    """An expert that alone has more to do than the mean lies on several ranks, and then on one again: losses, choices, parameters and
    Adam's state are one device's, and of each expert there is one."""
    found = _case()
    twin, program = _Twin(found), _step(found.model, mesh, expert_copies=1)
    _one_step(program, twin)
    text, hot = str(program), dict.fromkeys(LAYERS, [9.0, 1.0, 1.0, 1.0])
    assert all(one.after > 1.2 for one in program.rebalance(hot, least=0.9, copies=0).layers), "moving alone does not help"
    report = program.rebalance(hot)
    assert [(one.before, one.after, one.copies) for one in report.layers] == [(pytest.approx(10 / 6), 1.0, 2)] * 2
    assert "copies" in str(report) and program.store.buffer(f"buffer:{LAYERS[0]}.{COPIES}")[:2].tolist() == [[3], [0]]
    for _ in range(2):
        _one_step(program, twin)
    _same(program, twin)
    assert not any(COPIES in name for name in program.state_dict()["model"])  # type: ignore[operator]
    with pytest.raises(meshc.InputError, match="each rank has 1 places for copies"):
        program.rebalance(hot, copies=2)
    report = program.rebalance(dict.fromkeys(LAYERS, [1.0, 1.0, 1.0, 0.0]), least=0.0, copies=0)
    assert [one.copies for one in report.layers] == [0, 0]
    _one_step(program, twin)
    _same(program, twin)
    assert str(program) == text, "experts with copies change no program"


def elsewhere(mesh: Any) -> None:
    """On meshes of more axes, of which some split, store or copy experts otherwise: twice, there and back."""
    found = _case("olmoe")
    twin, program = _Twin(found), _step(found.model, mesh)
    _one_step(program, twin)
    for loads in ([8, 7, 6, 5, 4, 3, 2, 1], [1, 9, 9, 1, 1, 1, 9, 9]):
        assert all(one.moved for one in program.rebalance(dict.fromkeys(LAYERS, loads)).layers)
        _one_step(program, twin)
        _same(program, twin)


def measured(mesh: Any) -> None:
    """By the last step's own load; memory of copies is there from `sync` to the next step alone."""
    found = _case()
    with torch.no_grad():
        for layer in LAYERS:  # experts 0 and 1 are everybody's, and lie on one rank
            found.model.get_parameter(layer.replace("experts", "gate.weight"))[2:] = 0.0
    twin, program = _Twin(found), _step(found.model, mesh)
    with pytest.raises(meshc.StateError, match="it needs a process group, and a first call"):
        program.rebalance()
    program.prepare((), twin.inputs)
    with pytest.raises(meshc.StateError, match="no load of experts has been measured"):
        program.rebalance()
    _one_step(program, twin)
    tokens = program.metrics["experts"][LAYERS[0]].tokens
    report = program.rebalance()
    before = max(tokens[:2].sum(), tokens[2:].sum()) * 2 / tokens.sum()
    assert report.layers[0].before == pytest.approx(float(before))
    _one_step(program, twin)
    shown = [found.model.get_parameter(f"{one.path}.down_proj") for one in report.layers if one.moved]
    assert shown and all(one.to_local().untyped_storage().nbytes() == 8 and one.to_local().isnan().all() for one in shown)
    program.sync()
    for one in shown:
        assert one.to_local().is_contiguous() and one.to_local().isfinite().all()
    with torch.no_grad():  # a change from outside is taken up
        for one in (shown[0], twin.model.get_parameter(f"{report.layers[0].path}.down_proj")):
            one.mul_(0.5)
    _one_step(program, twin)
    _same(program, twin)


def saved(mesh: Any) -> None:
    """A checkpoint, written after experts have moved, in a program whose experts have not, and the other way round; files of others."""
    found = _case()
    twin, program = _Twin(found), _step(found.model, mesh)
    _one_step(program, twin)
    program.rebalance(UNEVEN)
    _one_step(program, twin)
    other = _case()
    fresh = meshc.compile(
        meshc.TrainStep(other.model, optimizer=_adamw(other.model), loss=lambda output: output.loss), mesh, plan="ep: batch",
        kwargs=other.call_kwargs,
    )  # fmt: skip
    fresh.load_state_dict(program.state_dict())
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    program.save_pretrained(f"{folder[0]}/weights")
    program.save(f"{folder[0]}/program")
    report = meshc.verify(program, dtype=torch.float64)
    assert report.ok, report
    kept = {name: parameter.detach().clone() for name, parameter in twin.model.named_parameters()}
    loss = twin.step()
    torch.testing.assert_close(fresh(**twin.inputs), loss)
    torch.testing.assert_close(program(**twin.inputs), loss)
    fresh(**twin.inputs)
    program.load_state_dict(fresh.state_dict())
    twin.step()
    _same(program, twin)
    meshc.load_pretrained(program, f"{folder[0]}/weights")
    state: Any = program.state_dict(full=True)
    if dist.get_rank() == 0:
        for name, value in kept.items():
            _close(state["model"][name], value, name)
        _read_elsewhere(Path(folder[0]), kept, other)
    dist.barrier()


def _read_elsewhere(folder: Path, kept: dict[str, Tensor], found: Case) -> None:
    """Plain transformers, and the artifact, have experts in the model's order."""
    theirs = type(found.model).from_pretrained(folder / "weights", dtype=torch.float64)  # type: ignore[attr-defined]
    for name, value in theirs.named_parameters():
        _close(value, kept[name], name)
    weights = safetensors.torch.load_file(folder / "program" / "weights.safetensors")
    for name, value in kept.items():
        _close(weights[name], value, name)
    assert weights[f"{LAYERS[0]}.{SLOTS}"].tolist() == [0, 1, 2, 3]


def autograd(mesh: Any) -> None:
    """Another program of the same model reads experts where they are, and its gradients are as the model has them."""
    found = _case("gpt_oss")
    twin, program = _Twin(found), _step(found.model, mesh)
    program(**twin.inputs), twin.step()
    program.rebalance(UNEVEN)
    module = meshc.compile(found.model, mesh, kwargs=found.call_kwargs, options=meshc.Options(**MOVABLE))
    loss, wanted = module(**twin.inputs).loss, twin.model(**twin.inputs).loss
    torch.testing.assert_close(loss.detach(), wanted.detach())
    loss.backward(), wanted.backward()
    for (name, mine), theirs in zip(found.model.named_parameters(), twin.model.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        _close(mine.grad.full_tensor(), theirs.grad, name)
    late = module(**twin.inputs).loss
    assert program.rebalance({LAYERS[0]: [9, 1, 1, 9]}).moved
    with pytest.raises(meshc.StateError, match="experts have moved"):
        late.backward()


def from_meta(mesh: Any) -> None:
    """A model without values is filled where experts lie by number, and looked through by a function where they have moved."""
    found = _case()
    values = {name: value.detach().clone() for name, value in found.model.state_dict().items()}
    with torch.device("meta"):
        model = type(found.model)(found.model.config).double()  # type: ignore[call-overload]
    program = _step(model, mesh)
    program.prepare((), found.call_kwargs)
    rotary = {name: value for name, value in found.model.named_buffers() if SLOTS not in name}

    def fill(module: nn.Module) -> None:
        module.load_state_dict(values, strict=False)
        for name, value in rotary.items():
            module.get_buffer(name).copy_(value)

    program.init_weights(fill)
    twin = _Twin(found)
    _one_step(program, twin)
    program.rebalance(UNEVEN)
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module) -> None:
        seen.update({name: torch.empty(value.shape, dtype=value.dtype).copy_(value.detach()) for name, value in module.named_parameters()})

    program.init_weights(look)
    for name, value in seen.items():
        _close(value, twin.model.get_parameter(name), name)
    _one_step(program, twin)
    _same(program, twin)


def biased(mesh: Any) -> None:
    """Biases of routers go towards what was chosen less, before and after experts have moved, and are in checkpoints."""
    found, path, name = _case("deepseek_v3"), "model.layers.1.mlp.experts", "model.layers.1.mlp.gate.e_score_correction_bias"
    twin, chosen = _Twin(found, (path,)), []
    program = _step(found.model, mesh, expert_bias_update=0.05)
    for step in range(4):
        _one_step(program, twin)
        tokens, bias = twin.chosen[path].tolist(), twin.model.get_buffer(name)
        for expert, count in enumerate(tokens):
            mean = sum(tokens) / len(tokens)
            bias[expert] += 0.0 if count == mean else 0.05 if count < mean else -0.05
        _close(program.state_dict()["model"][name], bias, name)  # type: ignore[index]
        chosen.append(tokens)
        if step == 1:
            assert program.rebalance({path: [8, 7, 6, 5, 4, 3, 2, 1]}).moved
    assert chosen[0] != chosen[3], "routers choose by them"


def other_state(mesh: Any) -> None:
    """State in 8 bits and Adafactor's moments of rows and columns go along; master weights too."""
    for options in ({"optimizer_state": "8bit"}, {"optimizer_state": "bf16", "master_weights": True}, {}):
        losses = defaultdict(list)
        for moves in (False, True):
            found = FAMILIES["mixtral"].case("mixtral")
            found.model.to(torch.bfloat16 if "master_weights" in options else torch.float32)
            optimizer = _adamw(found.model, amsgrad=False) if options else torch.optim.Adafactor(found.model.parameters(), lr=1e-2)
            program = _step(found.model, mesh, optimizer, **options)
            for step in range(4):
                losses[moves].append(float(program(**found.call_kwargs)))
                if moves and step == 1:
                    assert program.rebalance(UNEVEN).moved
        assert losses[True] == pytest.approx(losses[False], rel=2e-3), (options, losses)


def refused(mesh: Any) -> None:
    found = _case()
    still = meshc.compile(
        meshc.TrainStep(found.model, optimizer=_adamw(found.model), loss=lambda output: output.loss), mesh, kwargs=found.call_kwargs
    )
    with pytest.raises(meshc.StateError, match="stay where they are"):
        still.rebalance(UNEVEN)
    with pytest.raises(meshc.StateError, match="the first to be compiled decides"):
        _step(found.model, mesh)
    program = _step(_case().model, mesh)
    with pytest.raises(meshc.StateError, match="this program has no state yet"):
        program.rebalance(UNEVEN)
    program(**found.call_kwargs)
    for loads, said in (
        ({LAYERS[0]: [1, 2, 3]}, "one number for each of its 4 experts"),
        ({LAYERS[0]: [1, 2, -3, 4]}, "0 or more"),
        ({"model.layers.0.mlp": [1, 2, 3, 4]}, "are no experts that can be moved; those are model.layers.0"),
        ({}, "loads of no layer"),
    ):
        with pytest.raises(meshc.InputError, match=said):
            program.rebalance(loads)
    with pytest.raises(meshc.InputError, match="a share from 0 to 1"):
        program.rebalance(UNEVEN, least=1.5)
    assert program.rebalance(UNEVEN).moved


def unequal(mesh: Any) -> None:
    """Ranks that are told different loads all raise, and may go on."""
    found = _case()
    program = _step(found.model, mesh)
    program(**found.call_kwargs)
    loads = [9, 7, 2, 1] if dist.get_rank() else [9, 7, 1, 2]
    with pytest.raises(meshc.InputError, match="ranks 0 and 1 were given different loads"):
        program.rebalance({LAYERS[0]: loads})
    assert program.rebalance(UNEVEN).moved and program(**found.call_kwargs).isfinite()


def run(mesh: str, *names: str) -> None:
    run_checks((moved, copied, elsewhere, measured, saved, autograd, from_meta, biased, other_state, refused, unequal), mesh, names)
