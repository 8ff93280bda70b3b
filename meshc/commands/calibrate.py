"""`meshc calibrate`: measured figures of this machine for predicted times; under torchrun of its links too."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch

from meshc import environment
from meshc.cost.device_calibration import calibrate, keep
from meshc.runtime.run.link_times import link_times, process_group


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", metavar="FILE", help="default: where predictions look for it (MESHC_DEVICES, docs/environment.md)")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")


def run(options: argparse.Namespace) -> None:
    path = Path(options.out) if options.out else environment.device_file()
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, environment.local_rank()) if kind == "cuda" else torch.device(kind)
    with process_group(device) if environment.world_size() > 1 else nullcontext():
        links = link_times(device) if environment.world_size() > 1 else None
        found = calibrate(device, links, path)
    if environment.rank() == 0:
        keep(found, path)
        print(f"{found.table()}\nwritten to {path}")
