"""The kernel cache: what others can have written is not loaded, what has changed is built again, and one process builds at a time."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshc.files import kernel_cache

EVIL = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }
int answer(void) { return 13; }
"""


class Builder:
    """Builds a library that answers 42, and counts how often."""

    def __init__(self, folder: Path) -> None:
        self.source, self.times, self.slow_s = folder / "answer.c", 0, 0.0
        self.source.write_text("int answer(void) { return 42; }")

    def __call__(self, file: Path) -> None:
        self.times += 1
        time.sleep(self.slow_s)
        compiled(self.source, file)

    def answer(self, name: str) -> int:
        found: int = kernel_cache.library(name, self).answer()
        return found


def compiled(source: Path, file: Path) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(file), str(source)], check=True)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache in a folder that only this user can change, wherever the tests' own folders lie."""
    place = Path(tempfile.mkdtemp())
    monkeypatch.setenv("MESHC_CACHE", str(place / "home" / "cache"))
    yield place / "home" / "cache"
    shutil.rmtree(place)


@pytest.fixture
def build(tmp_path: Path) -> Builder:
    return Builder(tmp_path)


def plant(cache: Path, name: str, mark: Path, source: Path) -> None:
    """What an attacker puts there: a library that runs when it is loaded, with the hash that it should have."""
    cache.mkdir(parents=True, exist_ok=True)
    source.write_text(EVIL % mark)
    compiled(source, cache / name)
    data = (cache / name).read_bytes()
    (cache / name).write_bytes(data + hashlib.sha256(data).digest())


def test_a_library_is_built_once(cache: Path, build: Builder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [build.answer("once.so"), build.answer("once.so")] == [42, 42] and build.times == 1
    assert sorted(os.listdir(cache)) == [".once.so.lock", "once.so"] and cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("opened", ["cache", "home"])
def test_a_folder_that_others_can_write_is_not_used(cache: Path, build: Builder, tmp_path: Path, opened: str) -> None:
    plant(cache, f"{opened}.so", tmp_path / "mark", tmp_path / "evil.c")
    where = cache if opened == "cache" else cache.parent
    where.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=f"(?s)is not used: {where} can be written by others .mode 0777.: chmod go-w.*what to do: give"):
        assert build.answer(f"{opened}.so") == 42
    assert not (tmp_path / "mark").exists() and build.times == 1


def test_a_file_that_others_can_write_is_built_again(cache: Path, build: Builder, tmp_path: Path) -> None:
    plant(cache, "file.so", tmp_path / "mark", tmp_path / "evil.c")
    (cache / "file.so").chmod(0o666)
    with pytest.warns(RuntimeWarning, match="file.so is not loaded but compiled again: it can be written by others"):
        assert build.answer("file.so") == 42
    assert not (tmp_path / "mark").exists() and (cache / "file.so").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_built_again(cache: Path, build: Builder, tmp_path: Path) -> None:
    plant(cache, "theirs.so", tmp_path / "mark", tmp_path / "evil.c")
    os.chown(cache / "theirs.so", 1234, 1234)
    with pytest.warns(RuntimeWarning, match="it belongs to another user .uid 1234."):
        assert build.answer("theirs.so") == 42
    assert not (tmp_path / "mark").exists()


def test_a_link_is_built_again(cache: Path, build: Builder, tmp_path: Path) -> None:
    plant(tmp_path / "elsewhere", "link.so", tmp_path / "mark", tmp_path / "evil.c")
    cache.mkdir(parents=True)
    (cache / "link.so").symlink_to(tmp_path / "elsewhere" / "link.so")
    with pytest.warns(RuntimeWarning, match="link.so is not loaded but compiled again: "):
        assert build.answer("link.so") == 42
    assert not (tmp_path / "mark").exists() and not (cache / "link.so").is_symlink()


@pytest.mark.parametrize("at", [0, 5000, -40, -1])
def test_a_bit_that_has_changed_is_built_again(cache: Path, build: Builder, at: int) -> None:
    name = f"bit{at}.so"
    cache.mkdir(parents=True)
    compiled(build.source, cache / name)
    data = bytearray((cache / name).read_bytes())
    data += hashlib.sha256(data).digest()
    data[at] ^= 4
    (cache / name).write_bytes(data)
    (cache / name).chmod(0o700)
    with pytest.warns(RuntimeWarning, match="is not loaded but compiled again: it is not what was built"):
        assert build.answer(name) == 42
    assert build.times == 1


def test_of_several_one_builds_and_what_a_killed_one_left_goes(cache: Path, build: Builder) -> None:
    (cache / ".build-many.so-killed").mkdir(parents=True)
    cache.chmod(0o700)
    build.slow_s, answers = 0.3, []
    threads = [threading.Thread(target=lambda: answers.append(build.answer("many.so"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [42] * 4 and build.times == 1
    assert sorted(os.listdir(cache)) == [".many.so.lock", "many.so"]
