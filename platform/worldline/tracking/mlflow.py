"""MLflow delivery as the controller sees it: started, asked for the run id, finished within a deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import worldline
from worldline.tracking.jsonl import read_last
from worldline.tracking.log import STEPS

LOG = "mlflow.log"
MAX_STARTS = 3
PULSE_S = 0.05

FinalStatus = Literal["FINISHED", "FAILED", "KILLED"]


class MlflowDelivery:
    """A process of its own that follows the run's logs: its work and a slow server never touch the driver.

    Protocol: `start` once the logs are open and truncated; it returns at once. The logs are the spool: write
    them, and the points arrive. `finish` once they are complete; it returns within its timeout, with None or
    a text saying what was not delivered. A process that dies is started again a few times. Where the driver
    dies instead, the process ends and the MLflow run stays RUNNING, until the next attempt goes on with it.
    """

    def __init__(self, run_dir: Path, uri: str, what: Mapping[str, Any]) -> None:
        self._run_dir = run_dir
        self._uri = uri
        self._what = what
        self._lock = threading.Lock()  # over _process and _finish: an order goes to the process that is there
        self._process: subprocess.Popen[bytes] | None = None
        self._finish: bytes | None = None
        self._abandoned = False
        self._report: dict[str, Any] = {}
        self._died: str | None = None
        self._thread = threading.Thread(target=self._supervise, name="mlflow-delivery", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls,
        run_dir: Path,
        uri: str,
        experiment: str,
        run_name: str,
        run_id: str | None = None,
        params: Mapping[str, object] | None = None,
        tags: Mapping[str, object] | None = None,
    ) -> MlflowDelivery:
        """params: what is constant for the run. tags: what may change with the attempt."""
        what = {
            "run_dir": str(run_dir.resolve()),
            "uri": uri,
            "experiment": experiment,
            "run_name": run_name,
            "run_id": run_id,
            "params": {key: str(value) for key, value in (params or {}).items()},
            "tags": {key: str(value) for key, value in (tags or {}).items()},
        }
        return cls(run_dir, uri, what)

    @property
    def run_id(self) -> str | None:
        """Known once the server has answered."""
        run_id: str | None = self._report.get("run_id")
        return run_id

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def finish(self, status: FinalStatus, patience_s: Callable[[], float]) -> str | None:
        """Deliver the rest, set the status, end the process. None, or what could not be done and why.

        patience_s: how many seconds that may take; asked again and again, so that it may become shorter.
        """
        begun = time.monotonic()
        with self._lock:
            self._finish = json.dumps({"finish": status}).encode() + b"\n"
            self._send(self._finish)
        while self._thread.is_alive() and time.monotonic() - begun < patience_s():
            self._thread.join(PULSE_S)
        self.kill()
        return self._shortfall(status)

    def kill(self) -> None:
        """End the process now; what it has not sent stays in the logs."""
        with self._lock:
            self._abandoned = True
            if self._process is not None:
                self._process.kill()
        self._thread.join(timeout=5)

    def _shortfall(self, status: str) -> str | None:
        report = self._report
        reason = report.get("error") or self._died or "no answer within the time allowed"
        if report.get("done"):
            return None if report.get("error") is None else f"tracker: {reason} ({self._uri})"
        last = read_last(self._run_dir / STEPS)
        total = 0 if last is None else int(last["step"])
        missing = max(total - int(report.get("through", 0)), 0)
        if missing:
            what = f"{missing} of {total} steps not delivered to {self._uri}"
            return f"tracker: {what}: {reason}; they stay in {STEPS}; the next attempt sends them"
        return f"tracker: all steps delivered to {self._uri}, but not the status {status}: {reason}"

    def _supervise(self) -> None:
        for _ in range(MAX_STARTS):
            with self._lock:
                if self._abandoned:
                    return
                self._process = process = self._spawn()
                self._send(json.dumps(self._what).encode() + b"\n")
                if self._finish is not None:
                    self._send(self._finish)
            assert process.stdout is not None
            for line in process.stdout:
                if line.endswith(b"\n"):
                    self._report = json.loads(line)
            code = process.wait()
            if code == 0:
                return
            self._died = f"the delivery process ended with {code}, see {self._run_dir / LOG}"

    def _spawn(self) -> subprocess.Popen[bytes]:
        source = str(Path(next(iter(worldline.__path__))).parent)  # the same code, however it is installed
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        with open(self._run_dir / LOG, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "worldline.tracking.deliver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # an interrupt at the terminal is the driver's to answer
            )

    def _send(self, line: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it died; the supervisor sees it and starts another
