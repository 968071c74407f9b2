"""The delivery process: brings a run's logs to MLflow, beside the training and never in its way.

`python -m worldline.tracking.deliver`, started by `worldline.tracking.mlflow.MlflowDelivery`. One JSON object
a line on both pipes. In: first what to deliver, later `{"finish": STATUS}`. Out: `Report`s. Where the input
ends, the driver is dead: the process ends at once and leaves the run as it is, for the next attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from worldline.tracking.spool import Spool

POLL_S = 0.5
BATCH_S = 2.0  # a batch that is not full is sent this long after the one before
BACKOFF_S = (0.5, 10.0)  # first and longest wait after a failure
FINISHING_BACKOFF_S = 0.5
REPORT_FILES = ("report.html", "report.png")

# One try of one request is short: waiting and trying again is ours, so that a finish is never stuck in it.
ENVIRONMENT = {
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Report:
    """through: all steps up to this one are at the server. done: and the final status. error: the newest."""

    run_id: str | None = None
    through: int = 0
    done: bool = False
    error: str | None = None


class Orders:
    """What the driver says on the pipe. Ends the process when the driver is gone."""

    def __init__(self) -> None:
        self._lines = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
        self.first: dict[str, Any] = json.loads(self._readline())
        self.finish: str | None = None
        self._said = threading.Event()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Until the driver says something, at most so long."""
        self._said.wait(seconds)

    def _listen(self) -> None:
        while True:
            order = json.loads(self._readline())
            self.finish = order["finish"]
            self._said.set()

    def _readline(self) -> bytes:
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            os._exit(0)
        return line


class Delivery:
    """The loop: read the spool, send, tell; after a failure wait, open anew. A finish order ends it."""

    def __init__(self, spool: Spool, tracker: Any, orders: Orders, reports: TextIO) -> None:
        self._reports = reports
        self._spool = spool
        self._tracker = tracker
        self._orders = orders
        self._report = Report()
        self._open = False
        self._closed = False
        self._sent_at = 0.0

    def run(self) -> None:
        backoff, longest = BACKOFF_S
        while not self._report.done:
            finishing = self._orders.finish is not None
            try:
                idle = self._advance(finishing)
            except Exception as error:  # whatever the tracker's client raises: the training must not notice
                self._open = False
                self._tell(error=describe(error))
                if finishing:
                    time.sleep(FINISHING_BACKOFF_S)
                else:
                    self._orders.wait(backoff)
                    backoff = min(backoff * 2, longest)
            else:
                backoff = BACKOFF_S[0]
                if idle and not finishing:
                    self._orders.wait(POLL_S)

    def _advance(self, finishing: bool) -> bool:
        """One step of the work. True where there is nothing to do now."""
        if not self._open:
            self._tracker.open()
            self._open = True
            self._tell(run_id=self._tracker.run_id, error=None)
        grew = self._spool.read()
        if finishing and not grew and not self._closed:
            self._spool.close()
            self._closed = True
        due = finishing or time.monotonic() - self._sent_at >= BATCH_S
        batch = self._spool.take(full=not due)
        if batch is not None:
            if self._tracker.send(batch.points):
                self._sent_at = time.monotonic()
            self._spool.taken()
            self._tell(through=max(self._report.through, batch.through), error=None)
        elif self._closed:
            self._end()
        return batch is None and not grew

    def _end(self) -> None:
        assert self._orders.finish is not None
        self._tracker.finish(self._orders.finish, {"worldline.incidents": str(self._spool.num_incidents)})
        try:
            for name in REPORT_FILES:
                if (self._spool.run_dir / name).exists():
                    self._tracker.upload(self._spool.run_dir / name)
        except Exception as error:
            self._tell(done=True, error=f"report not uploaded: {describe(error)}")
        else:
            self._tell(done=True, error=None)

    def _tell(self, **changes: Any) -> None:
        report = replace(self._report, **changes)
        if report != self._report:
            self._report = report
            print(json.dumps(asdict(report)), file=self._reports, flush=True)


def describe(error: BaseException) -> str:
    """The innermost cause in one short line: what a client wraps around it is long and says less."""
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def main() -> None:
    # Whoever ends the driver with all its descendants leaves them some seconds: they are for the last points.
    # That the driver is gone the pipe tells.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(10)
    orders = Orders()
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # MLflow prints for people: into the log with it
    os.environ.update(ENVIRONMENT)
    from worldline.tracking.tracker import Tracker  # after the environment it reads, and seconds of import

    what = orders.first
    run_dir = Path(what.pop("run_dir"))
    try:
        Delivery(Spool(run_dir), Tracker(run_dir, **what), orders, reports).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # the listening thread holds the pipe; nothing is left to clean up


if __name__ == "__main__":
    main()
