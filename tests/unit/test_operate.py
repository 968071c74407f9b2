"""resize, drain, stop: what reaches the driver, what comes back, and how they exit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import click
import pytest
from click.testing import CliRunner, Result

from worldline.cli.operate import COMMANDS
from worldline.control.inbox import Inbox
from worldline.control.signals import DrainRequested, Resize, Signal, StopRequested
from worldline.storage import LocalStorage
from worldline.tracking.status import RunState, Status, StatusWriter

STATUS = Status(
    run="a", state=RunState.RUNNING, reason="", step=3, steps=10, epoch=0, attempt=2, generation=2, world=1,
    min=1, max=2, workers=(), standbys=0, loss=None, rows_per_s=None, goodput=None, incidents=0,
    mlflow_run_id=None, storage="/runs/a",
)  # fmt: skip


def worldline(*args: object) -> Result:
    group = click.Group(commands={command.name: command for command in COMMANDS})
    result = CliRunner().invoke(group, [str(arg) for arg in args], standalone_mode=False)
    if isinstance(result.exception, click.ClickException):  # as `main` does
        result.exit_code = getattr(result.exception, "exit_code", 1)
        result.exit_code = 64 if isinstance(result.exception, click.UsageError) else result.exit_code
    elif result.exception is not None:
        raise result.exception
    else:
        result.exit_code = result.return_value or 0
    return result


def said(result: Result) -> str:
    error = result.exception
    return error.format_message() if isinstance(error, click.ClickException) else result.stderr.strip()


@contextmanager
def driver(folder, react: Callable[[Signal], None], attempt: int = 2) -> Iterator[StatusWriter]:
    """This process as the driver of run "a" in `folder`."""
    with ExitStack() as stack:
        writer = StatusWriter(folder / "a")
        stack.callback(writer.close)
        inbox = Inbox(LocalStorage(folder / "a"), attempt, react, poll_s=0.01)
        writer.write(STATUS, now=True)
        inbox.start()
        stack.callback(inbox.close)
        yield writer


def test_a_resize_that_is_done(tmp_path) -> None:
    asked: list[Resize] = []

    def react(signal: Signal) -> None:
        assert isinstance(signal, Resize)
        asked.append(signal)
        signal.answer(True, "3 workers from now on")

    with driver(tmp_path, react):
        result = worldline("resize", "a", 3, "--storage", tmp_path)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", "3 workers from now on\n")
        result = worldline("resize", "a", 3, "--storage", tmp_path, "--json")
    assert json.loads(result.stdout) == {
        "run": "a", "attempt": 2, "outcome": "done", "sentence": "3 workers from now on"
    }  # fmt: skip
    assert result.stderr == ""
    assert [signal.workers for signal in asked] == [3, 3]
    assert "@" in asked[0].by
    assert LocalStorage(tmp_path / "a").list("requests/") == []


def test_a_drain_that_is_refused(tmp_path) -> None:
    def react(signal: Signal) -> None:
        assert isinstance(signal, DrainRequested)
        assert (signal.target, signal.lead_s) == ("w9", 5.0)
        signal.answer(False, "there is no w9")

    with driver(tmp_path, react):
        result = worldline("drain", "a", "w9", "--lead", 5, "--storage", tmp_path)
    assert (result.exit_code, result.stderr) == (64, "there is no w9\n")


@pytest.mark.parametrize(
    ("state", "code"), [(RunState.STOPPED, 0), (RunState.FINISHED, 0), (RunState.FAILED, 1)]
)
def test_a_stop_waits_for_the_end(tmp_path, state: RunState, code: int) -> None:
    asked = threading.Event()

    def react(signal: Signal) -> None:
        assert isinstance(signal, StopRequested)
        assert signal.exit_code == 75
        asked.set()

    with driver(tmp_path, react) as writer:

        def end() -> None:
            assert asked.wait(10)
            writer.write(replace(STATUS, state=state, reason="because", step=7), now=True)

        ending = threading.Thread(target=end)
        ending.start()
        result = worldline("stop", "a", "--storage", tmp_path, "--json")
        ending.join()
    assert result.exit_code == code
    content = json.loads(result.stdout)
    assert (content["state"], content["step"]) == (state.value, 7)
    assert content["sentence"] == f"a {state.lower()} at step 7 of 10: because"


def test_a_stop_that_takes_too_long_says_so(tmp_path) -> None:
    with driver(tmp_path, lambda signal: None):
        result = worldline("stop", "a", "--storage", tmp_path, "--timeout", 0.5)
    assert result.exit_code == 75
    assert said(result) == "a is still running at step 3 after 0.5 s; it goes on stopping"


def test_a_driver_that_does_not_answer(tmp_path) -> None:
    StatusWriter(tmp_path / "a").write(STATUS, now=True)
    result = worldline("resize", "a", 1, "--storage", tmp_path, "--timeout", 0.2)
    assert result.exit_code == 75
    assert "the driver of a, which is running, did not answer within 0.2 s" in said(result)
    assert LocalStorage(tmp_path / "a").list("requests/") == []


@pytest.mark.parametrize("command", [["resize", "a", 1], ["drain", "a", 0], ["stop", "a"]])
def test_no_driver(tmp_path, command: list[object]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{}")
    result = worldline(*command, "--storage", tmp_path)
    assert result.exit_code == 75
    assert "no status yet" in said(result)
    writer = StatusWriter(tmp_path / "a")
    writer.write(replace(STATUS, state=RunState.STOPPED, reason="SIGTERM"), now=True)
    result = worldline(*command, "--storage", tmp_path)
    assert result.exit_code == 75
    assert said(result) == "nobody trains it: a stopped at step 3 of 10: SIGTERM"


def test_a_run_that_ends_before_it_answers(tmp_path) -> None:
    def react(signal: Signal) -> None:
        writer.write(replace(STATUS, state=RunState.FINISHED, step=10), now=True)

    with driver(tmp_path, react) as writer:
        result = worldline("resize", "a", 1, "--storage", tmp_path)
    assert result.exit_code == 75
    assert said(result) == "too late: a finished at step 10 of 10"


def test_an_attempt_that_lost_the_run_is_not_asked(tmp_path) -> None:
    """The status names attempt 2, but attempt 3's driver is the one that looks."""
    with driver(tmp_path, lambda signal: None, attempt=3):
        result = worldline("resize", "a", 1, "--storage", tmp_path)
    assert (result.exit_code, result.stderr) == (75, "it was asked of attempt 2, and this is attempt 3\n")


@pytest.mark.parametrize(
    "command",
    [
        ["resize", "b", 1],
        ["resize", "a", 0],
        ["resize", "a", "many"],
        ["resize", "a"],
        ["drain", "a", "w1", "--lead", -1],
        ["stop", "b"],
    ],
)
def test_wrong_usage(tmp_path, command: list[object]) -> None:
    StatusWriter(tmp_path / "a").write(STATUS, now=True)
    assert worldline(*command, "--storage", tmp_path).exit_code == 64
