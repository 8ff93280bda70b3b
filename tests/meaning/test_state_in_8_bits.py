"""Optimizer state in 8 bits: any mesh beside torch's optimizer, whose state numpy codes after each step, by the documents' formulas."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc import artifact
from meshc.cost import peak_memory
from meshc.errors import StateError
from meshc.ops import block_codes as codes_of
from meshc.optimizer.optimizer import describe
from meshc.reference import ReferenceRandom
from meshc.text.printer import hash_program
from tests.broad import broad
from tests.meaning import test_kept_state as kept

SEED, BLOCK = kept.SEED, 256
NEVER_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
Optimizer = Callable[..., torch.optim.Optimizer]


class Model(nn.Module):
    """Rows of 300: a block and a part of one, which tensor parallelism cuts amid the first. Rows of 10 stay as they are."""

    def __init__(self, seed: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 300), nn.Dropout(0.25), nn.GELU(), nn.Linear(300, 10)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def magnitudes(signed: bool) -> np.ndarray:
    """docs/memory.md: seven decades, the uppermost in 64 or 128 steps, each of the others in half as many."""
    rows = [np.zeros(1)]
    for decade in range(6, -1, -1):
        steps = (64 if signed else 128) >> decade
        rows.append(10.0**-decade * (0.1 + 0.9 * np.arange(1, steps + 1) / steps))
    return np.concatenate(rows).astype(np.float32)


def coded(value: Tensor, step: int, name: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of a state, an element and a block at a time."""
    signed = not name.endswith(NEVER_NEGATIVE)
    known = magnitudes(signed)
    given = value.detach().numpy().astype(np.float32)
    draws = kept.words(SEED, step, 2**31 + zlib.crc32(name.encode()) % 2**31, given.size) >> np.uint32(8)
    draws = (draws.astype(np.float32) * np.float32(2.0**-24)).reshape(-1, given.shape[-1])
    rows = given.reshape(-1, given.shape[-1])
    codes = np.zeros(rows.shape, dtype=np.uint8)
    scales = np.zeros((len(rows), -(-rows.shape[1] // BLOCK)), dtype=np.float32)
    for row, numbers in enumerate(rows):
        for block in range(scales.shape[1]):
            scales[row, block] = np.abs(numbers[block * BLOCK : (block + 1) * BLOCK]).max()
        for column, number in enumerate(numbers):
            scale = scales[row, column // BLOCK]
            size = abs(number) / scale if scale else np.float32(0)
            lower = min(int(np.searchsorted(known, size, side="right")) - 1, len(known) - 2)
            code = lower + int(draws[row, column] < (size - known[lower]) / (known[lower + 1] - known[lower]))
            if not signed and number > 0:
                code = max(code, 1)
            codes[row, column] = code + (128 if signed and code and number < 0 else 0)
    return torch.from_numpy(codes).view(value.shape), torch.from_numpy(scales).view(*value.shape[:-1], -1)


def decoded(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    number = codes.numpy().astype(int)
    known = magnitudes(signed)
    value = known[number % 128] * np.where(number >= 128, -1, 1).astype(np.float32) if signed else known[number]
    wide = np.repeat(scales.numpy(), BLOCK, axis=-1)[..., : codes.shape[-1]]
    return torch.from_numpy(value * wide)


def alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: kept.Batches, loss: kept.Loss, clip: float | None, first: int = 0
) -> dict[str, Tensor]:
    """One device: torch's step, after which state with rows of a block and more is coded; the next step reads what is left of it."""
    names = {p: name for name, p in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for step, (x, y) in enumerate(data, first):
        model.zero_grad()
        with ReferenceRandom(SEED, step):
            loss(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(list(names), clip)
        optimizer.step()
        for p, name in names.items():
            for slot, value in optimizer.state[p].items():
                found[f"{name}/{slot}"] = value
                if value.dim() and value.shape[-1] >= BLOCK:
                    codes, scales = coded(value, step, f"{name}/{slot}")
                    found |= {f"{name}/{slot}.codes": codes, f"{name}/{slot}.scale": scales}
                    found.pop(f"{name}/{slot}")
                    value.copy_(decoded(codes, scales, not slot.endswith(NEVER_NEGATIVE)))
    return found


OPTIMIZERS: dict[str, Optimizer] = kept.OPTIMIZERS
MESHES = kept.MESHES
ELSEWHERE = [("dp=2,tp=2", "offload state, update", 2), ("dp_shard=2", "offload state: disk", None)]


@pytest.mark.parametrize(
    ("name", "mesh", "plan", "microbatches"),
    [("adamw", *MESHES[0]), ("adamw", *ELSEWHERE[0])]
    + [broad("adamw", *one) for one in (*MESHES[1:], ELSEWHERE[1])]
    + [broad(name, *MESHES[3]) for name in ("sgd", "rmsprop")]
    + [broad(name, *one) for name in ("amsgrad", "nadam") for one in MESHES]
    + [broad(name, *one) for name in ("sgd", "rmsprop") for one in MESHES if one != MESHES[3]],
)
def test_state_in_8_bits_is_coded_alike_on_every_mesh(name: str, mesh: str, plan: str | None, microbatches: int | None) -> None:
    data, model, twin = kept.batches(kept.normal), Model().double(), Model().double()
    wanted = alone(model, OPTIMIZERS[name](model.parameters()), data, F.mse_loss, clip=0.5)
    found, _ = kept.on_mesh(
        twin, OPTIMIZERS[name](twin.parameters()), mesh, plan, microbatches, data, F.mse_loss, 0.5, optimizer_state="8bit"
    )
    kinds = {slot.rpartition(".")[2] for slot in wanted if slot.endswith((".codes", ".scale"))}
    assert kinds == {"codes", "scale"}
    for slot, value in wanted.items():
        assert found[f"state:{slot}"].dtype == value.dtype
        exact = value.dtype != torch.float64  # what stays as it is, is torch's up to the order of sums
        torch.testing.assert_close(found[f"state:{slot}"], value, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)
    for path, p in model.named_parameters():
        torch.testing.assert_close(found[f"parameter:{path}"], p.detach(), rtol=1e-12, atol=1e-12)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> meshc.TrainStep:
    return meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss)


def compiled(
    optimizer: Optimizer = torch.optim.AdamW, mesh: str = "dp_shard=2", dtype: torch.dtype = torch.float32, **keep: Any
) -> meshc.Program:
    model, x = Model().to(dtype), torch.randn(8, 10, dtype=dtype)
    options = meshc.Options(seed=SEED, **keep)
    return meshc.compile(step_of(model, optimizer(model.parameters())), meshc.Mesh(mesh), args=(x,), kwargs={"target": x}, options=options)


def test_codes_and_scales_are_counted() -> None:
    small = 150 * 10 + 5  # of a rank's half: a weight of 300 rows of 10, a bias of 10
    codes = 5 * 300 + 150  # a weight of 10 rows of 300, a bias of 300
    scales = 5 * 2 + 2  # of each of the weight's rows, two; the bias has two, on both ranks
    counts = 8 * 4
    kept_bytes = peak_memory.peak_rank(compiled(optimizer_state="8bit").compiled).kept
    assert kept_bytes["state"] == 2 * 2 * (4 * small + codes + 4 * scales) + counts
    assert peak_memory.peak_rank(compiled().compiled).kept["state"] == 2 * 2 * 4 * (small + codes) + counts


def test_a_program_is_proved_with_it() -> None:
    x, dtype = torch.randn(8, 10).double(), torch.float64
    report = meshc.verify(compiled(mesh="dp=2,tp=2", dtype=dtype, optimizer_state="8bit"), {"x": x, "target": x}, dtype=dtype)
    assert report.ok and "state exp_avg_sq after step 0" in str(report)


def test_a_saved_program_is_read_back_with_what_state_begins_with(tmp_path: Path) -> None:
    program = compiled(lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5), optimizer_state="8bit")
    program.save(tmp_path / "saved.meshc")
    found = artifact.load(tmp_path / "saved.meshc")
    assert hash_program(found) == hash_program(program.compiled)
    assert found.info["optimizer_state"] == "8bit" and found.info["master_weights"] is False
    fresh = found.info["fresh"]
    name = "layers.0.3.weight/sum"
    assert (fresh[f"{name}.codes"], fresh[f"{name}.scale"]) == (254.0, 0.5)  # the largest magnitude of what is never negative
    assert fresh["layers.0.0.weight/sum"] == 0.5


def held(optimizer: torch.optim.Optimizer, p: Tensor, **state: Tensor) -> None:
    optimizer.state[p].update({"step": torch.tensor(3.0), **{name.replace("__", "."): value for name, value in state.items()}})


def in_8_bits(value: Tensor, slot: str) -> dict[str, Tensor]:
    codes, scale = coded(value, 0, slot)
    return {f"{slot}__codes": codes, f"{slot}__scale": scale}


def test_an_optimizer_that_holds_fewer_bits_is_refused_where_the_options_do_not_say_so() -> None:
    model, x = Model(), torch.randn(8, 10)
    p = model.layers[0][3].weight
    moments = {"exp_avg": torch.randn(10, 300), "exp_avg_sq": torch.rand(10, 300)}
    for kind, found in (
        ("8bit", {k: v for slot, value in moments.items() for k, v in in_8_bits(value, slot).items()}),
        ("bf16", {slot: value.to(torch.bfloat16) for slot, value in moments.items()}),
    ):
        optimizer = torch.optim.AdamW(model.parameters())
        held(optimizer, p, **found)
        for options in (meshc.Options(), meshc.Options(training=meshc.Training(master_weights=True))):
            with pytest.raises(StateError) as refusal:
                meshc.compile(step_of(model, optimizer), meshc.Mesh("dp=2"), args=(x,), kwargs={"target": x}, options=options)
            said = "exp_avg.codes" if kind == "8bit" else "exp_avg in bfloat16"
            assert f"AdamW holds state in fewer bits than this program would keep: {said}, of a parameter of shape [10, 300]" in str(
                refusal.value
            )
            assert f"what to do: Options(training=Training(optimizer_state='{kind}'))" in str(refusal.value)


def test_an_optimizer_that_holds_another_form_is_read() -> None:
    """What `describe` says that a program begins with, of an optimizer with state in full, in 16 bits and in 8."""
    model = Model()
    p = model.layers[0][3].weight
    moments = {"exp_avg": torch.randn(10, 300), "exp_avg_sq": torch.rand(10, 300)}
    narrow = {k: v for slot, value in moments.items() for k, v in in_8_bits(value, slot).items()}

    def begins(kind: str, found: dict[str, Tensor]) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(model.parameters())
        held(optimizer, p, **found)
        return {
            slot.name: slot.initial(p)
            for slot in describe(optimizer, meshc.Options(training=meshc.Training(optimizer_state=kind)).training).slots_of(p)
        }

    for found in (moments, {slot: value.to(torch.bfloat16) for slot, value in moments.items()}):
        made = begins("8bit", found)
        for slot, value in found.items():
            signed = slot == "exp_avg"
            mine = decoded(made[f"{slot}.codes"], made[f"{slot}.scale"], signed)
            block = made[f"{slot}.scale"].repeat_interleave(BLOCK, -1)[:, :300]
            assert ((mine - value.float()).abs() <= block * (0.9 / (128 if signed else 256) + 1e-6)).all()  # half the widest step
    made = begins("bf16", narrow)
    for slot in moments:
        wide = decoded(narrow[f"{slot}__codes"], narrow[f"{slot}__scale"], slot == "exp_avg")
        assert torch.equal(made[slot], wide.to(torch.bfloat16))
    made = begins("8bit", narrow)
    assert all(torch.equal(made[name.replace("__", ".")], value) for name, value in narrow.items())


def test_state_of_16_bit_parameters_goes_on_beside_masters() -> None:
    """Torch keeps it in the parameter's 16 bits, which is no loss that anybody has asked for."""
    model = Model().to(torch.bfloat16)
    p = model.layers[0][3].weight
    moments = {"exp_avg": torch.randn(10, 300).bfloat16(), "exp_avg_sq": torch.rand(10, 300).bfloat16()}
    optimizer = torch.optim.AdamW(model.parameters())
    held(optimizer, p, **moments)
    made = {
        slot.name: slot.initial(p)
        for slot in describe(optimizer, meshc.Options(training=meshc.Training(master_weights=True)).training).slots_of(p)
    }
    assert all(made[slot].dtype == torch.float32 and torch.equal(made[slot], value.float()) for slot, value in moments.items())
    assert {slot.dtype for slot in describe(optimizer).slots_of(p)} == {torch.bfloat16, torch.float32}  # its step is a float32


def test_what_has_been_decoded_is_encoded_to_the_same() -> None:
    for signed in (True, False):
        value = torch.randn(7, 600) if signed else torch.rand(7, 600)
        value[0] = 0.0
        codes, scale = codes_of.encode(value, signed)
        wide = codes_of.decode(codes, scale, signed, torch.float32)
        assert torch.equal(wide, decoded(codes, scale, signed))
        again = codes_of.encode(wide, signed)
        assert torch.equal(again[0], codes) and torch.equal(again[1], scale)


def test_a_block_with_what_is_no_number_is_none_as_a_whole() -> None:
    value = torch.ones(1, 600)
    value[0, 300] = torch.nan
    found = codes_of.decode(*codes_of.encode(value, True), True, torch.float32)
    assert found[0, 256:512].isnan().all() and found[0, :256].eq(1).all() and found[0, 512:].eq(1).all()


def test_a_second_moment_that_is_not_zero_does_not_become_zero() -> None:
    value = torch.full((1, 256), 1e-12)
    value[0, 0], value[0, 1] = 1.0, 0.0
    codes, scale = codes_of.encode_by_draw(value, False, torch.tensor([SEED, 0]), "w/exp_avg_sq")
    assert codes[0, :2].tolist() == [254, 0] and codes[0, 2:].eq(1).all() and scale.tolist() == [[1.0]]
