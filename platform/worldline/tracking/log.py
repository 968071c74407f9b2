"""The run's three durable logs: completed steps, evaluations, events. Only the controller writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worldline.events import EvaluationRecord, Event, EventKind, StepRecord
from worldline.tracking import jsonl
from worldline.tracking.jsonl import Fields, JsonLines

STEPS = "steps.jsonl"
EVALUATIONS = "evaluations.jsonl"
EVENTS = "events.jsonl"


class StepLog:
    """`steps.jsonl`: each completed step once, in order, without a gap.

    Protocol: the driver that holds the run's lease opens it, calls `truncate` with the step of the restored
    checkpoint (0 for none), then `append` as reports come, in any number and however often they come: a step
    that is already there is ignored, the step after the last is written, any other raises. `sync` before a
    checkpoint is committed, so that the log always reaches as far as the checkpoint.
    Non-finite numbers are written as the strings "NaN", "Infinity" and "-Infinity"; `skipped` and `metrics`
    are left out where they say nothing.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._first: int | None = None
        self._next = 1
        self._know_ends()

    def _know_ends(self) -> None:
        first, last = self._lines.first, self._lines.last
        self._first = None if first is None else int(first["step"])
        self._next = 1 if last is None else int(last["step"]) + 1

    @property
    def last_step(self) -> int:
        """The newest step that is there, or that the log was told to go on from; 0 where there is none."""
        return self._next - 1

    def append(self, records: Sequence[StepRecord]) -> int:
        """Write what is new, handed to the operating system on return. Gives the number of steps written."""
        new: list[str] = []
        next_step, first = self._next, self._first
        for record in records:
            if record.step == next_step:
                new.append(jsonl.encode(_step_fields(record)))
                first = record.step if first is None else first
                next_step += 1
            elif first is None or not first <= record.step < next_step:
                there = "it is empty" if first is None else f"it holds {first} to {next_step - 1}"
                raise ValueError(
                    f"{self._lines.path}: step {record.step} does not follow ({there}); "
                    f"the next must be {next_step}"
                )
        self._lines.write(new)
        self._next, self._first = next_step, first
        return len(new)

    def take_over(self) -> None:
        """Before the first record: what an earlier driver still writes does not come here."""
        self._lines.take_over()
        self._know_ends()

    def truncate(self, after_step: int) -> int:
        """Keep the steps up to `after_step` and go on behind it. Gives how many steps before it are missing.

        That number is 0 unless lines were lost that a checkpoint covers, as when the log's disk is another.
        """
        if self.last_step > after_step:
            self._lines.rewrite(lambda fields: int(fields["step"]) <= after_step)
            self._know_ends()
        missing = after_step - self.last_step
        self._next = after_step + 1
        return missing

    def sync(self) -> None:
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


class EvaluationLog:
    """`evaluations.jsonl`: each evaluation once, by rising step. Same protocol as `StepLog`, gaps allowed."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    @property
    def last_step(self) -> int | None:
        """The step of the newest evaluation."""
        return None if self._lines.last is None else int(self._lines.last["step"])

    def append(self, record: EvaluationRecord) -> bool:
        """Write it unless one of this or a later step is there; says whether it wrote."""
        last = self.last_step
        if last is not None and record.step <= last:
            return False
        self._lines.write([jsonl.encode(record.__dict__)])
        self._lines.last = dict(record.__dict__)
        return True

    def take_over(self) -> None:
        self._lines.take_over()

    def truncate(self, after_step: int) -> None:
        last = self.last_step
        if last is not None and last > after_step:
            self._lines.rewrite(lambda fields: int(fields["step"]) <= after_step)

    def sync(self) -> None:
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


class EventLog:
    """`events.jsonl`: what happened, in the order it happened. Never truncated: what happened, happened."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def append(self, events: Sequence[Event]) -> None:
        self._lines.write([jsonl.encode(event.__dict__) for event in events])

    def sync(self) -> None:
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


def read_steps(path: Path) -> list[Fields]:
    """The steps of a `steps.jsonl`, also while it is written: a torn last line is left out."""
    return jsonl.read(path)


def read_evaluations(path: Path) -> list[Fields]:
    return jsonl.read(path)


def read_events(path: Path) -> list[Event]:
    return [event_of(fields) for fields in jsonl.read(path)]


def event_of(fields: Fields) -> Event:
    known: dict[str, Any] = dict(fields)
    known["kind"] = EventKind(fields["kind"])
    known["workers"] = tuple(fields["workers"])
    return Event(**known)


def _step_fields(record: StepRecord) -> Fields:
    fields = record.__dict__.copy()  # dataclasses.asdict copies deeply and costs more than the rest
    if not record.skipped:
        del fields["skipped"]
    if not record.metrics:
        del fields["metrics"]
    return fields
