"""Calibration of the machine at hand (`meshc calibrate`): figures measured, fitted, and stored for `devices.devices_of`."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate

from meshc import environment
from meshc.cost import device_fit, microbenchmarks
from meshc.cost.device_fit import TimedSample
from meshc.cost.devices import DTYPES, Device, Efficiency, Link, Processor, device, name_of, names, read_devices, write_devices

INSIDE, BETWEEN = "inside a node", "between nodes"
"""Kinds of links that are measured."""


@dataclass(frozen=True)
class Links:
    """Measurements of the links between ranks.

    samples     by kind of link (INSIDE, BETWEEN)
    contention  seconds that computing loses per second of an overlapping collective's own time
    uneven      seconds between ranks after one second of computing (`cost/stage_clock.py`)
    """

    samples: Mapping[str, Sequence[TimedSample]]
    contention: float
    uneven: float


@dataclass(frozen=True)
class Calibration:
    """A measured device, and the rows of a table with its figures and the errors of their fits."""

    device: Device
    rows: Sequence[tuple[str, str, str]]

    def table(self) -> str:
        text = tabulate(self.rows, headers=["", "figure", "fit"], disable_numparse=True)
        return "\n".join([self.device.source, *(f"  {line}".rstrip() for line in text.splitlines())])


def calibrate(hardware: torch.device, measured: Links | None, path: Path) -> Calibration:
    """Measure a device; `measured` are measurements of its links.

    A link without samples keeps the figures of an earlier calibration in `path`, or the table's. Without `measured`, so do all figures of
    links.
    """
    name = "cpu" if hardware.type == "cpu" else name_of(torch.cuda.get_device_name(hardware))
    before = _before(name, hardware, path)
    launch_s = microbenchmarks.overhead(hardware)
    fitted = {dtype: device_fit.products(microbenchmarks.products(hardware, getattr(torch, dtype)), launch_s) for dtype in DTYPES}
    products, per_byte_s = {dtype: one for dtype, (one, _) in fitted.items()}, fitted["float32"][1]
    attention = device_fit.rate([microbenchmarks.attention(hardware)], launch_s).figure / products["float32"].figure
    memory = device_fit.rate(microbenchmarks.additions(hardware), launch_s)
    moves = per_byte_s * memory.figure if microbenchmarks.THIN[hardware.type] else before.product_moves
    samples = measured.samples if measured else {}
    contention, uneven = (measured.contention, measured.uneven) if measured else (before.contention, before.uneven)
    rows = [
        *((f"products in {dtype}", f"{one.figure / 1e9:.1f} GFLOP/s", _within(one.error)) for dtype, one in products.items()),
        ("products move beside that", f"{moves:.1f} times", ""),
        ("attention", f"{100 * attention:.0f} % of that", ""),
        ("memory", f"{memory.figure / 1e9:.2f} GB/s", _within(memory.error)),
        ("an operator's overhead", f"{launch_s * 1e6:.2f} us", ""),
    ]
    links, overheads = [], []
    for where, kept in zip((INSIDE, BETWEEN), before.links, strict=True):
        if samples.get(where):
            found, overhead_s, error = device_fit.link(samples[where])
            overheads.append(overhead_s)
            ranks = max(sample.ranks for sample in samples[where])
            rows.append((f"link {where}, {ranks} ranks", _link_text(found), _within(error)))
        else:
            found = kept
            rows.append((f"link {where}", _link_text(found), "not measured"))
        links.append(found)
    rows.append(("computing loses beside", f"{100 * contention:.0f} % of what a collective takes", ""))
    rows.append(("ranks are apart after 10 ms", f"{uneven * 0.01**0.5 * 1e3:.2f} ms", ""))
    if overheads:
        rows.append(("a collective's overhead", f"{max(overheads) * 1e6:.1f} us", ""))
    processor = before.processor
    if hardware.type != "cpu":
        processor, row = _on_the_host()
        rows.append(row)
    made = replace(
        before,
        name=name,
        flops_per_s={dtype: one.figure for dtype, one in products.items()},
        memory_Bps=memory.figure,
        memory_bytes=_memory_bytes(hardware),
        launch_s=launch_s,
        collective_s=max(overheads, default=before.collective_s),
        inside_node=links[0],
        between_nodes=links[1],
        host=before.host_link,
        processor=processor,
        ranks_per_node=environment.local_world_size() if samples else before.ranks_per_node,
        efficiency=Efficiency(attention=attention),
        contention=contention,
        uneven=uneven,
        product_moves=moves,
        source=_source(hardware),
    )
    return Calibration(made, rows)


def _on_the_host() -> tuple[Processor, tuple[str, str, str]]:
    """This rank's share of its host's processors, measured while the other ranks measure too, and a row of the table. The figures are
    divided by the efficiency of `cpu`, since `Device.there` multiplies by it."""
    cpu, share = torch.device("cpu"), device("cpu").efficiency
    launch_s = microbenchmarks.overhead(cpu)
    memory, (products, _) = (
        device_fit.rate(microbenchmarks.additions(cpu), launch_s),
        device_fit.products(microbenchmarks.products(cpu, torch.float32), launch_s),
    )
    found = Processor(memory.figure / share.memory, products.figure / share.flops, launch_s)
    figure = f"{memory.figure / 1e9:.2f} GB/s, {products.figure / 1e9:.1f} GFLOP/s, {launch_s * 1e6:.2f} us"
    return found, ("operators on the host", figure, _within(max(memory.error, products.error)))


def keep(calibration: Calibration, path: Path) -> None:
    """Write the measured device to a file; other devices in it stay."""
    others = read_devices(path) if path.exists() else {}
    write_devices({**others, calibration.device.name: calibration.device}.values(), path)


def _before(name: str, hardware: torch.device, path: Path) -> Device:
    known = read_devices(path) if path.exists() else {}
    if name in known:
        return known[name]
    return device(name if name in names() else "h100" if hardware.type == "cuda" else "cpu")


def _source(hardware: torch.device) -> str:
    threads = torch.get_num_threads()
    what = f"{threads} thread{'s' * (threads > 1)}" if hardware.type == "cpu" else torch.cuda.get_device_name(hardware)
    return f"measured on {platform.node()}, {what}, torch {torch.__version__}"


def _memory_bytes(hardware: torch.device) -> float:
    """Bytes of a GPU's memory, or of this rank's share of the machine's."""
    if hardware.type == "cuda":
        return float(torch.cuda.get_device_properties(hardware).total_memory)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / environment.local_world_size()


def _link_text(link: Link) -> str:
    return f"{link.latency_s * 1e6:.1f} us, {link.bandwidth_Bps / 1e9:.2f} GB/s"


def _within(error: float) -> str:
    return f"within {100 * error:.0f} %"
