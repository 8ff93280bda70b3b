"""Products in few bits on one GPU: how near they come, what they take, and a training step in each format.

    python bench/gpu_few_bits.py                           on a machine with a CUDA device; elsewhere it says that it was not run
    python bench/gpu_few_bits.py --write                   keeps the tables as bench/results/gpu-few-bits.md, after each row
    python bench/gpu_few_bits.py --device cpu --tiny       a toy on the CPU: shows that this file runs, and its milliseconds mean little

*SQNR* is the power of a product in float32 by that of its difference from it, in decibels. *operands* says whether scales and rounded
values are bit for bit those of a CPU; *kernel* is the largest difference between the kernel's product and the definition (decoded,
multiplied in float32), of its peak. Steps are of four layers of the Llama 8B shape, one row of 8,192 tokens, bfloat16, fused AdamW,
interleaved with bfloat16's; beside them torchao's `convert_to_float8_training` under `torch.compile`, where torchao is installed. The last
rows are a feed-forward layer with weights 2:4: dense, under `sparse *: 2:4, fixed`, and in torch's semi-structured kernels.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from gpu import Contender, measured, model_of, timed, waited
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import meshc
from meshc.ir.formats import FORMATS, WHOLE, Format
from meshc.ops.quantize import has_kernel, inverse

ours = torch.ops.meshc
SHAPE: Final = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000,
}  # fmt: skip
TINY: Final = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512,
}  # fmt: skip
STEPS: Final = ("float8 tensor", "float8 tensor, delayed", "float8 row", "float8 row, gradients in bf16", "float8 block")
RECIPES: Final = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
PAGE: Final = Path(__file__).parent / "results" / "gpu-few-bits.md"
PRODUCT_HEADS: Final = ("format", "SQNR dB", "operands", "runs in", "kernel", "ms", "of bfloat16", "with roundings")
STEP_HEADS: Final = ("step", "ms", "of bfloat16", "peak GiB", "first five steps, s")


def operand(x: Tensor, form: Format, summed: int, weight: bool) -> tuple[Tensor, Tensor]:
    """(rounded values, scales) of a matrix whose dim `summed` is summed over, in blocks where scales cover some of a dim."""
    per = [form.across["weight" if weight else "activation"]] * 2
    per[summed] = form.along
    over: list[int] = []
    for dim in (1, 0):
        if per[dim] > 1:
            x = x.unflatten(dim, (-1, per[dim]))
    at = 0
    for dim in (0, 1):
        if per[dim] > 1:
            over.append(at + 1)
        elif per[dim] == WHOLE:
            over.append(at)
        at += 1 + (per[dim] > 1)
    scale = ours.scale_of(x, over, form.element, form.rounded)
    if form.two:
        scale = ours.scale_in_units(scale, ours.scale_of(x, list(range(x.dim())), form.element, ""))
    return ours.quantize(x, scale, form.element), scale


def product(form: Format, size: int, device: str, rounds: int) -> list[object]:
    """A row about a product of square matrices."""
    torch.manual_seed(0)
    a, b = torch.randn(size, size, dtype=torch.bfloat16), torch.randn(size, size, dtype=torch.bfloat16)
    there = operand(a, form, 1, False), operand(b, form, 0, True)
    a, b = a.to(device), b.to(device)
    here = operand(a, form, 1, False), operand(b, form, 0, True)
    pairs = [pair for x, y in zip(here, there, strict=True) for pair in zip(x, y, strict=True)]
    same = all(torch.equal(one.cpu().float(), other.float()) for one, other in pairs)
    (q, scale), (r, other) = here
    summed = 1 if form.along == WHOLE else 2
    runs = has_kernel(q, r, scale, other, torch.bfloat16, summed)
    made = ours.scaled_mm(q, r, scale, other, torch.bfloat16, summed, 0).reshape(size, size).float()
    decoded = (q.float() * inverse(scale)).reshape(size, size) @ (r.float() * inverse(other)).reshape(size, size)
    exact = a.float() @ b.float()
    nearness = 10 * torch.log10(exact.square().sum() / (exact - decoded).square().sum()).item()
    ms = milliseconds(lambda: ours.scaled_mm(q, r, scale, other, torch.bfloat16, summed, 0), device, rounds)
    both = milliseconds(lambda: (operand(a, form, 1, False), operand(b, form, 0, True)), device, rounds)
    base = milliseconds(lambda: a @ b, device, rounds)
    gap = ((made - decoded).abs().max() / decoded.abs().max()).item()
    return [form.name, nearness, "equal" if same else "UNLIKE", "a kernel" if runs else "emulated", gap, ms, ms / base, (ms + both) / base]


def milliseconds(call: Callable[[], object], device: str, rounds: int) -> float:
    took = list[float]()
    for number in range(rounds + 2):
        waited(device)
        start = time.perf_counter()
        call()
        waited(device)
        if number > 1:
            took.append(1e3 * (time.perf_counter() - start))
    return statistics.median(took)


def stepped(shape: dict[str, int], ids: Tensor, plan: str | None, cuda: bool) -> Contender:
    model = model_of(shape, ids.device.type)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    mesh = init_device_mesh(ids.device.type, (1,), mesh_dim_names=("dp",))
    options = meshc.Options(debugging=meshc.Debugging(cuda_graph=cuda))
    given: dict[str, Any] = {"input_ids": ids, "labels": ids}
    program = meshc.compile(step, mesh, kwargs=given, plan=plan, backend="inductor" if cuda else "eager", options=options)
    return Contender(lambda: program(input_ids=ids, labels=ids))


def of_torchao(shape: dict[str, int], ids: Tensor, recipe: str | None) -> Contender:
    """Under `torch.compile`. None: in bfloat16, unconverted."""
    model = model_of(shape, ids.device.type)
    if recipe is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model, config=Float8LinearConfig.from_recipe_name(recipe), module_filter_fn=lambda module, name: name != "lm_head"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model)

    def step() -> None:
        forward(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step)


def steps(shape: dict[str, int], ids: Tensor, cuda: bool, rounds: int) -> Iterator[list[object]]:
    """Rows of meshc's formats beside its bfloat16, then of torchao's recipes beside bfloat16 under `torch.compile`."""
    device, has_torchao = ids.device.type, importlib.util.find_spec("torchao") is not None
    ways: list[tuple[str, Callable[[], Contender]]] = [("meshc, bfloat16", partial(stepped, shape, ids, None, cuda))]
    ways += [(f"meshc, {form}", partial(stepped, shape, ids, f"precision *: {form}", cuda)) for form in STEPS]
    if cuda:
        ways.append(("torch.compile, bfloat16", partial(of_torchao, shape, ids, None)))
        ways += [(f"torchao, {recipe}", partial(of_torchao, shape, ids, recipe)) for recipe in RECIPES if has_torchao]
    base: Contender | None = None
    for name, make in ways:
        start = time.perf_counter()
        one = make()
        measured(one, device)
        first = time.perf_counter() - start
        if name.endswith("bfloat16"):
            base = one
        assert base is not None
        one.step_s, base.step_s = [], []
        for number in range(rounds):
            for each in (one, base) if number % 2 else (base, one):
                timed(each, device)
        ratios = [mine / theirs for mine, theirs in zip(one.step_s, base.step_s, strict=True)]
        held = None if one.held is None else one.held / 2**30
        yield [name, 1e3 * statistics.median(one.step_s), statistics.median(ratios), held, first]


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


def sparse_layers(shape: dict[str, int], rows: int, device: str, rounds: int) -> Iterator[list[object]]:
    torch.manual_seed(0)
    layer = FeedForward(shape["hidden_size"], shape["intermediate_size"]).to(device, torch.bfloat16)
    x = torch.randn(rows, shape["hidden_size"], device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        base = milliseconds(lambda: layer(x), device, rounds)
        yield ["feed-forward, dense", base, 1.0, None, None]
        mesh = init_device_mesh(device, (1,), mesh_dim_names=("dp",))
        program = meshc.compile(layer, mesh, args=(x,), plan="sparse *: 2:4, fixed")
        masked = milliseconds(lambda: program(x), device, rounds)
        yield ["feed-forward, `sparse *: 2:4, fixed`", masked, masked / base, None, None]
        if device != "cuda":
            return
        for linear in (layer.up, layer.down):
            kept = ours.keep_largest(linear.weight.unflatten(1, (-1, 4)), 2, 2).flatten(1)
            linear.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(kept))
        ms = milliseconds(lambda: layer(x), device, rounds)
        yield ["feed-forward, torch's semi-structured kernels", ms, ms / base, None, None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy shapes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", action="store_true", help="keep the tables as bench/results/gpu-few-bits.md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("not run: this machine has no CUDA device", file=sys.stderr)
        return 0
    cuda, device = options.device == "cuda", options.device
    shape, size, length = (TINY, 256, 128) if options.tiny else (SHAPE, 4096, 8192)
    dist.init_process_group("nccl" if cuda else "gloo", rank=0, world_size=1, store=dist.HashStore())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    where = f"{torch.cuda.get_device_name() if cuda else 'a CPU'}, torch {torch.__version__}, commit {commit}"
    products, taken = list[list[object]](), list[list[object]]()

    def keep(rows: list[list[object]], row: list[object]) -> None:
        rows.append(row)
        print(*row, file=sys.stderr, flush=True)
        if options.write:
            about = f"{where}, `{' '.join(['python', *sys.argv])}`"
            PAGE.write_text(f"# Few bits on one GPU\n\n{about}\n\n{tables(products, taken, 'github')}\n")

    for form in FORMATS.values():
        if form.is_scaled and not form.high and not form.history and not form.random:
            keep(products, product(form, size, device, options.rounds))
    ids = torch.randint(shape["vocab_size"], (1, length), device=device)
    for row in steps(shape, ids, cuda, options.rounds):
        keep(taken, row)
    for row in sparse_layers(shape, length, device, options.rounds):
        keep(taken, row)
    print(tables(products, taken, "simple"))
    dist.destroy_process_group()
    return 0


def tables(products: list[list[object]], taken: list[list[object]], how: str) -> str:
    first = tabulate(products, PRODUCT_HEADS, floatfmt=("", ".1f", "", "", ".1e", ".3f", ".3f", ".3f"), tablefmt=how)
    return f"{first}\n\n{tabulate(taken, STEP_HEADS, floatfmt=('', '.2f', '.3f', '.2f', '.1f'), tablefmt=how)}"


if __name__ == "__main__":
    sys.exit(main())
