"""Trains a language model on text files, as a job that runs for days does it: it may be killed at any moment and goes on where it was.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --out run --text 'docs/*.md' --mesh dp=2
    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --out run --text 'docs/*.md' --mesh tp=2    # goes on
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 ... examples/train_lm.py ...                # goes on by itself

Text is tokenised by byte and written once as shards of tokens, memory-mapped. The model is a small Llama, built on `meta` and given its
first values on the mesh. Steps run in bfloat16 (autocast), or by a plan in fewer bits (`--plan 'precision *: float8 row'`); the learning
rate warms up and follows a cosine down; now and then the same model is evaluated and writes a line of text. `run/metrics.jsonl` has a row
a step (TensorBoard too, where it is installed); checkpoints are written beside training, and of the complete ones the last few are kept.
What the folder was begun with (text, model, batches, seed) it goes on with; another mesh, plan, rate or number of steps may be given.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

import meshc

HERE = Path(__file__).resolve().parent
TEXT = (str(HERE / "data" / "*.txt"), str(HERE.parent / "README.md"), str(HERE.parent / "docs" / "*.md"))
SHARD_TOKENS = 1 << 20
FIXED = ("text", "width", "layers", "batch", "seq", "seed")
"""What a folder goes on with as it was begun."""


def refuse_another_job(options: argparse.Namespace, folder: Path) -> None:
    """`options.json` says what the folder was begun with: other layers' checkpoint, or other batches, would be gone on with in silence."""
    file, mine = folder / "options.json", {name: getattr(options, name) for name in FIXED}
    begun = json.loads(file.read_text()) if file.exists() else mine
    other = [f"--{name} {begun[name]}, and now {mine[name]}" for name in FIXED if begun.get(name) != mine[name]]
    if other:
        raise SystemExit(f"{folder} was begun with {'; '.join(other)}\n  what to do: give it the same, or another --out")
    put(file, json.dumps(mine))


def put(file: Path, text: str) -> None:
    """A file that is there whole, or as it was."""
    made = file.with_name(file.name + ".tmp")
    made.write_text(text)
    os.replace(made, file)


# ------------------------------------------------------------------------------------------------------------------------------- data


def write_shards(patterns: list[str], folder: Path) -> None:
    """Tokens of all files that match, as `000.bin`, `001.bin`, ... of one byte a token; a folder is there whole or not at all."""
    if folder.exists():
        return
    files = sorted({file for pattern in patterns for file in glob.glob(pattern, recursive=True) if Path(file).is_file()})
    if not files:
        raise SystemExit(f"no file matches {' '.join(patterns)}: name others with --text, as patterns in quotes")
    made = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    tokens = np.concatenate([np.frombuffer(Path(file).read_bytes() + b"\n\n", dtype=np.uint8) for file in files])
    for number, start in enumerate(range(0, len(tokens), SHARD_TOKENS)):
        tokens[start : start + SHARD_TOKENS].tofile(made / f"{number:03d}.bin")
    made.rename(folder)


class Loader:
    """Batches [batch, seq] of token ids, the same on every rank: windows of the shards, shuffled anew each epoch.

    What it holds is how many batches it has given; `state_dict` says that, so that a loader that goes on gives what would have come."""

    def __init__(self, folder: Path, batch: int, seq: int, part: str, seed: int = 0) -> None:
        shards = [np.memmap(file, dtype=np.uint8, mode="r") for file in sorted(folder.glob("*.bin"))]
        windows = [(shard, start) for shard in shards for start in range(0, len(shard) - seq + 1, seq)]
        held_out = max(batch, len(windows) // 20)  # the last twentieth is evaluated on
        self.windows = windows[-held_out:] if part == "valid" else windows[:-held_out]
        if len(self.windows) < batch:
            raise SystemExit(f"the text has {len(windows)} windows of {seq} tokens, too few for batches of {batch}; give more")
        self.batch, self.seq, self.seed, self.given = batch, seq, seed, 0

    def next(self) -> Tensor:
        per_epoch = len(self.windows) // self.batch
        epoch, at = divmod(self.given, per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.windows))[at * self.batch : (at + 1) * self.batch]
        self.given += 1
        rows = [shard[start : start + self.seq] for shard, start in (self.windows[window] for window in order)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.given = int(state["given"])


# ------------------------------------------------------------------------------------------------------------ metrics and checkpoints


class Metrics:
    """`metrics.jsonl`, a row a step, and TensorBoard where it is installed; on rank 0 alone."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.file = None
        if dist.get_rank():
            return
        path = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []  # what has no end is no row
        put(path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] < first_step))  # later ones are about to be made again
        self.file = path.open("a", buffering=1)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.board = None
        else:
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def write(self, row: dict[str, Any]) -> None:
        if self.file is None:
            return
        said = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value!r}" for name, value in row.items())
        print("  ".join(said), flush=True)
        self.file.write(json.dumps(row) + "\n")
        for name, value in row.items() if self.board is not None else ():
            if isinstance(value, float):
                self.board.add_scalar(name, value, row["step"])


@dataclass
class Checkpoints:
    """`step-N` in a folder, written beside training: one at a time, under another name until it is complete."""

    folder: Path
    keep: int
    group: dist.ProcessGroup = field(default_factory=lambda: dist.new_group(backend="gloo"))  # what is sent beside training goes apart
    _writing: tuple[Any, Path] | None = None

    def complete(self) -> list[Path]:
        return sorted(self.folder.glob("step-*[0-9]"))

    def load(self, state: dict[str, Any]) -> None:
        """The newest that is complete, if there is any."""
        found = self.complete()
        if not found:
            return
        try:
            dcp.load(state, checkpoint_id=found[-1])
        except CheckpointException as error:
            then = f"goes on from {found[-2]}" if len(found) > 1 else "begins anew"
            raise failed(f"{found[-1]} cannot be read", error, f"remove it, and the job {then}") from None
        if dist.get_rank() == 0:
            print(f"goes on from {found[-1]}", flush=True)

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.wait()
        made = self.folder / f"step-{step:08d}.tmp"
        if dist.get_rank() == 0:
            shutil.rmtree(made, ignore_errors=True)
        dist.barrier(self.group)
        self._writing = dcp.async_save(state, checkpoint_id=made, process_group=self.group), made

    def wait(self) -> None:
        """Until the one that is being written is complete; then it gets its name, and the oldest goes."""
        if self._writing is None:
            return
        (saved, made), self._writing = self._writing, None
        try:
            saved.result()
        except CheckpointException as error:
            then = f"goes on from {self.complete()[-1]}" if self.complete() else "begins anew"
            raise failed(f"{made} cannot be written", error, f"see to it (room on the disk?) and start again: the job {then}") from None
        dist.barrier(self.group)
        if dist.get_rank() == 0:
            shutil.rmtree(made.with_suffix(""), ignore_errors=True)
            made.rename(made.with_suffix(""))
            for old in self.complete()[: -self.keep]:
                shutil.rmtree(old)
        dist.barrier(self.group)


def failed(what: str, error: CheckpointException, advice: str) -> SystemExit:
    """Of torch's pages about a checkpoint, what went wrong on the first rank. All ranks leave; rank 0 says why."""
    rank, (cause, *_) = next(iter(error.failures.items()))
    return SystemExit(f"{what}: on rank {rank} {type(cause).__name__}: {cause}\n  what to do: {advice}" if dist.get_rank() == 0 else 1)


# ----------------------------------------------------------------------------------------------------------------------------- training


def build_mesh(text: str) -> DeviceMesh:
    axes = dict(entry.split("=") for entry in text.split(","))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, tuple(map(int, axes.values())), mesh_dim_names=tuple(axes))


def build_model(width: int, layers: int, seq: int) -> LlamaForCausalLM:
    """On `meta`: a rank never has more of it than its part."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=width * 8 // 3 // 4 * 4, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=max(512, seq), pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def build_optimizer(model: LlamaForCausalLM, steps: int, lr: float) -> tuple[AdamW, LambdaLR]:
    """AdamW; the learning rate rises for a tenth of the steps and then follows half a cosine down to a tenth."""
    warmup = max(1, steps // 10)

    def scale(step: int) -> float:
        behind = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
        return min((step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * behind)))

    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95))
    return optimizer, LambdaLR(optimizer, scale)


class Evaluation:
    """A second program of the model, over the same parameters: the loss of what training does not see, and text."""

    @torch.no_grad()
    def __init__(self, model: LlamaForCausalLM, mesh: DeviceMesh, plan: str | None, valid: Loader, mixed: bool) -> None:
        self.model, self.valid, self.device, self.mixed = model, valid, mesh.device_type, mixed
        with self._evaluating():
            self.program = meshc.compile(model, mesh, plan=plan, kwargs=self._inputs())

    @torch.no_grad()
    def loss(self, batches: int) -> float:
        """The mean over the first batches, always the same ones."""
        self.valid.given = 0
        with self._evaluating():
            losses = [self.program(**self._inputs()).loss.item() for _ in range(batches)]
        return sum(losses) / len(losses)

    @torch.no_grad()
    def text(self, prompt: str, tokens: int) -> str:
        ids = torch.tensor([list(prompt.encode())])
        with self._evaluating():
            written = self.program.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return bytes(written[0].tolist()).decode(errors="replace")

    def _inputs(self) -> dict[str, Any]:
        ids = self.valid.next()
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.mixed):
            yield
        self.model.train()


def train(options: argparse.Namespace) -> None:
    mesh = build_mesh(options.mesh)
    rank, out, device, mixed = dist.get_rank(), Path(options.out), mesh.device_type, options.dtype == "bfloat16"
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        refuse_another_job(options, out)
        write_shards(options.text, out / "tokens")
    dist.barrier()
    data = Loader(out / "tokens", options.batch, options.seq, "train", options.seed)
    valid = Loader(out / "tokens", options.batch, options.seq, "valid", options.seed)

    model = build_model(options.width, options.layers, options.seq)
    optimizer, schedule = build_optimizer(model, options.steps, options.lr)
    step = meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=1.0)
    example = valid.next()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=mixed):
        kwargs = {"input_ids": example, "labels": example}
        program = meshc.compile(step, mesh, plan=options.plan, kwargs=kwargs, options=meshc.Options(seed=options.seed))
    program.init_weights()

    evaluation = Evaluation(model, mesh, options.plan, valid, mixed)

    checkpoints = Checkpoints(out, options.keep)
    state = {"program": program, "data": data, "schedule": schedule}
    checkpoints.load(state)
    first = data.given
    metrics = Metrics(out, first)
    for number in range(first, options.steps):
        start = time.perf_counter()
        ids = data.next()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=mixed):
            loss = program(input_ids=ids, labels=ids).item()
        row: dict[str, Any] = {"step": number, "loss": loss, "lr": schedule.get_last_lr()[0]}
        row["grad_norm"] = float(program.metrics["grad_norm"])
        schedule.step()
        row["tokens_per_s"] = ids.numel() / (time.perf_counter() - start)
        if (number + 1) % options.eval_every == 0:
            row["valid_loss"] = evaluation.loss(options.eval_batches)
        if options.sample_every and (number + 1) % options.sample_every == 0:
            row["sample"] = evaluation.text("The ", 32)
        metrics.write(row)
        if (number + 1) % options.save_every == 0:
            checkpoints.save(number + 1, state)
    checkpoints.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of tokens, metrics and checkpoints; what is there is gone on from")
    parser.add_argument("--text", nargs="+", default=list(TEXT), help="files, as patterns; by default this repository's own pages")
    parser.add_argument("--mesh", default="dp=2", help='axes and their sizes: "dp=2,tp=2"')
    parser.add_argument("--plan", help="a recipe or plan; by default what the axes' names stand for")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products: bfloat16 is autocast")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over the whole mesh")
    parser.add_argument("--seq", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--sample-every", type=int, default=100, help="0: never")
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that are kept")
    options = parser.parse_args(arguments)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options)
    dist.barrier()  # a rank that left early would look like one that died
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
