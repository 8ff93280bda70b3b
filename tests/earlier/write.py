"""Write what this version saves to a new folder, by two processes:

    torchrun --nproc-per-node 2 -m tests.earlier.write FOLDER
    torchrun --nproc-per-node 2 -m meshc run FOLDER/program --inputs FOLDER/batch0.safetensors --outputs out --save-state FOLDER/folder

    model.safetensors                     first values of `Decoder`
    batch0.safetensors, batch1.…          the rows of two steps; ids.safetensors: the input of `forward`
    program, stored, pipelined, forward   artifacts: a step on tp=2, on dp=2 under fsdp, over two pipeline stages; a call on dp=2
    state, state.pt, folder               a DCP checkpoint, whole tensors in a file, the folder of `meshc run --save-state`: each after one
                                          step of `program`
    losses.json                           of each step's two calls
    trained.safetensors                   parameters after both calls of `program`, and `output` of `forward` for the first rows
    plans.json                            plans as users write them, and what they print as

`saved.tar.xz` holds such a folder, written at revision fbe75fb7. It is replaced by no other: what is added is a second archive.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import meshc

STEPS = {"program": ("tp=2", "megatron"), "stored": ("dp=2", "fsdp"), "pipelined": ("pp=2", None)}
"""Of each artifact of a step its mesh and plan."""

PLANS = (
    "dp: batch; store params, grads, state\ntp: heads, ffn, vocab > seq > features@products",
    "dp: batch\ncp: heads*seq@attention > seq",
    "tp: heads, ffn\npin head.weight: vocab/tp, _ only\npin op:linear: batch/dp, pending/tp",
    "dp: batch\nstore *.up.weight grads, state: ffn/dp, _\nremat blocks.*: selective\nchunk head: 4",
    "tp: heads\nkeep value:*up*\noffload state, update\noffload state head*: disk\noffload value:blocks.*",
    "tp: blocks.*.up.weight.0\ndp: -; store state",
    "dp: auto\ntp: ffn",
)
"""Each kind of line."""


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block(8, 2) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def decoder(folder: Path) -> Decoder:
    model = Decoder()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def batches(folder: Path) -> list[dict[str, Tensor]]:
    return [load_file(folder / f"batch{number}.safetensors") for number in range(2)]


def compiled(model: nn.Module, name: str, batch: dict[str, Tensor]) -> meshc.Program:
    mesh, plan = STEPS[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=cross_entropy, microbatches=2 if "pp" in mesh else 1)
    return meshc.compile(step, device_mesh(mesh), plan=plan, args=(batch["ids"],), kwargs={"target": batch["target"]})


def device_mesh(text: str) -> dist.DeviceMesh:
    name, size = text.split("=")
    return dist.init_device_mesh("cpu", (int(size),), mesh_dim_names=(name,))


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        folder.mkdir(parents=True)
        torch.manual_seed(0)
        save_file(Decoder().state_dict(), folder / "model.safetensors")
        for number in range(2):
            save_file({name: torch.randint(16, (4, 4)) for name in ("ids", "target")}, folder / f"batch{number}.safetensors")
        save_file({"ids": batches(folder)[0]["ids"]}, folder / "ids.safetensors")
    dist.barrier()
    rows, losses, trained = batches(folder), {}, {}
    for name in STEPS:
        program = compiled(decoder(folder), name, rows[0])
        program.save(folder / name)
        losses[name] = [float(program(rows[0]["ids"], target=rows[0]["target"]))]
        if name == "program":
            dcp.save(program.state_dict(), checkpoint_id=folder / "state")
            whole = program.state_dict(full=True)
            if first:
                torch.save(whole, folder / "state.pt")
        losses[name].append(float(program(rows[1]["ids"], target=rows[1]["target"])))
        if name == "program":
            trained = program.state_dict(full=True).get("model", {})
    forward = meshc.compile(decoder(folder).eval(), device_mesh("dp=2"), args=(rows[0]["ids"],))
    forward.save(folder / "forward")
    with torch.no_grad():
        output = forward(rows[0]["ids"])
    if first:
        save_file({**{name: value.contiguous() for name, value in trained.items()}, "output": output}, folder / "trained.safetensors")
        (folder / "losses.json").write_text(json.dumps(losses, indent=1))
        (folder / "plans.json").write_text(json.dumps({text: str(meshc.Plan(text)) for text in PLANS}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
