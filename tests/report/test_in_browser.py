"""The report in a real browser, where one is installed: it draws something, in light and dark, and its box filters."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import warnings
import zlib
from collections import Counter
from pathlib import Path

import pytest

from meshc.report.html import html
from meshc.report.page import page
from tests.passes.depth.stacks import Stack, compiled

pytestmark = pytest.mark.broad

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def opened(folder: Path, *words: str, query: str = "") -> str:
    """What the browser prints."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}", *words,
        f"{(folder / 'report.html').as_uri()}{query}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


def pixels(picture: bytes) -> tuple[int, list[bytes]]:
    """Width and pixels of a PNG of 8 bits a channel, row by row (RFC 2083)."""
    chunks, at = [], 8
    while at < len(picture):
        (size,) = struct.unpack(">I", picture[at : at + 4])
        chunks.append((picture[at + 4 : at + 8], picture[at + 8 : at + 8 + size]))
        at += 12 + size
    width, height, depth, kind = struct.unpack(">IIBB", chunks[0][1][:10])
    assert depth == 8 and kind in (2, 6)
    channels = 3 if kind == 2 else 4
    data = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))
    before, stride, found = bytearray(width * channels), width * channels, []
    for row in range(height):
        line = bytearray(data[row * (stride + 1) + 1 : (row + 1) * (stride + 1)])
        _unfiltered(data[row * (stride + 1)], line, before, channels)
        found += [bytes(line[x : x + 3]) for x in range(0, stride, channels)]
        before = line
    return width, found


def _unfiltered(kind: int, line: bytearray, before: bytearray, channels: int) -> None:
    for x in range(len(line)):
        left = line[x - channels] if x >= channels else 0
        corner = before[x - channels] if x >= channels else 0
        up = before[x]
        if kind == 4:
            guess = left + up - corner
            near = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
        else:
            near = (0, left, up, (left + up) // 2)[kind]
        line[x] = (line[x] + near) & 255


def test_a_browser_shows_the_page_and_its_box_filters(tmp_path: Path) -> None:
    if BROWSER is None:
        warnings.warn("no chromium is installed: nobody has looked at the report in a browser", stacklevel=1)
        return
    made = html(page(compiled(Stack([16] * 3), mesh="dp=2,tp=2", plan="dp: batch; store params\ntp: ffn").compiled, "Stack"))
    (tmp_path / "report.html").write_text(made)
    shown = {}
    for scheme, source in (("light", made), ("dark", made.replace("prefers-color-scheme: dark", "min-width: 1px"))):
        (tmp_path / "report.html").write_text(source)
        opened(tmp_path, "--window-size=1000,1400", f"--screenshot={tmp_path / scheme}.png")
        width, found = pixels((tmp_path / f"{scheme}.png").read_bytes())
        count = Counter(found)
        shown[scheme] = count.most_common(1)[0][0]
        assert width == 1000 and len(count) > 50 and count.most_common(1)[0][1] < 0.97 * len(found), "text, chips and pictures"
        blue = {"light": bytes((0x6A, 0xA5, 0xE3)), "dark": bytes((0x3F, 0x78, 0xB5))}[scheme]
        assert count[blue] > 4000, "bars and the chart of memory"
    assert shown == {"light": b"\xff\xff\xff", "dark": bytes((0x15, 0x18, 0x1D))}
    (tmp_path / "report.html").write_text(made)
    rows = {query: re.findall(r"<tr [^>]*data-find=\"([^\"]*)\"([^>]*)>", opened(tmp_path, "--dump-dom", query=query))
            for query in ("", "?find=layers.1.up.weight")}  # fmt: skip
    assert not any("hidden" in more for _, more in rows[""])
    left = [find for find, more in rows["?find=layers.1.up.weight"] if "hidden" not in more]
    assert left == ["", "layers", "layers.*", "layers.*.up", "layers.*.up.weight dp tp"], "the parameter, and the modules that it lies in"
