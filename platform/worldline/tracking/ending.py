"""The last word of an attempt: a short block that says how it went and where to look."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from worldline.tracking import jsonl
from worldline.tracking.incidents import Incident, incidents
from worldline.tracking.log import EVENTS, STEPS, read_events
from worldline.tracking.status import RunState, Status

GO_ON = "; run the same command again to go on"


def ending(status: Status, notes: Sequence[str] = ()) -> list[str]:
    """Its lines. status: the run's last; the rest is read from its logs, as far as they are. notes: what else
    must be known. What did not end well says so in the last line, where it is seen.
    """
    folder = Path(status.storage)
    of = "" if status.steps is None else f" of {status.steps}"
    reason = f": {status.reason}" if status.reason else ""
    if status.state is RunState.STOPPED:
        reason += GO_ON
    how = _line(status.state.lower(), f"at step {status.step}{of}{reason}")
    losses, rows = _losses_and_rows(folder / STEPS)
    lines = []
    if losses:
        lines += [_line("loss", f"{losses[0]:.4g} -> {losses[1]:.4g}"), _line("rows", f"{rows:,}")]
    lines.append(_line("incidents", _incidents(incidents(read_events(folder / EVENTS)))))
    lines.append(_line("run", status.storage))
    lines.append(_line("look", f"worldline report {_called(status.run, folder)}"))
    if (uri := _tracker(folder)) is not None:
        lines.append(_line("", f"mlflow ui --backend-store-uri {uri}"))
    lines += notes
    return [how, *lines] if status.state is RunState.FINISHED else [*lines, how]


def _line(label: str, text: str) -> str:
    return f"{label:<10} {text}"


def _losses_and_rows(path: Path) -> tuple[tuple[float, float] | None, int]:
    """First and last finite loss, and all rows. Reads the log piece by piece: it may be long."""
    losses: tuple[float, float] | None = None
    rows = 0
    log = jsonl.Follower(path)
    while steps := log.read():
        for step in steps:
            rows += step["rows"]
            if math.isfinite(step["loss"]):
                losses = (step["loss"] if losses is None else losses[0], step["loss"])
    return losses, rows


def _incidents(found: list[Incident]) -> str:
    if not found:
        return "none"
    times = [incident.recovery_s for incident in found if incident.recovery_s is not None]
    if not times:
        return str(len(found))
    return f"{len(found)}, regrouped within {max(times):.2f} s"


def _called(run: str, folder: Path) -> str:
    """What the commands find the run by: its name in the default place, else its folder."""
    return run if folder == Path.cwd() / "runs" / run else str(folder)


def _tracker(folder: Path) -> str | None:
    """A server is looked at in a browser; the embedded database needs a command."""
    try:
        uri = json.loads((folder / "mlflow.json").read_text()).get("uri")
    except (FileNotFoundError, ValueError):
        return None
    return uri if isinstance(uri, str) and uri.startswith("sqlite:") else None
