"""`meshc show`: a saved program as text, tables, JSON or a picture of the predicted timeline; or a picture of a run's trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from meshc.commands.target import add_device, harmless, load_program
from meshc.cost import call_timeline
from meshc.errors import PlanError
from meshc.ir import bounds
from meshc.pipelining import draw, perfetto_trace
from meshc.pipelining.timing import Timeline
from meshc.report import summary, tables
from meshc.report.figures import figures
from meshc.text import printer


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", metavar="PATH", help="the folder of a saved program")
    command.add_argument("--stage", help="only this stage")
    command.add_argument("--summary", action="store_true", help="tables instead of text")
    command.add_argument("--json", action="store_true", help="the summary's figures as JSON")
    add_device(command, "whose times the summary predicts")
    told = "write what a call is predicted to look like: .svg, .json (a trace), or a folder for both; PATH may be a trace to draw"
    command.add_argument("--timeline", metavar="FILE", help=told)


def run(options: argparse.Namespace) -> None:
    if options.path.endswith(".json") and Path(options.path).is_file():
        return _show_trace(options)
    if options.device is not None and not (options.summary or options.json):
        raise PlanError("--device says whose times are predicted: with --summary or --json")
    program = load_program(options.path, options)
    if options.stage is not None and options.stage not in program.stages:
        raise PlanError(f"{options.path} has no stage {options.stage!r}; it has {', '.join(program.stages)}")
    if options.timeline is not None:
        _draw(call_timeline.predict_timeline(program), options.timeline)
    elif options.json:
        print(json.dumps(figures(program, options.device), indent=1))
    elif options.summary:
        print(harmless(summary.summary(program, options.device)))
    elif options.stage is not None:
        print(harmless(printer.print_stage(program.stages[options.stage], program)), end="")
    else:
        print(harmless(printer.print_program(program)), end="")


def _show_trace(options: argparse.Namespace) -> None:
    """Draws the trace of a run."""
    line = perfetto_trace.trace_to_timeline(bounds.read_text(options.path), options.path)
    if options.timeline is None:
        raise PlanError(f"{options.path} is a trace: draw it with --timeline FILE.svg, or open it in ui.perfetto.dev")
    _draw(line, options.timeline)


def _draw(line: Timeline, file: str) -> None:
    draw.write(line, file)
    print(harmless(line.name) + f": {tables.seconds_text(line.call_s)} a call, drawn in {file}")
