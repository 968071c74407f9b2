"""Where a run's files live: whole objects under keys, written at once or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from worldline.process import Liveness, ProcessId

Keys = list[str]  # inside a class with a method `list` the builtin's name is taken


class StorageError(OSError):
    """A storage did not do what it was asked to; the message says what, where and why."""


class NotFound(StorageError):
    """There is nothing under the key."""


class Storage(Protocol):
    """A folder of objects under keys like "checkpoints/step-00000050/manifest.json".

    A reader sees an object's old content or its new one, whole, and no key before its content is durable: a
    call that returned survives a crash of the machine. A call that fails raises `StorageError` (the disk full
    as well), leaves the old content and no temporary file. What writers killed in the middle leave behind is
    in no listing and goes with `clear_stale`. Any number of processes and threads may use one storage at
    once.
    """

    @property
    def url(self) -> str: ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace."""

    def put_file(self, key: str, write: Callable[[Path], None]) -> None:
        """Write or replace with what `write` puts into the file at the path it is given, for large
        objects."""

    def create(self, key: str, data: bytes | memoryview) -> bool:
        """Write if there is nothing under `key`; of several that try at once exactly one gets True."""

    def get(self, key: str) -> bytes:
        """Raises NotFound."""

    def open_path(self, key: str) -> AbstractContextManager[Path]:
        """A local file with the object's content, to be read inside the `with` only. Raises NotFound."""

    def size(self, key: str) -> int:
        """Bytes of the object. Raises NotFound."""

    def list(self, prefix: str = "") -> Keys:
        """All keys that start with `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Remove the object and every object below `key + "/"`; no error if there is none."""

    def clear_stale(self) -> None:
        """Remove the temporary files of writers that are gone."""

    def child(self, name: str) -> Storage:
        """The storage whose keys are those of this one that start with `name + "/"`."""

    def local_path(self, key: str) -> Path | None:
        """A path for an append-only file, its folder made; None where there are no local files."""


def open_storage(url: str) -> Storage:
    """The storage at a folder's path or file:// URL; the folder is made when something is written."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalStorage(Path(url).absolute())
    if scheme == "file" and rest.startswith("/"):
        return LocalStorage(Path(unquote(rest)))
    raise StorageError(f"cannot use {url} as storage: only local folders are supported in this version")


class LocalStorage:
    """Files below a folder, which may be on a file system that several machines share.

    A file is written under a temporary name beside its place, made durable, then renamed (`put`) or linked
    (`create`) into place, and the folder's entry made durable. The temporary name tells which process writes
    it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.put_file(key, lambda path: _write(path, data))

    def put_file(self, key: str, write: Callable[[Path], None]) -> None:
        with self._naming("write", key):
            path = self._path(key)
            with _temporary(path) as temporary:
                write(temporary)
                _sync(temporary)
                temporary.rename(path)
            _sync(path.parent)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        with self._naming("create", key):
            path = self._path(key)
            with _temporary(path) as temporary:
                _write(temporary, data)
                _sync(temporary)
                try:
                    path.hardlink_to(temporary)
                except FileExistsError:
                    # NFS may repeat a request that succeeded: then the file there is this one.
                    if temporary.stat().st_nlink != 2:
                        return False
            _sync(path.parent)
            return True

    def get(self, key: str) -> bytes:
        with self._naming("read", key):
            return self._path(key).read_bytes()

    @contextmanager
    def open_path(self, key: str) -> Iterator[Path]:
        self.size(key)
        yield self._path(key)

    def size(self, key: str) -> int:
        with self._naming("read", key):
            return self._path(key).stat().st_size

    def list(self, prefix: str = "") -> Keys:
        with self._naming("list", prefix):
            # Only the folder that the prefix names need be walked.
            folder = self._root / prefix.rpartition("/")[0]
            keys = [path.relative_to(self._root).as_posix() for path in _files(folder)]
        return sorted(key for key in keys if key.startswith(prefix) and not _is_temporary(key))

    def delete(self, key: str) -> None:
        with self._naming("delete", key):
            path = self._path(key)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            if path.parent.exists():
                _sync(path.parent)

    def clear_stale(self) -> None:
        with self._naming("clear", ""):
            for path in _files(self._root):
                if _is_temporary(path.name) and _writer_is_gone(path.name):
                    path.unlink(missing_ok=True)

    def child(self, name: str) -> LocalStorage:
        return LocalStorage(self._path(name))

    def local_path(self, key: str) -> Path:
        with self._naming("open", key):
            path = self._path(key)
            _make_folder(path.parent)
            return path

    def _path(self, key: str) -> Path:
        if not key or any(part in ("", ".", "..") for part in key.split("/")):
            raise StorageError(f"{key!r} is not a key: it must name something below {self.url}")
        return self._root / key

    @contextmanager
    def _naming(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            missing = action == "read" and isinstance(error, FileNotFoundError)
            kind = NotFound if missing else StorageError
            wrapped = kind(f"cannot {action} {key or 'files'} in {self.url}: {error.strerror or error}")
            wrapped.errno = error.errno
            raise wrapped from error


_TEMPORARY = ".writing-"


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A new name beside `path`, in a folder that exists; what is left under that name is removed."""
    _make_folder(path.parent)
    process = ProcessId.current()
    owner = f"{_digest(process.machine)}-{process.pid}-{process.start}"
    temporary = path.parent / f"{_TEMPORARY}{owner}-{secrets.token_hex(4)}"
    try:
        yield temporary
    finally:
        # The failure that is on its way up is the one to report, not this one.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(_TEMPORARY)


def _writer_is_gone(name: str) -> bool:
    here = ProcessId.current()
    try:
        machine, pid, start, _ = name.removeprefix(_TEMPORARY).split("-")
        writer = ProcessId(here.host, here.machine, int(pid), int(start))
    except ValueError:
        return False
    return machine == _digest(here.machine) and writer.liveness(here) is Liveness.GONE


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _write(path: Path, data: bytes | memoryview) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Like mkdir -p, each new folder durable in the one above."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _files(folder: Path) -> Iterator[Path]:
    """All files below `folder`; those that vanish meanwhile are left out."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        else:
            yield Path(entry.path)
