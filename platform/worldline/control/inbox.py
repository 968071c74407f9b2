"""The driver's end of what operators ask: finds requests, hands them on, writes the answers."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from worldline.control import requests
from worldline.control.requests import (
    Answered,
    BadRequest,
    DrainAsked,
    Outcome,
    Request,
    ResizeAsked,
    StopAsked,
)
from worldline.control.signals import Answer, DrainRequested, Post, Resize, Signal, StopRequested
from worldline.exits import TRY_AGAIN
from worldline.storage import NotFound, Storage, StorageError

log = logging.getLogger(__name__)

POLL_S = 0.5
KEPT_S = 60.0
"""An answer that nobody came for is kept so long."""
CLOSE_S = 5.0


def signal_of(request: Request, answer: Answer) -> Signal:
    match request:
        case ResizeAsked():
            return Resize(request.workers, request.by, answer)
        case DrainAsked():
            return DrainRequested(request.target, request.lead_s, request.by, answer)
        case StopAsked():
            return StopRequested(f"asked for by {request.by}", TRY_AGAIN)


class Inbox:
    """Looks into the run's requests, in a thread of its own, so that no storage holds the controller up.

    Protocol: `start` once this attempt has the run; `end` when nobody takes signals in any more: from then on
    what has no answer and what comes is refused; `close` when the run's end is written down. Each request
    becomes one signal; who takes that in calls its `answer` once, from any thread, which costs nothing, and
    this thread writes it down. What cannot be understood, or was asked of an earlier attempt, is refused
    here. What is addressed to a later attempt is left alone: then this driver has lost the run. A storage
    that fails refuses the request, to be made again; a request is never handed on twice.

    A test may call `look` instead of `start`.
    """

    def __init__(
        self,
        storage: Storage,
        attempt: int,
        post: Post,
        *,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._attempt = attempt
        self._post = post
        self._poll_s = poll_s
        self._clock = clock
        self._answers: queue.SimpleQueue[tuple[str, Answered] | None] = queue.SimpleQueue()
        self._seen: dict[str, bool] = {}  # name -> whether it has its answer; kept, as listings may lag
        self._unwritten: deque[tuple[str, Answered]] = deque()
        self._kept: deque[tuple[float, str]] = deque()
        self._failing = False
        self._ending = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._answers.put(None)

    def close(self) -> None:
        """At most about `CLOSE_S`, then a storage that hangs is left to hang."""
        self._closing.set()
        self.end()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        else:
            self.look()

    def look(self) -> None:
        """Hand on what is new, write down what was answered, remove what nobody came for."""
        try:
            self._write_answers()
            self._find_requests()
            if self._ending.is_set():
                self._refuse_the_rest()
            self._write_answers()  # what was answered at once
            self._remove_old_answers()
        except StorageError as error:
            if not self._failing:
                log.warning("requests of operators wait: %s", error)
            self._failing = True
        else:
            self._failing = False

    def _run(self) -> None:
        with contextlib.suppress(StorageError):
            requests.clear_answers(self._storage)
        while not self._closing.is_set():
            self.look()
            with contextlib.suppress(queue.Empty):
                self._take_in(self._answers.get(timeout=self._poll_s))
        self.look()

    def _refuse_the_rest(self) -> None:
        for name in requests.waiting(self._storage):
            self._say(name, Outcome.TRY_AGAIN, f"attempt {self._attempt} ended before it was done")

    def _find_requests(self) -> None:
        for name in requests.waiting(self._storage):
            if name not in self._seen:
                self._take(name)

    def _take(self, name: str) -> None:
        try:
            request = requests.read(self._storage, name)
        except NotFound:  # withdrawn
            return
        except (BadRequest, StorageError) as error:
            self._seen[name] = False
            outcome = Outcome.REFUSED if isinstance(error, BadRequest) else Outcome.TRY_AGAIN
            self._say(name, outcome, str(error))
            return
        if request.attempt > self._attempt:
            return
        self._seen[name] = False
        if request.attempt < self._attempt:
            sentence = f"it was asked of attempt {request.attempt}, and this is attempt {self._attempt}"
            self._say(name, Outcome.TRY_AGAIN, sentence)
        elif self._ending.is_set():
            self._say(name, Outcome.TRY_AGAIN, f"attempt {self._attempt} is ending")
        else:
            self._post(signal_of(request, self._answer_to(name)))
            if isinstance(request, StopAsked):
                self._say(name, Outcome.DONE, "stops at the next step, after a checkpoint")

    def _answer_to(self, name: str) -> Answer:
        def answer(accepted: bool, sentence: str) -> None:
            outcome = Outcome.DONE if accepted else Outcome.REFUSED
            self._answers.put((name, Answered(outcome, sentence)))

        return answer

    def _say(self, name: str, outcome: Outcome, sentence: str) -> None:
        self._take_in((name, Answered(outcome, sentence)))

    def _take_in(self, item: tuple[str, Answered] | None) -> None:
        if item is not None and self._seen.get(item[0]) is False:  # the first answer counts
            self._seen[item[0]] = True
            self._unwritten.append(item)

    def _write_answers(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._take_in(self._answers.get_nowait())
        while self._unwritten:
            name, answered = self._unwritten[0]
            requests.answer(self._storage, name, answered)
            self._unwritten.popleft()
            self._kept.append((self._clock() + KEPT_S, name))

    def _remove_old_answers(self) -> None:
        while self._kept and self._kept[0][0] <= self._clock():
            requests.forget_answer(self._storage, self._kept[0][1])
            self._kept.popleft()
