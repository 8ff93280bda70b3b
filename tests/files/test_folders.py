"""Files and folders that are complete or not there, whatever interrupts who writes them: a signal, a full disk, another save."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from meshc.cost import devices
from meshc.errors import FileError
from meshc.files import folders
from meshc.files.folders import kept_aside, move_into_place, replacing, write_text, writing
from meshc.files.tensor_file import write
from meshc.passes import dump
from meshc.pipelining import draw
from meshc.pipelining.timing import Timeline


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may be longer than 16 bytes, which is an error of the same family, on any machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save(target: Path, text: str = "new") -> None:
    with writing(target), replacing(target) as made:
        (made / "file").write_text(text)
        move_into_place(made, target)


def interrupted(target: Path) -> int:
    """A process that is in the middle of a save."""
    ready, done = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            with replacing(target) as made:
                (made / "file").write_text("half")
                os.write(done, b".")
                time.sleep(60)
        finally:
            os._exit(1)
    os.read(ready, 1)
    os.close(ready), os.close(done)
    return process


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_what_killed_saves_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    target = tmp_path / "p.x"
    save(target, "old")
    end(interrupted(target)), end(interrupted(target))
    (tmp_path / ".p.x.new").mkdir()  # as older versions named it
    (tmp_path / ".p.x.newer").mkdir(), (tmp_path / ".q.x.new-01234567").mkdir()
    process = interrupted(target)
    try:
        left = {path.name for path in tmp_path.iterdir()} - {"p.x", ".p.x.newer", ".q.x.new-01234567"}
        assert len(left) == 1, "the one that lives; its own start has removed the others"
        save(target)
        assert {path.name for path in tmp_path.iterdir()} == left | {"p.x", ".p.x.newer", ".q.x.new-01234567"}
    finally:
        end(process)
    assert (target / "file").read_text() == "new"
    save(target, "newest")
    assert {path.name for path in tmp_path.iterdir()} == {"p.x", ".p.x.newer", ".q.x.new-01234567"}


def test_without_locks_what_is_a_day_old_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(folders.fcntl, "flock", none)
    (tmp_path / ".p.new-00000000").mkdir(), (tmp_path / ".p.new-11111111").mkdir()
    os.utime(tmp_path / ".p.new-00000000", (time.time() - 90000,) * 2)
    save(tmp_path / "p")
    assert sorted(os.listdir(tmp_path)) == [".p.new-11111111", "p"]


def test_something_stands_at_the_path_at_every_moment(tmp_path: Path) -> None:
    target = tmp_path / "p"
    save(target)
    missing, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            if not target.is_dir():
                missing.append(1)

    watcher = threading.Thread(target=look)
    watcher.start()
    for turn in range(60):
        save(target, str(turn))
    stop.set()
    watcher.join()
    assert not missing and (target / "file").read_text() == "59" and os.listdir(tmp_path) == ["p"]


def test_where_names_cannot_be_exchanged_what_was_there_is_kept_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "p"
    save(target, "old")
    monkeypatch.setattr(folders, "_exchange_names", lambda *_: False)
    rename = Path.rename

    def ended(self: Path, to: Path) -> Path:
        if ".new-" in self.name:
            raise KeyboardInterrupt
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", ended)
        with pytest.raises(KeyboardInterrupt):
            save(target)
    assert (target / "file").read_text() == "old" and os.listdir(tmp_path) == ["p"]
    target.rename(tmp_path / ".p.old")  # a process that was killed there
    assert f"lies in {tmp_path / '.p.old'}: rename it to go on with it" in kept_aside(target)
    save(target)
    assert (target / "file").read_text() == "new" and os.listdir(tmp_path) == ["p"] and not kept_aside(target)


def timeline(path: Path) -> None:
    draw.write(Timeline((), 1, "empty", ()), path / "line.svg")


def tables(path: Path) -> None:
    devices.write_devices(devices.read_devices(devices.TABLE).values(), path / "devices.toml")


def texts(path: Path) -> None:
    write_text(path / "text", "more than sixteen bytes")


def folder(path: Path) -> None:
    with writing(path / "p"), replacing(path / "p") as made:
        write(made / "w.safetensors", {"w": torch.ones(9)})
        move_into_place(made, path / "p")


def dumped(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dump, "phase_text", lambda *_: "more than sixteen bytes")
        dump.dumper(path / "dump")("capture", None)


@pytest.mark.parametrize("work", [timeline, tables, texts, folder, dumped])
def test_a_full_disk_is_one_clear_error_and_nothing_partial_stays(work: Callable[[Path], None], tmp_path: Path) -> None:
    with full_disk(), pytest.raises(FileError) as caught:
        work(tmp_path)
    text = str(caught.value)
    assert str(tmp_path) in text and "cannot be written: File too large" in text and "MB are free there" in text
    assert "what to do: make room there, or choose a path on another disk" in text
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith(".")]


def test_a_path_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileError, match="(?s)file/inside cannot be written: (Not a directory|File exists).*what to do: choose a path"):
        write_text(tmp_path / "file" / "inside", "text")
    with pytest.raises(OSError, match="cannot be written"):  # who catches errors of files catches it
        save(tmp_path / "file" / "p")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_keeps_its_mode_and_a_pipe_is_written_to_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("old")
    (tmp_path / "text").chmod(0o600)
    (tmp_path / "link").symlink_to("text")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "text").read_text() == "new" and (tmp_path / "text").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "link").is_symlink() and len(os.listdir(tmp_path)) == 2
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 20) == b"through"
    os.close(reader)
