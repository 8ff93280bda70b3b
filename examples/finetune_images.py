"""Fine-tunes a stock vision model on a folder of images, which has a folder for each class with PNG or JPEG files in it.

    python examples/finetune_images.py --images photos                                            on one device
    torchrun --standalone --nproc-per-node 2 examples/finetune_images.py --images photos          the same on two, of which each reads half

This is the loop that one writes for one device, with one line more: `meshc.compile`, in front of the optimizer. Without `--weights` the
model is a small ViT with random weights, and without `--images` it draws sixty pictures of pebbles to try it on.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

import meshc

GROUNDS = {"grass": (60, 140, 60), "sand": (200, 180, 120), "water": (60, 110, 180)}
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets both


class Images(Dataset[dict[str, Any]]):
    """Images of a folder as numbers from -1 to 1, [3, size, size], with the number of their class."""

    def __init__(self, folder: Path, size: int, train: bool) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.size, self.files = size, list[tuple[Path, int]]()
        for label, name in enumerate(self.classes):
            found = sorted(file for file in (folder / name).iterdir() if file.suffix.lower() in (".png", ".jpg", ".jpeg"))
            held_out = found[::5]  # one of five is kept for validation
            self.files += [(file, label) for file in found if (file in held_out) != train]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, label = self.files[index]
        image = Image.open(file).convert("RGB").resize((self.size, self.size))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.get_default_dtype())
        return {"pixel_values": pixels / 127.5 - 1, "labels": label}


def draw(folder: Path, count: int = 60) -> None:
    """Pictures to try this on: pebbles in grass, on sand and in water, by their colour."""
    draws = random.Random(0)
    for number in range(count):
        name, colour = list(GROUNDS.items())[number % len(GROUNDS)]
        image = Image.new("RGB", (32, 32), tuple(shade + draws.randrange(-40, 40) for shade in colour))
        pen = ImageDraw.Draw(image)
        for _ in range(draws.randrange(1, 6)):
            x, y, size, grey = draws.randrange(28), draws.randrange(28), draws.randrange(4, 12), draws.randrange(60, 200)
            pen.ellipse((x, y, x + size, y + size), fill=(grey, grey, grey))
        (folder / name).mkdir(parents=True, exist_ok=True)
        image.save(folder / name / f"{number}.{'png' if number % 2 else 'jpg'}")


def build_model(weights: str | None, classes: list[str]) -> nn.Module:
    torch.manual_seed(0)
    names: dict[str, Any] = {"id2label": dict(enumerate(classes)), "label2id": {name: label for label, name in enumerate(classes)}}
    if weights:  # a folder or a name of the hub; its head is replaced by one for these classes
        return AutoModelForImageClassification.from_pretrained(weights, ignore_mismatched_sizes=True, **names)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes, **names))


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    """The part of all held-out images whose class is found, on every rank."""
    model.eval()
    counts = torch.zeros(2)
    for batch in loader:
        found = model(pixel_values=batch["pixel_values"]).logits.argmax(-1)
        counts += torch.tensor([(found == batch["labels"]).sum(), len(found)])
    model.train()
    if RANKS > 1:
        dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains; returns the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder with a folder of images for each class")
    parser.add_argument("--weights", help="what to begin with: a folder that save_pretrained has written, or a name of the hub")
    parser.add_argument("--out", type=Path, help="a folder for the trained model, which from_pretrained reads")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="images a step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-4)
    options = parser.parse_args(arguments)

    if RANKS > 1:
        dist.init_process_group("gloo")
    folder = options.images or Path("toy-images")
    if not options.images and RANK == 0:
        draw(folder)
    if RANKS > 1:
        dist.barrier()

    model = build_model(options.weights, Images(folder, 1, True).classes)
    size = getattr(model.config, "image_size", 224)
    train, valid = Images(folder, size, True), Images(folder, size, False)
    sampler = DistributedSampler(train, RANKS, RANK, drop_last=True)
    loader = DataLoader(train, batch_size=options.batch // RANKS, sampler=sampler, drop_last=True)
    held_out = DataLoader(valid, batch_size=options.batch // RANKS, sampler=DistributedSampler(valid, RANKS, RANK, shuffle=False))

    if RANKS > 1:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
        program = meshc.compile(model, mesh, kwargs=next(iter(loader)), inputs="local")  # each rank passes its part of the batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    losses = []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(**batch).loss  # of the whole batch, on every rank
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        right = accuracy(model, held_out)
        if RANK == 0:
            print(f"epoch {epoch:2d}  loss {losses[-1]:.4f}  {right:.0%} of the held-out images right", flush=True)

    if options.out:
        (program if RANKS > 1 else model).save_pretrained(options.out)
    if RANKS > 1:
        dist.barrier()  # a rank that left early would look like one that died
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
