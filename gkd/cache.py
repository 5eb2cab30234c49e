"""Cubins on disk, so that a kernel is compiled once and not at every start.

    <directory>/<key>/kernel.cu, the headers it includes, kernel.cubin, build.json

The key is a hash of everything that decides the cubin. An entry is written aside and renamed whole, so that a reader
never sees half of one, and its digest is checked when it is read. A cache that is damaged, full or not writable costs
time, never a run.
"""

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec

from gkd.compiler import BuildInfo, Cubin
from gkd.sources import KernelSource

logger = logging.getLogger(__name__)

# Counts up when the layout of an entry or of build.json changes.
_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class _Entry:
    """build.json."""

    key: str
    digest: str
    """Of kernel.cubin and `build`, so that an entry is either whole or none."""
    build: BuildInfo


class CubinCache:
    """The cubins of earlier runs. Several threads and several processes may use one directory."""

    def __init__(self, directory: Path | None, *, complete: bool = False) -> None:
        """Opens the cache in a directory, which is made when something is stored; None holds nothing.

        `complete` says that it holds whatever is asked for, so that a kernel that it lacks is an error.
        """
        self.complete = complete
        self._directory = directory
        self._lock = threading.Lock()
        self._unwritable = False

    def load(self, key: str) -> Cubin | None:
        """The cubin stored under a key; None if there is none, or if the entry is damaged, which is logged."""
        if self._directory is None:
            return None
        path = self._directory / key
        try:
            entry = msgspec.json.decode((path / "build.json").read_bytes(), type=_Entry)
            code = (path / "kernel.cubin").read_bytes()
            if entry.key == key and entry.digest == _digest(code, entry.build):
                return Cubin(code, entry.build)
            reason = "its contents do not match its digest"
        except (OSError, msgspec.DecodeError) as error:
            if not os.path.lexists(path):
                return None
            reason = str(error)
        logger.warning("compiled kernel %s is damaged and will be compiled again: %s", path, reason)
        self._discard(path)
        return None

    def store(self, key: str, source: KernelSource, cubin: Cubin) -> None:
        """Keeps a cubin. What prevents it is logged, once, and nothing more."""
        if self._directory is None:
            return
        aside = self._aside()
        try:
            aside.mkdir(parents=True)
            source.write(aside)
            (aside / "kernel.cubin").write_bytes(cubin.code)
            entry = _Entry(key, _digest(cubin.code, cubin.info), cubin.info)
            (aside / "build.json").write_bytes(msgspec.json.format(msgspec.json.encode(entry), indent=2))
            aside.rename(self._directory / key)
        except OSError as error:
            # Another process may have stored the same kernel meanwhile: its entry is as good.
            if not os.path.isfile(self._directory / key / "build.json"):
                self._warn_unwritable(error)
            shutil.rmtree(aside, ignore_errors=True)

    def _discard(self, path: Path) -> None:
        """Makes room for a new entry: a rename replaces no directory that holds something."""
        aside = self._aside()
        try:
            path.rename(aside)
            if aside.is_dir() and not aside.is_symlink():
                shutil.rmtree(aside)
            else:
                aside.unlink()
        except OSError as error:
            self._warn_unwritable(error)

    def _aside(self) -> Path:
        assert self._directory is not None
        return self._directory / f".{uuid4().hex}"

    def _warn_unwritable(self, error: OSError) -> None:
        with self._lock:
            first, self._unwritable = not self._unwritable, True
        if first:
            logger.warning(
                "compiled kernels cannot be kept, and are compiled at every start: %s; set GKD_CACHE_DIR to a "
                "directory that can be written to, or to `off`",
                error,
            )


def cache_usage(directory: Path) -> tuple[int, int]:
    """Kernels in a cache, and the bytes of its files; (0, 0) where it has not been made. Raises OSError."""
    num_kernels = num_bytes = 0
    for parent, _, files in os.walk(directory, onerror=_raise_unless_gone):
        # What is being written, or thrown away, lies in a hidden directory.
        num_kernels += "kernel.cubin" in files and not os.path.basename(parent).startswith(".")
        for file in files:
            try:
                num_bytes += os.lstat(os.path.join(parent, file)).st_size
            except FileNotFoundError:  # another process is at work
                continue
    return num_kernels, num_bytes


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def cache_key(source: KernelSource, options: Sequence[str], nvrtc: str) -> str:
    """A hash of all that decides a cubin. The options name the architecture; no path is in it."""
    parts = (_SCHEMA, source.name, source.text, source.headers, tuple(options), nvrtc)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _digest(code: bytes, build: BuildInfo) -> str:
    return hashlib.sha256(msgspec.json.encode(build) + b"\0" + code).hexdigest()
