"""Figures of devices and links, as data: the table in `devices.toml`, and what `meshc calibrate` has measured.

    [h100]                                  `meshc calibrate` writes a file of the same form for this user, which takes precedence
    memory_Bps = 3.35e12
    ...
    [h100.flops_per_s]
    bfloat16 = 989e12
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from meshc import environment
from meshc.errors import ArtifactError, PlanError
from meshc.files.folders import write_text
from meshc.ir.bounds import brief_repr, number, read_text
from meshc.ir.mesh import Mesh
from meshc.ir.storage_moves import TIERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE: Final = Path(__file__).with_name("devices.toml")
ANEW: Final = "put it right (docs/cost-model.md), or delete the file, and `meshc calibrate` writes it anew"
DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
EIGHT_BITS: Final = "float8_e4m3fn"
"""Flops of products of two operands of 8 bits, which not every device has."""
NUMBERS: Final = ("memory_Bps", "memory_bytes", "launch_s", "collective_s", "attention_keys", "ranks_per_node")
COSTS: Final = ("launch_s", "collective_s", "latency_s", "contention", "uneven", "product_moves")
"""Figures that may be 0."""
TIMES: Final = ("contention", "uneven", "product_moves")
"""Those of COSTS that a section may omit; their default is 0."""
MOST_TIMES: Final = 100.0
"""Largest value of the figures in TIMES."""
LEAST, MOST = 1e-12, 1e24
"""Bounds of figures in the files; no device comes near either."""
MOST_CHARACTERS: Final = 1 << 20
"""Largest length of a file of devices."""
STORAGE_LINKS: Final = tuple(dict.fromkeys(name for tier in TIERS.values() for name in tier.links))
"""Fields of a `Device`: its links to where tiers are stored."""


@dataclass(frozen=True)
class Link:
    """Cost of a message: `latency_s`, plus its bytes over `bandwidth_Bps`, the bandwidth of one rank in one direction."""

    latency_s: float
    bandwidth_Bps: float


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the peaks that programs achieve. `attention`: fraction of `flops_per_s` that attention kernels achieve."""

    flops: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    links: float = 1.0


@dataclass(frozen=True)
class Processor:
    """A rank's share of its host's processors, for operators that run on the host: memory bandwidth, flops per second in any dtype,
    overhead of an operator."""

    memory_Bps: float
    flops_per_s: float
    launch_s: float


@dataclass(frozen=True)
class Device:
    """One rank's device. Fields are peaks; `rate`, `bytes_per_s` and `links` return what programs achieve.

    flops_per_s     by dtype (DTYPES, and EIGHT_BITS where it has them); float32 is IEEE float32, not TF32
    launch_s        overhead of each operator, whatever its size
    collective_s    overhead of each collective, beside its messages' latency
    attention_keys  keys per block of attention kernels: the granularity at which a mask saves work
    ranks_per_node  ranks r and s share a node if r // ranks_per_node == s // ranks_per_node
    contention      seconds that computing loses per second of an overlapping collective's own time: 0 if communication needs none of the
                    resources of computing, 1 and more if the two share cores
    uneven          seconds between ranks after one second of equal computing since they last waited for each other; grows with the square
                    root of that time
    product_moves   how often a product moves its operands and results while it does not multiply; 0 if kernels overlap the two
    source          origin of the figures, as text
    host            a rank's link to its host's memory, each way; None if the device is the host, whose copies take computing time
    processor       a rank's share of its host's processors; None: as the table's `cpu`
    disk            a rank's share of its host's disk, each way; None: as the table's `cpu`
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
    contention: float = 0.0
    uneven: float = 0.0
    product_moves: float = 0.0
    source: str = ""
    host: Link | None = None
    processor: Processor | None = None
    disk: Link | None = None

    def rate(self, dtype: torch.dtype, attention: bool = False) -> float:
        """Achieved flops per second of matrix products, or of attention; for a dtype that the table lacks, those of float32."""
        part = self.efficiency.attention if attention else self.efficiency.flops
        key = EIGHT_BITS if dtype.is_floating_point and dtype.itemsize == 1 else str(dtype).removeprefix("torch.")
        return part * self.flops_per_s.get(key, self.flops_per_s["float32"])

    @property
    def bytes_per_s(self) -> float:
        """Achieved bytes per second that kernels read and write."""
        return self.efficiency.memory * self.memory_Bps

    @property
    def links(self) -> tuple[Link, Link]:
        """(link inside a node, link between nodes), with the achieved bandwidth."""
        inside, between = (
            replace(link, bandwidth_Bps=self.efficiency.links * link.bandwidth_Bps) for link in (self.inside_node, self.between_nodes)
        )
        return inside, between

    @property
    def there(self) -> Device:
        """The host's processors as a device; the device itself if that is the host."""
        return self if self.host is None else _of_host(self.processor)

    @property
    def host_link(self) -> Link | None:
        """The link to the host and back, with the achieved bandwidth."""
        return self.host and replace(self.host, bandwidth_Bps=self.efficiency.links * self.host.bandwidth_Bps)

    def link_to(self, name: str) -> Link | None:
        """One of STORAGE_LINKS: `host_link`; of another without figures of its own, that of the table's `cpu`."""
        return self.host_link if name == "host" else getattr(self, name) or getattr(_table()["cpu"], name)


@lru_cache
def _of_host(processor: Processor | None) -> Device:
    cpu = _table()["cpu"]
    if processor is None:
        return cpu
    rates = dict.fromkeys(DTYPES, processor.flops_per_s)
    return replace(cpu, flops_per_s=rates, memory_Bps=processor.memory_Bps, launch_s=processor.launch_s, product_moves=0.0)


def names() -> tuple[str, ...]:
    """Names of the devices of the table."""
    return tuple(_table())


def device(name: str) -> Device:
    """A device of the table. Raises PlanError, which lists the known names."""
    return _pick(name, _table())


def find_device(name: str) -> Device:
    """A device by its name: as `meshc calibrate` measured it for this user, else from the table. Raises PlanError, which lists the known
    names."""
    return _pick(name, {**_table(), **calibrated_devices()})


@dataclass(frozen=True)
class RankDevices:
    """The device of each rank of a mesh. `given`: all ranks' one, or by rank."""

    mesh: Mesh
    given: Device | Mapping[int, Device]

    def of(self, rank: int) -> Device:
        """One rank's."""
        return self.given if isinstance(self.given, Device) else self.given[rank]

    def kinds(self, *at: Mapping[str, int]) -> list[Device]:
        """Those that differ, of the ranks at any of these coordinates; without any, of all ranks."""
        if isinstance(self.given, Device):
            return [self.given]
        where = {rank: self.mesh.coordinates(rank).items() for rank in self.mesh.ranks}
        found: list[Device] = []
        for one in (self.of(rank) for rank in where if not at or any(each.items() <= where[rank] for each in at)):
            found += [one] if one not in found else []
        return found

    def slowest(self, *at: Mapping[str, int]) -> Device:
        """What prices a program that the ranks at these coordinates run together, or a message between them: they wait for each other, so
        that of every figure the slowest counts. Of ranks that are alike, their device."""
        first, *others = kinds = self.kinds(*at)
        return _slowest(kinds) if others else first

    def least_memory(self, *at: Mapping[str, int]) -> float:
        """Bytes that each of the ranks at these coordinates has."""
        return min(one.memory_bytes for one in self.kinds(*at))


def _slowest(kinds: Sequence[Device]) -> Device:
    rates = {dtype: min(one.rate(getattr(torch, dtype)) for one in kinds) for dtype in (*DTYPES, EIGHT_BITS)}
    attention = min(one.rate(torch.float32, attention=True) for one in kinds) / rates["float32"]
    inside, between = zip(*(one.links for one in kinds), strict=True)
    links = {"inside_node": inside, "between_nodes": between, **{name: [one.link_to(name) for one in kinds] for name in STORAGE_LINKS}}
    return replace(
        min(kinds, key=lambda one: one.there.bytes_per_s),  # whose processor counts
        name=" and ".join(dict.fromkeys(one.name for one in kinds)), source="; ".join(dict.fromkeys(one.source for one in kinds)),
        flops_per_s=rates, memory_Bps=min(one.bytes_per_s for one in kinds), efficiency=Efficiency(attention=attention),
        **{name: _slowest_link(those) for name, those in links.items()},
        **{key: min(getattr(one, key) for one in kinds) for key in ("memory_bytes", "ranks_per_node")},
        **{key: max(getattr(one, key) for one in kinds) for key in ("launch_s", "collective_s", "attention_keys", *TIMES)},
    )  # fmt: skip


def _slowest_link(links: Sequence[Link | None]) -> Any:
    """None if one of them is missing."""
    known = [link for link in links if link is not None]
    return Link(max(link.latency_s for link in known), min(link.bandwidth_Bps for link in known)) if len(known) == len(links) else None


def devices_of(mesh: Mesh, given: Given | None = None) -> RankDevices:
    """The device of each rank of the mesh, as far as it is known here: what is `given`, else what is assumed (`assume_device`), else this
    machine's for all ranks. Raises PlanError for a name that is not known.

    cpu: measured by `meshc calibrate`, or the table's `cpu`. cuda: this machine's GPU, measured or else from the table; `h100` on a machine
    without one, where programs are compiled ahead of time.
    """
    if given is None:
        given = _ASSUMED.get()
    if given is not None:
        return RankDevices(mesh, find_device(given) if isinstance(given, str) else given)
    known = {**_table(), **calibrated_devices()}
    if mesh.device_type != "cuda":
        return RankDevices(mesh, known["cpu"])
    if not torch.cuda.is_available():
        return RankDevices(mesh, known["h100"])
    hardware = torch.cuda.get_device_name()
    unknown = f"nothing is known of {hardware}: {known['h100'].source}"
    return RankDevices(mesh, known.get(name_of(hardware)) or replace(known["h100"], source=unknown))


Given: TypeAlias = str | Device | Mapping[int, Device]
"""All ranks' device, by its name or itself, or the device of each rank."""
_ASSUMED: ContextVar[Device | Mapping[int, Device] | None] = ContextVar("assumed", default=None)


@contextmanager
def assume_device(device: Device | Mapping[int, Device]) -> Iterator[None]:
    """Within it ranks of every mesh have this device, or each its own: plans are made for machines that are elsewhere."""
    token = _ASSUMED.set(device)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def name_of(hardware: str) -> str:
    """The table's name of a GPU: `a100` for `NVIDIA A100-SXM4-80GB`; words joined by hyphens if the table lacks the GPU."""
    words = re.findall(r"[a-z0-9]+", hardware.lower())
    return next((word for word in words if word in _table()), "-".join(words))


def calibrated_devices() -> dict[str, Device]:
    """The devices that `meshc calibrate` measured for this user. Raises ArtifactError if its file cannot be read."""
    path = environment.device_file()
    return read_devices(path) if path.exists() else {}


def read_devices(path: Path) -> dict[str, Device]:
    """The devices of a file. Raises ArtifactError, with the section and key at fault."""
    text = read_text(path)
    if len(text) > MOST_CHARACTERS:
        raise ArtifactError(f"{path} has {len(text)} characters, a file of devices at most {MOST_CHARACTERS}; {ANEW}")
    try:
        sections: dict[str, object] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: {error}; {ANEW}") from error
    return {name: _device(name, section, path) for name, section in sections.items()}


def write_devices(devices: Iterable[Device], path: Path) -> None:
    """Write devices in the form that `read_devices` reads."""
    write_text(path, "\n".join(map(_section, devices)))


def _section(one: Device) -> str:
    lines = [f"[{one.name}]"]
    tables = []
    for field in fields(one):
        value = getattr(one, field.name)
        if value is None:
            continue
        if isinstance(value, Link | Efficiency | Processor):
            value = {inner.name: getattr(value, inner.name) for inner in fields(value)}
        if isinstance(value, Mapping):
            tables += ["", f"[{one.name}.{field.name}]", *(f"{key} = {_number(number)}" for key, number in value.items())]
        elif field.name != "name":
            lines.append(f"{field.name} = {_quote_text(value) if isinstance(value, str) else _number(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _number(value: float) -> str:
    return f"{value:.6g}"


def _quote_text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _device(name: str, section: object, path: Path) -> Device:
    where = f"{path}, section [{name}"
    if not isinstance(section, Mapping):
        raise ArtifactError(f"{path}: {name} stands in no section; {ANEW}")
    given = dict(section)
    _refuse_keys(given, Device, f"{where}]")
    links = [(key, Link) for key in ("inside_node", "between_nodes", *STORAGE_LINKS)]
    for key, kind in (*links, ("processor", Processor), ("efficiency", Efficiency)):
        if key in given:
            numbers = _numbers(given[key], f"{where}.{key}]")
            _refuse_keys(numbers, kind, f"{where}.{key}]")
            given[key] = kind(**numbers)
    given["flops_per_s"] = _numbers(given["flops_per_s"], f"{where}.flops_per_s]")
    one = Device(name=name, **given)
    missing = [dtype for dtype in DTYPES if dtype not in one.flops_per_s]
    if missing:
        raise ArtifactError(f"{where}.flops_per_s]: {', '.join(missing)} missing; {ANEW}")
    _numbers({key: getattr(one, key) for key in (*NUMBERS, *TIMES)}, f"{where}]")
    for key in TIMES:
        if getattr(one, key) > MOST_TIMES:
            raise ArtifactError(f"{where}]: {key} is {brief_repr(getattr(one, key))}, more than {MOST_TIMES:g}; {ANEW}")
    for key in ("attention_keys", "ranks_per_node"):
        if type(getattr(one, key)) is not int or getattr(one, key) < 1:
            raise ArtifactError(f"{where}]: {key} is {brief_repr(getattr(one, key))}, no integer of 1 or more; {ANEW}")
    if not isinstance(one.source, str):
        raise ArtifactError(f"{where}]: source is text; {ANEW}")
    return one


def _refuse_keys(given: Mapping[str, object], kind: type[Device | Link | Processor | Efficiency], where: str) -> None:
    """Raises if a section lacks a field without a default, or has an unknown key."""
    wanted = {field.name: field.default is MISSING for field in fields(kind) if field.name != "name"}
    missing = [key for key, needed in wanted.items() if needed and key not in given]
    unknown = [key for key in given if key not in wanted]
    if missing or unknown:
        said = ([f"{', '.join(missing)} missing"] if missing else []) + ([f"{', '.join(unknown)} unknown"] if unknown else [])
        raise ArtifactError(f"{where}: {', '.join(said)}; {ANEW}")


def _numbers(given: object, where: str) -> dict[str, float]:
    """The figures of a section, checked: finite, and positive, except that fixed costs may be 0."""
    if not isinstance(given, Mapping):
        raise ArtifactError(f"{where} is {brief_repr(given)}, no section of numbers; {ANEW}")
    try:
        return {key: number(value, key, 0.0 if key in COSTS else LEAST, MOST) for key, value in given.items()}
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {error}; {ANEW}") from None


def _pick(name: str, known: Mapping[str, Device]) -> Device:
    if name not in known:
        raise PlanError(
            f"nothing is known of a device {name!r}; there are {', '.join(known)}\n"
            "  what to do: give it a section in your own file of devices (docs/cost-model.md)"
        )
    return known[name]


@lru_cache
def _table() -> Mapping[str, Device]:
    return read_devices(TABLE)
