"""Commands that act on a live run, from any machine that sees its storage: resize, drain, stop.

They write a request into the run's storage and wait for its driver's answer. Nothing slow is imported.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
import uuid
from pathlib import Path

import click

from worldline.cli.inspect import TryAgain, find_run, status_of
from worldline.cli.options import json_option, storage_option
from worldline.control import requests
from worldline.control.requests import Answered, DrainAsked, Outcome, Request, ResizeAsked, StopAsked
from worldline.exits import TRY_AGAIN, WRONG_USAGE
from worldline.storage import Storage, StorageError, open_storage
from worldline.tracking.status import RunState, Status

POLL_S = 0.1
CODES = {Outcome.DONE: 0, Outcome.REFUSED: WRONG_USAGE, Outcome.TRY_AGAIN: TRY_AGAIN}

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="How long to wait for the driver's answer.",
)


@click.command()
@click.argument("run")
@click.argument("workers", metavar="N", type=click.IntRange(min=1))
@timeout_option
@json_option
@storage_option
def resize(run: str, workers: int, timeout_s: float, as_json: bool, storage: str | None) -> int:
    """Have RUN train with N workers from now on."""
    live = LiveRun(run, storage, timeout_s)
    return _tell(live, live.ask(ResizeAsked(live.attempt, _me(), workers)), as_json)


@click.command()
@click.argument("run")
@click.argument("target", metavar="WORKER|NODE")
@click.option(
    "--lead",
    "lead_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="It must have left by then.",
)
@timeout_option
@json_option
@storage_option
def drain(run: str, target: str, lead_s: float, timeout_s: float, as_json: bool, storage: str | None) -> int:
    """Have a worker, or all workers of a node, leave RUN in order.

    A worker is named by its rank or its id, a node by its address or the beginning of its id, as `worldline
    status` shows them.
    """
    live = LiveRun(run, storage, timeout_s)
    return _tell(live, live.ask(DrainAsked(live.attempt, _me(), target, lead_s)), as_json)


@click.command()
@click.argument("run")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="How long to wait for the run's end.",
)
@json_option
@storage_option
def stop(run: str, timeout_s: float, as_json: bool, storage: str | None) -> int:
    """End RUN at its next step, with a checkpoint, and wait for that. The same `run` command resumes it."""
    live = LiveRun(run, storage, timeout_s)
    answered = live.ask(StopAsked(live.attempt, _me()))
    if answered.outcome is Outcome.REFUSED:
        return _tell(live, answered, as_json)
    last = live.wait_for_end()
    if not last.state.over:
        raise TryAgain(f"{run} was stopped, and goes on in attempt {last.attempt}: somebody began it again")
    ended = Answered(Outcome.DONE, live.how_it_ended(last))
    _tell(live, ended, as_json, state=last.state.value, step=last.step)
    return 1 if last.state is RunState.FAILED else 0


COMMANDS: list[click.Command] = [resize, drain, stop]


class LiveRun:
    """A run whose driver lives, as far as can be seen from here, and its attempt. All waits together end
    `timeout_s` after this was made.

    Raises WrongUsage where there is no such run and TryAgain where nobody trains it.
    """

    def __init__(self, run: str, storage: str | None, timeout_s: float) -> None:
        self.run = run
        self._folder: Path = find_run(run, storage)
        self._storage: Storage = open_storage(str(self._folder))
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        status = status_of(self._folder)
        if status.state.over:
            raise TryAgain(f"nobody trains it: {self.how_it_ended(status)}")
        self.attempt = status.attempt

    def ask(self, request: Request) -> Answered:
        """The driver's answer, or that the run ended before. Raises TryAgain, with the request withdrawn, if
        none comes."""
        name = requests.name(time.time(), uuid.uuid4().hex)
        try:
            requests.send(self._storage, name, request)
            try:
                return self._await(name)
            except BaseException:  # a Ctrl-C, too
                requests.withdraw(self._storage, name)
                raise
        except StorageError as error:
            raise TryAgain(str(error)) from error

    def wait_for_end(self) -> Status:
        """What the run's status says when this attempt is over. Raises TryAgain after the deadline."""
        while True:
            status = status_of(self._folder)
            if status.state.over or status.attempt != self.attempt:
                return status
            if time.monotonic() >= self._deadline:
                raise TryAgain(
                    f"{self.run} is still {status.state.lower()}{_because(status)} at step {status.step} "
                    f"after {self._timeout_s:g} s; it goes on stopping"
                )
            time.sleep(POLL_S)

    def _await(self, name: str) -> Answered:
        while True:
            status = status_of(self._folder)
            answered = requests.take_answer(self._storage, name)
            if answered is not None:
                return answered
            if status.state.over or status.attempt != self.attempt:
                requests.withdraw(self._storage, name)
                return Answered(Outcome.TRY_AGAIN, f"too late: {self.how_it_ended(status)}")
            if time.monotonic() >= self._deadline:
                raise TryAgain(
                    f"the driver of {self.run}, which is {status.state.lower()}{_because(status)}, did not "
                    f"answer within {self._timeout_s:g} s: the request is withdrawn; if it was taken after "
                    "all, `worldline status` will show it"
                )
            time.sleep(POLL_S)

    def how_it_ended(self, last: Status) -> str:
        if not last.state.over:
            return f"attempt {self.attempt} of {self.run} is over, and attempt {last.attempt} trains it now"
        of = "" if last.steps is None else f" of {last.steps}"
        return f"{self.run} {last.state.lower()} at step {last.step}{of}{_because(last)}"


def _because(status: Status) -> str:
    return f": {status.reason}" if status.reason else ""


def _tell(live: LiveRun, answered: Answered, as_json: bool, **more: object) -> int:
    if as_json:
        content = {"run": live.run, "attempt": live.attempt, "outcome": answered.outcome.value}
        click.echo(json.dumps(content | {"sentence": answered.sentence} | more))
    else:
        click.echo(answered.sentence, err=True)
    return CODES[answered.outcome]


def _me() -> str:
    """Who asks, for the run's log."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    me = f"{user}@{socket.gethostname()}"
    return "".join(c for c in me if c.isprintable())[: requests.MAX_TEXT]
