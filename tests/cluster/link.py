"""A network of its own for a node, and the one cable to it, which can be pulled: nobody gets a reset."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000


class Link:
    """Addresses 10.213.<number>.1 here and .2 inside; from inside nothing but this machine can be reached."""

    def __init__(self, machine: str) -> None:
        """machine: the address of the cluster's head. Raises OSError where this is not allowed."""
        number = _free_number()
        self.address = f"10.213.{number}.2"
        self._name = f"wl{os.getpid()}n{number}"
        self._cable = f"wl{os.getpid() % 100_000}v{number}"
        inner = f"{self._cable}i"
        _ip(f"netns add {self._name}")
        _ip(f"link add {self._cable} type veth peer name {inner} netns {self._name}")
        _ip(f"addr add 10.213.{number}.1/24 dev {self._cable}")
        _ip(f"link set {self._cable} up")
        _ip(f"-n {self._name} addr add {self.address}/24 dev {inner}")
        _ip(f"-n {self._name} link set lo up")
        _ip(f"-n {self._name} link set {inner} up")
        # No default route: where a name server cannot be reached, it must be known at once.
        _ip(f"-n {self._name} route add {machine}/32 via 10.213.{number}.1")

    def pull(self) -> None:
        _ip(f"link set {self._cable} down")

    def plug(self) -> None:
        _ip(f"link set {self._cable} up")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Processes that this thread starts meanwhile live inside."""
        here, there = (
            os.open("/proc/thread-self/ns/net", os.O_RDONLY),
            os.open(Path("/var/run/netns") / self._name, os.O_RDONLY),
        )
        try:
            _enter(there)
            try:
                yield
            finally:
                _enter(here)
        finally:
            os.close(here)
            os.close(there)

    def close(self) -> None:
        """Once its processes are gone."""
        _ip(f"netns del {self._name}")


def _free_number() -> int:
    """Others on this machine have links, too, and may look for a number just now."""
    taken = _ip("-o -4 address")
    numbers = ((os.getpid() + offset) % 256 for offset in range(256))
    return next(number for number in numbers if f"10.213.{number}.1/" not in taken)


def link_or_skip(machine: str) -> Link:
    """Where networks may not be made, which takes root and `ip`, the test is skipped and says so."""
    try:
        return Link(machine)
    except OSError as error:
        pytest.skip(f"no network of its own for a node: {error}")


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(arguments: str) -> str:
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(done.returncode, f"ip {arguments}: {done.stderr.strip()}")
    return done.stdout
