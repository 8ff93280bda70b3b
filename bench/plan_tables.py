"""What the search finds for large models on many devices, beside the best recipe: the table of docs/planner-figures.md, without devices.

    python bench/plan_tables.py                                       # all rows, those that are in bench/results/plan-tables.json left out
    python bench/plan_tables.py --models llama-8b gpt2-xl --meshes 8 64
    python bench/plan_tables.py --anew --models llama-8b              # measured again
    python bench/plan_tables.py --limit 120                           # of a row that takes more CPU seconds it is kept that it does
    python bench/plan_tables.py --retry                               # rows that were not measured, for the limit or an error, once more
    python bench/plan_tables.py --write                               # and docs/planner-figures.md carries what is there

Rows are measured one after another, and each is kept as soon as it is there: a run that was stopped goes on where it was, under the same
command. A row that fails, or takes too long, is a row that says so, and the next one is measured. Runs of different models may go on side
by side.

A row is a model, a mesh and a number of tokens: 64 x 8192 a step (4096 ranks: 512 x 8192), or the shorter sequences that the model takes,
and a smaller step that fits without recomputation. Every recipe and combination of recipes is weighed under the same memory; the best of
them by the clock stands beside what the search finds. A recipe goes through all passes unless the planner's model says that it holds LARGE
times the memory, or takes SLOW_BY times what the best recipe takes by the clock, with what can be hidden behind computing hidden. How far
that estimate was from the clock, of what went through all passes, stands in each row.

The rows of one model are one process, and those of one number of tokens one capture, with its factors: neither knows of the mesh. Weights
are on the meta device.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: CPU seconds of idle threads are no one's

import torch  # noqa: E402
import transformers  # noqa: E402
from carried import carry  # noqa: E402
from own_process import each_in_a_process  # noqa: E402
from tabulate import tabulate  # noqa: E402

import meshc  # noqa: E402
from meshc.api.planning import Planner, PlanResult  # noqa: E402
from meshc.cost.devices import Device, Link, device  # noqa: E402
from meshc.ir.mesh import Mesh  # noqa: E402
from meshc.passes.driver.search_errors import NothingFits  # noqa: E402
from meshc.plan.combinations import combinations  # noqa: E402
from meshc.plan.plan import Plan  # noqa: E402
from meshc.plan.plan_candidate import PlanCandidate  # noqa: E402

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "bench" / "results" / "plan-tables.json"
LARGE, SLOW_BY = 1.5, 1.1

Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def _causal(config: Any, batch: int, tokens: int) -> Built:
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    config.use_cache = False  # training fills no cache
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), {"input_ids": ids, "labels": ids}


def _llama(layers: int, hidden: int, ffn: int, heads: int) -> Callable[[int, int], Built]:
    def build(batch: int, tokens: int) -> Built:
        sizes = dict(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads)
        return _causal(
            transformers.LlamaConfig(num_key_value_heads=8, vocab_size=128256, max_position_embeddings=tokens, **sizes), batch, tokens
        )  # fmt: skip

    return build


def _gpt2(batch: int, tokens: int) -> Built:
    return _causal(transformers.GPT2Config(n_layer=48, n_head=25, n_embd=1600, n_positions=tokens), batch, tokens)


def _mixtral(batch: int, tokens: int) -> Built:
    return _causal(transformers.MixtralConfig(max_position_embeddings=tokens), batch, tokens)


def _gemma2(batch: int, tokens: int) -> Built:
    sizes: dict[str, Any] = dict(
        hidden_size=4608, intermediate_size=36864, num_hidden_layers=46, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
    )  # fmt: skip
    return _causal(transformers.Gemma2Config(max_position_embeddings=tokens, query_pre_attn_scalar=144, **sizes), batch, tokens)


def _t5(batch: int, tokens: int) -> Built:
    sizes = dict(d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_decoder_layers=24, num_heads=128)
    said = dict(decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    ids = torch.zeros(batch, tokens, dtype=torch.int64)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **said)).to(torch.bfloat16)
    return model, {"input_ids": ids, "labels": ids[:, : tokens // 4]}


def _vit(batch: int, tokens: int) -> Built:
    """Tokens are patches: an image has 256 and the class token."""
    sizes = dict(hidden_size=1408, intermediate_size=6144, num_hidden_layers=40, num_attention_heads=16, image_size=224, patch_size=14)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000, **sizes)).to(torch.bfloat16)
    images = batch * tokens // 256
    return model, {"pixel_values": torch.zeros(images, 3, 224, 224, dtype=torch.bfloat16), "labels": torch.zeros(images, dtype=torch.int64)}


@dataclass(frozen=True)
class Model:
    """small: (sequences, tokens) of the step that fits without recomputation, for each 64 ranks; tokens: of a sequence of the large one."""

    build: Callable[[int, int], Built]
    tokens: int
    small: tuple[int, int]


MODELS = {
    "gpt2-xl": Model(_gpt2, 1024, (64, 1024)),
    "llama-8b": Model(_llama(32, 4096, 14336, 32), 8192, (64, 2048)),
    "llama-70b": Model(_llama(80, 8192, 28672, 64), 8192, (16, 2048)),
    "mixtral-8x7b": Model(_mixtral, 8192, (16, 2048)),
    "t5-11b": Model(_t5, 2048, (64, 512)),
    "vit-g": Model(_vit, 256, (256, 256)),
    "gemma2-27b": Model(_gemma2, 8192, (32, 2048)),
}
MESHES = {"8": "tp=8", "64": "dp=8,tp=8", "512": "dp=64,tp=8", "4096": "dp=512,tp=8", "2x8-a100": "dp=2,tp=8"}
"""Ranks of one node are the last axis; each is searched, whatever it is called."""
SLOW = Link(latency_s=30e-6, bandwidth_Bps=1.25e9)
"""Between two boxes without a fabric: 10 Gbit/s Ethernet for each GPU."""


@dataclass(frozen=True)
class Row:
    """
    recipe    the best by the clock of those that fit;  found_ms  what the search takes;  taken  what that is
    gap       per cent that a better choice could save at most, by the model;  least_gb  where nothing fits: what the least holds
    choices_s CPU seconds of the search's choices;  search_s  with the candidates that it did not take;  all_s  of the row
    lowered   candidates that went through all passes;  left_out  recipes that did not
    off       the least and the most that the clock was of the estimate;  measured  whether the row came to its end
    """

    model: str
    mesh: str
    step: str
    recipe: str
    recipe_ms: float | None
    found_ms: float | None
    taken: str
    gap: float | None
    holds_gb: float | None
    search_s: float | None
    all_s: float
    said: str = ""
    least_gb: float | None = None
    choices_s: float | None = None
    lowered: int | None = None
    left_out: int | None = None
    off: tuple[float, float] | None = None
    measured: bool = True


class OverLimit(BaseException):
    """A row has taken more CPU seconds than it may. No error that the compiler might take for one of the model's."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises OverLimit in what runs under it after so many CPU seconds."""

    def stop(*_: object) -> None:
        raise OverLimit

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, 0 if seconds == inf else seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def device_of(mesh: str) -> Device:
    return replace(device("a100"), between_nodes=SLOW) if mesh.endswith("a100") else device("h100")


class Rows:
    """The rows of one model."""

    def __init__(self, name: str) -> None:
        self.name, self.model = name, MODELS[name]
        self._planners: dict[tuple[int, int], Planner] = {}

    def step(self, size: str, small: bool) -> tuple[int, int]:
        """Sequences, and tokens of each."""
        ranks, tokens = Mesh(MESHES[size]).world_size, self.model.tokens
        if small:
            return max(ranks, self.model.small[0] * ranks // 64), self.model.small[1]
        return (512 if ranks == 4096 else 64) * 8192 // tokens, tokens

    def planner(self, sequences: int, tokens: int) -> Planner:
        """Of one number of tokens, whatever the mesh."""
        key = sequences, tokens
        if key not in self._planners:
            with torch.device("meta"):
                module, inputs = self.model.build(sequences, tokens)
            module.train()
            optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, weight_decay=0.1)
            self._planners[key] = Planner(meshc.TrainStep(module, optimizer=optimizer, clip_grad_norm=1.0), (), inputs)
        return self._planners[key]

    def row(self, size: str, small: bool, limit: float) -> Row:
        """What is measured within so many CPU seconds, or why there is nothing."""
        start = time.process_time()
        try:
            with limited(limit):
                return self.measure(size, small)
        except OverLimit:
            said = f"not within {limit:.0f} CPU seconds"
            self._planners.clear()  # it may have been in the middle of anything
        except Exception as error:  # a row of the table: the others are worth having
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
        sequences, tokens = self.step(size, small)
        spent = time.process_time() - start
        return Row(self.name, size, f"{sequences} x {tokens}", "", None, None, "", None, None, None, spent, said, measured=False)

    def measure(self, size: str, small: bool) -> Row:
        start = time.process_time()
        sequences, tokens = self.step(size, small)
        on, mesh, planner = device_of(size), Mesh(MESHES[size], device="cuda"), self.planner(sequences, tokens)
        budget = int(on.memory_bytes)

        def planned(plan: Plan | str) -> PlanResult:
            return planner.on(mesh, plan, device=on, options=meshc.Options(memory_budget=budget))

        found = planned("auto")
        weighed = found.refused.weighed if isinstance(found.refused, NothingFits) else found.weighed
        recipes, left_out = weigh_recipes(weighed, mesh, planned, budget)
        fitting = [one for one in recipes if (one.holds or 0) <= budget]
        best = min(fitting, key=lambda one: one.seconds or 0.0, default=None)
        note = next((note for note in (found.program.notes if found.program else ()) if "searched;" in note), "")
        taken = found.weighed[0] if found.program is not None else None
        before = {one.name for one in weighed if one.seconds is not None}
        lowered = sum(one.seconds is not None for one in weighed) + sum(one.name not in before for one in recipes)
        off = [float(one.seconds / one.estimated) for one in (*weighed, *recipes) if one.seconds and one.estimated]
        least = [found.refused.least] if isinstance(found.refused, NothingFits) and found.refused.least else []
        least += [one.holds for one in recipes if one.holds is not None]
        return Row(
            self.name, size, f"{sequences} x {tokens}", "none fits" if best is None else best.name, _ms(best), _ms(taken),
            "" if taken is None else taken.name, float(note.partition("a gap of ")[2].partition("%")[0]) if "a gap of " in note else None,
            None if taken is None or taken.holds is None else taken.holds / 1e9, found.seconds, time.process_time() - start,
            _why_none(found), min(least) / 1e9 if least and found.program is None else None,
            found.solved_s, lowered, left_out, (min(off), max(off)) if off else None,
        )  # fmt: skip


def _why_none(found: PlanResult) -> str:
    return "nothing fits" if isinstance(found.refused, NothingFits) else str(found.refused or "").partition("\n")[0]


def _ms(one: PlanCandidate | None) -> float | None:
    return None if one is None or one.seconds is None else 1e3 * one.seconds


def weigh_recipes(
    weighed: tuple[PlanCandidate, ...], mesh: Mesh, planned: Callable[[Plan], PlanResult], budget: int
) -> tuple[list[PlanCandidate], int]:  # fmt: skip
    """Recipes by the clock, and how many were left out. Those that the search has lowered already are not lowered again."""
    known = {one.name: one for one in weighed}
    combined = {name: Plan.of(entries) for name, entries in combinations([axis.name for axis in mesh.axes if axis.size > 1])}
    found = [known[name] for name in combined if name in known and known[name].seconds is not None]
    left_out = 0
    for name in sorted(combined.keys() - {one.name for one in found}, key=lambda name: (_estimate(known.get(name)), name)):
        best = min((one.seconds or 0.0 for one in found if (one.holds or 0) <= budget), default=float("inf"))
        one = known.get(name)
        if one is not None and (_estimate(one) > SLOW_BY * best or (one.holds or 0) > LARGE * budget):
            left_out += 1
            continue
        made = next(iter(planned(combined[name]).weighed), None)
        if made is not None:
            found.append(replace(made, name=name, estimated=None if one is None else one.estimated))
    return found, left_out


def _estimate(one: PlanCandidate | None) -> float:
    return 0.0 if one is None or one.estimated is None else one.estimated


def rows_of(name: str, asked: list[tuple[str, bool]], limit: float) -> Iterator[Row]:
    rows = Rows(name)
    for size, small in asked:
        yield rows.row(size, small, limit)


def table(rows: list[Row]) -> str:
    heads = (
        "model", "ranks", "step", "best recipe", "ms", "found, ms", "of it", "gap, %", "holds, GB", "clock of estimate", "choices, s",
        "row, s", "",
    )  # fmt: skip
    cells = [
        [
            row.model, row.mesh, row.step, row.recipe, _number(row.recipe_ms), _number(row.found_ms),
            f"{row.found_ms / row.recipe_ms:.3f}" if row.found_ms and row.recipe_ms else "", _number(row.gap, 2), _number(row.holds_gb),
            "" if row.off is None else f"{row.off[0]:.2f} to {row.off[1]:.2f}", _number(row.choices_s), _number(row.all_s), _told(row),
        ]
        for row in rows
    ]  # fmt: skip
    return str(tabulate(cells, heads, tablefmt="github", disable_numparse=True))


def _told(row: Row) -> str:
    if row.least_gb is not None:
        return f"{row.said}; the least holds {row.least_gb:.1f} GB"
    return row.said or (f"{row.taken} is taken" if row.taken not in ("", "found") else "")


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def kept() -> dict[str, Row]:
    return {key: Row(**row) for key, row in json.loads(KEPT.read_text()).items()} if KEPT.exists() else {}


def keep(key: str, row: Row) -> dict[str, Row]:
    """All rows that are there, with this one, unless it was measured once and now was not. Other runs may keep theirs meanwhile."""
    lock = os.open(KEPT.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = kept()
        if row.measured or not rows.get(key, row).measured:
            rows[key] = row
        made = KEPT.with_suffix(".part")
        made.write_text(json.dumps({key: asdict(row) for key, row in rows.items()}, indent=1) + "\n")
        made.replace(KEPT)
    finally:
        os.close(lock)
    return rows


def _key(name: str, size: str, small: bool) -> str:
    return f"{name} {size} {'small' if small else 'large'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--steps", nargs="+", choices=("large", "small"), default=["large", "small"])
    parser.add_argument("--anew", action="store_true", help="also rows that are there")
    parser.add_argument("--retry", action="store_true", help="also rows that say why they were not measured")
    parser.add_argument("--limit", type=float, default=inf, metavar="SECONDS", help="CPU seconds that a row may take; default: any")
    parser.add_argument("--write", action="store_true", help="docs/planner-figures.md carries all rows that are there")
    asked = parser.parse_args()
    rows = kept()
    for name in asked.models:
        steps = [(size, step == "small") for step in asked.steps for size in asked.meshes]
        there = {key for key, row in rows.items() if not asked.anew and (row.measured or not asked.retry)}
        left = [(size, small) for size, small in steps if _key(name, size, small) not in there]
        for (size, small), row in zip(left, each_in_a_process(rows_of, name, left, asked.limit), strict=True):
            print(_key(name, size, small), asdict(row), flush=True)
            rows = keep(_key(name, size, small), row)
    order = [f"{name} {size} {step}" for name in MODELS for size in MESHES for step in ("large", "small")]
    shown = table([rows[key] for key in order if key in rows])
    print(shown)
    if asked.write:
        carry("planner-figures.md", "bench/plan_tables.py", shown)


if __name__ == "__main__":
    from transformers.models.llama import modeling_llama  # noqa: F401  # with the imports, not with the first row

    main()
