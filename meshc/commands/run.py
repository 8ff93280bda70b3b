"""`meshc run`: outputs, metrics and new state of a saved program, run on input files without the model; one process a rank."""

from __future__ import annotations

import argparse
from dataclasses import fields

from meshc.program.program import BACKENDS
from meshc.runtime.saved.run_saved import RunRequest, run_saved


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", metavar="PATH", help="the folder of a saved program")
    told = "safetensors: each input, the whole batch, under its path; of several files each is a call (a training step)"
    command.add_argument("--inputs", metavar="FILE", nargs="+", default=[], help=told)
    command.add_argument("--outputs", metavar="DIR", required=True, help="where rank 0 writes outputs.safetensors and metrics.json")
    told = "begin with the parameters and optimizer state that --save-state wrote here, instead of the program's weights"
    command.add_argument("--state", metavar="DIR", help=told)
    told = "write parameters, optimizer state, seed and step to this folder at the end, each rank its own part"
    command.add_argument("--save-state", metavar="DIR", help=told)
    told = 'the optimizer\'s numbers by step, a row a line: {"step": 0, "lr": 0.001}; a row holds until the next'
    command.add_argument("--numbers", metavar="FILE", help=told)
    told = "after each N calls experts move between ranks by their load (of a program compiled with movable experts)"
    command.add_argument("--rebalance-every", metavar="N", type=int, help=told)
    command.add_argument("--backend", choices=BACKENDS, help="refused unless the program was compiled for it")
    command.add_argument("--seed", type=int, help="of random numbers; default: what the program, or its state, was saved with")


def run(options: argparse.Namespace) -> None:
    asked = {one.name: getattr(options, one.name) for one in fields(RunRequest)}
    run_saved(RunRequest(**asked))
