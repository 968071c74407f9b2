"""Commands of the product as processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

SCRIPT = Path(sys.executable).with_name("worldline")

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["worldline.control.launch", "worldline.cli.main"])


class Command(Protocol):
    """A process that was started. returncode: None while it runs; negative, the signal that ended it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...


class Script:
    """The installed command, as a user starts it."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [SCRIPT, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()


class Fork:
    """The same, forked from a server that has Torch and Ray imported: a new one costs milliseconds."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        self._process = _forks.Process(target=_main, args=(list(arguments), folder, dict(environment), log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def _main(arguments: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    from worldline.cli.main import main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.argv = ["worldline", *arguments]
    sys.exit(main())
