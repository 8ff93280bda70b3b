"""`meshc report`: one HTML page about a saved program, with its decisions and their reasons."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshc.commands.target import add_device, harmless, load_program
from meshc.report import html
from meshc.report.page import page
from meshc.report.tables import bytes_text, seconds_text


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", metavar="PATH", help="the folder of a saved program")
    command.add_argument("--out", metavar="FILE.html", help="the file to write; default: PATH's name with .html, here")
    add_device(command, "whose times are predicted")


def run(options: argparse.Namespace) -> None:
    program = load_program(options.path, options)
    name = Path(options.path).resolve().name.removesuffix(".meshc")
    out = options.out or f"{name}.html"
    made = page(program, name, options.device)
    html.write(made, out)
    takes = f"{seconds_text(made.head.step_s)} a call on {made.head.device}, a rank holds {bytes_text(made.head.holds)}"
    print(harmless(f"{name}: {takes}; written to {out}"))
