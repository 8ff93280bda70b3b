"""Figures of devices and links, as data: the table in `devices.toml`, and what `meshc calibrate` has measured.

    [h100]                                  what `meshc calibrate` writes for this user has the same form, and is asked first
    memory_Bps = 3.35e12
    ...
    [h100.flops_per_s]
    bfloat16 = 989e12
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from meshc import environment
from meshc.errors import PlanError
from meshc.mesh import Mesh

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE: Final = Path(__file__).with_name("devices.toml")
ANEW: Final = "delete the file, and `meshc calibrate` writes it anew"
DTYPES: Final = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Link:
    """What a message costs: `latency_s` whatever its size, and its bytes at `bandwidth_Bps`, a rank's in one direction."""

    latency_s: float
    bandwidth_Bps: float


@dataclass(frozen=True)
class Efficiency:
    """The fractions of the peaks that programs get. `attention`: of `flops_per_s`, what attention's kernels get."""

    flops: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    links: float = 1.0


@dataclass(frozen=True)
class Device:
    """One rank's device. Peaks as the table has them; `rate`, `bytes_per_s` and `links` are what can be had of them.

    flops_per_s     by dtype (DTYPES); float32 is IEEE float32, not TF32
    launch_s        overhead of each operator, whatever its size
    collective_s    overhead of each collective, beside its messages' latency
    attention_keys  keys that attention's kernels go through at once: a mask saves work by as many
    ranks_per_node  ranks r and s share a node if r // ranks_per_node == s // ranks_per_node
    source          where the figures come from, in words
    """

    name: str
    flops_per_s: Mapping[str, float]
    memory_Bps: float
    memory_bytes: float
    launch_s: float
    collective_s: float
    attention_keys: int
    inside_node: Link
    between_nodes: Link
    ranks_per_node: int
    efficiency: Efficiency = Efficiency()
    source: str = ""

    def rate(self, dtype: torch.dtype, attention: bool = False) -> float:
        """Floating-point operations a second of matrix products, or of attention; of a dtype that the table does not have, float32's."""
        part = self.efficiency.attention if attention else self.efficiency.flops
        return part * self.flops_per_s.get(str(dtype).removeprefix("torch."), self.flops_per_s["float32"])

    @property
    def bytes_per_s(self) -> float:
        """Bytes that kernels read and write a second."""
        return self.efficiency.memory * self.memory_Bps

    @property
    def links(self) -> tuple[Link, Link]:
        """(inside a node, between nodes), with the bandwidth that can be had."""
        inside, between = (
            replace(link, bandwidth_Bps=self.efficiency.links * link.bandwidth_Bps) for link in (self.inside_node, self.between_nodes)
        )
        return inside, between


def device(name: str) -> Device:
    """A device of the table. Raises PlanError, with those that there are."""
    return _pick(name, _table())


def for_mesh(mesh: Mesh) -> Device:
    """The device that a rank of the mesh has, as far as it is known here.

    cpu: what `meshc calibrate` measured, or the table's `cpu`. cuda: this machine's GPU, measured or else from the table; a machine without
    one (programs are compiled ahead of time) takes `h100`.
    """
    known = {**_table(), **calibrated()}
    if mesh.device_type != "cuda":
        return known["cpu"]
    if not torch.cuda.is_available():
        return known["h100"]
    hardware = torch.cuda.get_device_name()
    name = name_of(hardware)
    return known[name] if name in known else replace(known["h100"], source=f"nothing is known of {hardware}: {known['h100'].source}")


def name_of(hardware: str) -> str:
    """What this file calls a GPU: `a100` for `NVIDIA A100-SXM4-80GB`; words joined by hyphens if the table does not have it."""
    words = re.findall(r"[a-z0-9]+", hardware.lower())
    return next((word for word in words if word in _table()), "-".join(words))


def calibrated() -> dict[str, Device]:
    """The devices that `meshc calibrate` measured for this user. Raises PlanError if its file cannot be read."""
    path = environment.device_file()
    return read(path) if path.exists() else {}


def read(path: Path) -> dict[str, Device]:
    """The devices of a file. Raises PlanError, with the section and key at fault."""
    try:
        sections: dict[str, Any] = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{path}: {error}; {ANEW}") from error
    return {name: _device(name, section, path) for name, section in sections.items()}


def write(devices: Iterable[Device], path: Path) -> None:
    """Write devices in the form that `read` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(_section, devices)))


def _section(one: Device) -> str:
    lines = [f"[{one.name}]"]
    tables = []
    for field in fields(one):
        value = getattr(one, field.name)
        if isinstance(value, Link | Efficiency):
            value = {inner.name: getattr(value, inner.name) for inner in fields(value)}
        if isinstance(value, Mapping):
            tables += ["", f"[{one.name}.{field.name}]", *(f"{key} = {_number(number)}" for key, number in value.items())]
        elif field.name != "name":
            lines.append(f"{field.name} = {_quoted(value) if isinstance(value, str) else _number(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _number(value: float) -> str:
    return f"{value:.6g}"


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _device(name: str, section: Mapping[str, Any], path: Path) -> Device:
    try:
        given = dict(section)
        for key, kind in (("inside_node", Link), ("between_nodes", Link), ("efficiency", Efficiency)):
            if key in given:
                given[key] = kind(**given[key])
        one = Device(name=name, **given)
    except TypeError as error:
        raise PlanError(f"{path}, section [{name}]: {error}; {ANEW}") from error
    missing = [dtype for dtype in DTYPES if dtype not in one.flops_per_s]
    if missing:
        raise PlanError(f"{path}, section [{name}.flops_per_s]: {', '.join(missing)} missing; {ANEW}")
    return one


def _pick(name: str, known: Mapping[str, Device]) -> Device:
    if name not in known:
        raise PlanError(f"nothing is known of a device {name!r}; there are {', '.join(known)}")
    return known[name]


@lru_cache
def _table() -> Mapping[str, Device]:
    return read(TABLE)
