"""Ray workers that are forked from a server which has imported what a worker imports.

A worker's start takes 4 s of CPU, nine tenths of them imports, and the scenarios start hundreds. A forked one
is a process like another: its own pid, signals, sockets and network, a process group, a place in Ray. What
differs is its parent. Runs through the installed command start their workers as a user's do.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster import forked_worker
from tests.cluster.processes import is_alive, kill

START_S = 120.0
POLL_S = 0.02
WARM = (
    "asyncio",
    "jsonschema",
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "requests",
    "torch._dynamo",
    "worldline.checkpoint.save",
    "worldline.data.loader",
    "worldline.job.load",
    "worldline.worker.actor",
    "worldline.worker.rehearsal",
    "worldline.worker.runner",
)
"""Not Ray: its library reads the environment, which is another for each worker, when it is loaded."""


class Forks:
    """The server, as a process of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._born = folder / "born"
        self._born.touch()
        ray = importlib.util.find_spec("ray")
        assert ray is not None
        assert ray.origin is not None
        plain = Path(ray.origin).parent / "_private" / "workers" / "setup_worker.py"
        self.environment = {
            forked_worker.SOCKET: str(folder / "socket"),
            forked_worker.PLAIN: str(plain),
        }
        """What the raylets need to know."""
        self.node_arguments: Mapping[str, Any] = {"setup_worker_path": forked_worker.__file__}
        """What the start of a node takes."""
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(folder / "socket"), str(self._born)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not (folder / "socket").exists():
            assert self._process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the server of forks does not start"
            time.sleep(POLL_S)

    def of_raylet(self, pid: int) -> set[int]:
        """The living workers that were forked for a raylet."""
        pairs = [map(int, line.split()) for line in self._born.read_text().splitlines()]
        return {worker for raylet, worker in pairs if raylet == pid and is_alive(worker)}

    def close(self) -> None:
        kill([self._process.pid])
        self._process.wait()


def serve(address: str, born: str) -> dict[str, Any]:
    """Fork and fork again. Returns in each child, with its order."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        with connection:
            head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
            body, size = b"", int.from_bytes(head, "big")
            while len(body) < size and (more := connection.recv(size - len(body))):
                body += more
            if len(head) == 8 and len(body) == size:  # who asks was not killed meanwhile
                order: dict[str, Any] = json.loads(body)
                worker = os.fork()
                if not worker:
                    listener.close()
                    _take_over(connection, descriptors, order)
                    return order
                with open(born, "a") as file:
                    file.write(f"{order['raylet']} {worker}\n")
        for descriptor in descriptors:
            os.close(descriptor)


def _take_over(connection: socket.socket, descriptors: list[int], order: dict[str, Any]) -> None:
    """All that the process that asks has from its raylet."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4)
    network = f"/proc/{int.from_bytes(peer, sys.byteorder)}/ns/net"
    if os.readlink(network) != os.readlink("/proc/self/ns/net"):
        _enter(network)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    connection.sendall(b"1")


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY)
    if libc.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), f"setns: {namespace}")
    os.close(descriptor)


def main(address: str, born: str) -> None:
    for name in WARM:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    order = serve(address, born)
    # In a worker: as the interpreter runs a program.
    sys.argv = order["arguments"]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [os.path.dirname(sys.argv[0]), *filter(None, paths)]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
