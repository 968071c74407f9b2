"""The driver's end of the operator's requests: each becomes one signal and gets one answer."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldline.control import inbox, requests
from worldline.control.inbox import Inbox
from worldline.control.requests import Answered, DrainAsked, Outcome, Request, ResizeAsked, StopAsked
from worldline.control.signals import DrainRequested, Resize, Signal, StopRequested
from worldline.storage import LocalStorage, StorageError

RESIZE = ResizeAsked(2, "alice@here", 3)


class Desk:
    """An inbox of attempt 2 that is driven by hand, and whoever asks."""

    def __init__(self, folder) -> None:
        self.now = 0.0
        self.storage = LocalStorage(Path(folder))
        self.posted: list[Signal] = []
        self.inbox = Inbox(self.storage, 2, self.posted.append, clock=lambda: self.now)
        self._tokens: Iterator[int] = itertools.count()

    def ask(self, request: Request | bytes) -> str:
        number = next(self._tokens)
        name = requests.name(float(number), f"{number:032x}")
        if isinstance(request, bytes):
            self.storage.put(f"requests/{name}.json", request)
        else:
            requests.send(self.storage, name, request)
        return name

    def answer(self, name: str) -> Answered | None:
        self.inbox.look()
        return requests.take_answer(self.storage, name)

    @property
    def left(self) -> list[str]:
        return self.storage.list("requests/")


@pytest.fixture
def desk(tmp_path) -> Desk:
    return Desk(tmp_path)


def test_a_request_becomes_one_signal_and_its_answer_comes_back(desk) -> None:
    name = desk.ask(RESIZE)
    assert desk.answer(name) is None
    assert desk.answer(name) is None
    [signal] = desk.posted
    assert isinstance(signal, Resize)
    assert (signal.workers, signal.by) == (3, "alice@here")
    signal.answer(True, "3 workers from now on")
    signal.answer(False, "no, after all")
    assert desk.answer(name) == Answered(Outcome.DONE, "3 workers from now on")
    assert desk.answer(name) is None
    assert desk.left == []
    assert len(desk.posted) == 1


def test_the_controller_can_refuse(desk) -> None:
    name = desk.ask(DrainAsked(2, "bob@there", "w9", 30.0))
    desk.inbox.look()
    [signal] = desk.posted
    assert isinstance(signal, DrainRequested)
    assert (signal.target, signal.lead_s, signal.by) == ("w9", 30.0, "bob@there")
    signal.answer(False, "there is no w9")
    assert desk.answer(name) == Answered(Outcome.REFUSED, "there is no w9")


def test_a_stop_is_answered_when_it_is_handed_on(desk) -> None:
    answer = desk.answer(desk.ask(StopAsked(2, "alice@here")))
    assert answer is not None
    assert answer.outcome is Outcome.DONE
    assert desk.posted == [StopRequested("asked for by alice@here", 75)]


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b'{"command": "sing", "attempt": 2, "by": "me"}'])
def test_nonsense_is_refused_and_stops_nothing(desk, content) -> None:
    bad, good = desk.ask(content), desk.ask(RESIZE)
    answer = desk.answer(bad)
    assert answer is not None
    assert answer.outcome is Outcome.REFUSED
    assert [type(signal) for signal in desk.posted] == [Resize]
    assert desk.left == [f"requests/{good}.json"]


def test_what_was_asked_of_an_earlier_attempt_is_not_done(desk) -> None:
    answer = desk.answer(desk.ask(StopAsked(1, "me")))
    assert answer == Answered(Outcome.TRY_AGAIN, "it was asked of attempt 1, and this is attempt 2")
    assert desk.posted == []


def test_what_is_asked_of_a_later_attempt_is_left_to_that(desk) -> None:
    name = desk.ask(StopAsked(3, "me"))
    assert desk.answer(name) is None
    desk.inbox.close()
    assert desk.posted == []
    assert desk.left == [f"requests/{name}.json"]


def test_a_storage_that_fails_is_asked_again(desk, monkeypatch) -> None:
    name = desk.ask(RESIZE)
    desk.inbox.look()
    [signal] = desk.posted
    signal.answer(True, "yes")

    def full(*_: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(desk.storage, "put", full)
        desk.inbox.look()
    with monkeypatch.context() as patch:
        patch.setattr(desk.storage, "delete", full)  # the answer is written, its request is still there
        desk.inbox.look()
    assert desk.answer(name) == Answered(Outcome.DONE, "yes")
    assert len(desk.posted) == 1
    assert desk.left == []


def test_one_request_that_cannot_be_read_holds_up_no_other(desk, monkeypatch) -> None:
    bad, good = desk.ask(RESIZE), desk.ask(StopAsked(2, "me"))
    get = desk.storage.get

    def denied(key: str) -> bytes:
        if bad in key:
            raise StorageError("permission denied")
        return get(key)

    with monkeypatch.context() as patch:
        patch.setattr(desk.storage, "get", denied)
        desk.inbox.look()
    assert requests.take_answer(desk.storage, bad) == Answered(Outcome.TRY_AGAIN, "permission denied")
    assert [type(signal) for signal in desk.posted] == [StopRequested]
    assert desk.answer(good) is not None


def test_answers_that_nobody_comes_for_go_after_a_while(desk) -> None:
    name = desk.ask(StopAsked(2, "me"))
    desk.inbox.look()
    desk.now = inbox.KEPT_S - 1
    desk.inbox.look()
    assert desk.left == [f"requests/{name}.answer"]
    desk.now = inbox.KEPT_S
    desk.inbox.look()
    assert desk.left == []


def test_a_withdrawn_request_is_not_done(desk) -> None:
    requests.withdraw(desk.storage, desk.ask(RESIZE))
    desk.inbox.look()
    assert desk.posted == []


def test_what_has_no_answer_at_the_end_is_refused(desk) -> None:
    taken = desk.ask(RESIZE)
    desk.inbox.look()
    late = desk.ask(RESIZE)
    desk.inbox.end()
    outcomes = [desk.answer(name) for name in (taken, late)]
    assert outcomes == [
        Answered(Outcome.TRY_AGAIN, "attempt 2 ended before it was done"),
        Answered(Outcome.TRY_AGAIN, "attempt 2 is ending"),
    ]
    assert len(desk.posted) == 1
    last = desk.ask(RESIZE)
    desk.inbox.close()
    assert requests.take_answer(desk.storage, last) == outcomes[1]


class Flaky(LocalStorage):
    """Fails when it is told to, before or after it did what it was asked."""

    failing = ""

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._do(lambda: LocalStorage.put(self, key, data))

    def delete(self, key: str) -> None:
        self._do(lambda: LocalStorage.delete(self, key))

    def list(self, prefix: str = "") -> list[str]:
        if self.failing:
            raise StorageError("away")
        return super().list(prefix)

    def _do(self, what: Callable[[], None]) -> None:
        if self.failing != "before":
            what()
        if self.failing:
            raise StorageError("away")


actions = st.lists(
    st.sampled_from(["ask", "ask", "look", "look", "answer", "answer", "withdraw", "before", "after", ""]),
    max_size=40,
)


@given(actions)
def test_whatever_happens_each_request_is_handed_on_once_and_answered_once(actions: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(folder)
        person = desk.storage
        desk.inbox._storage = flaky = Flaky(Path(folder))
        asked: list[str] = []
        withdrawn: set[str] = set()
        answered = 0
        for action in actions:
            if action == "ask":
                asked.append(desk.ask(RESIZE))
            elif action == "withdraw" and asked:
                requests.withdraw(person, asked[-1])
                withdrawn.add(asked[-1])
            elif action == "look":
                desk.inbox.look()
            elif action == "answer" and answered < len(desk.posted):
                signal = desk.posted[answered]
                assert isinstance(signal, Resize)
                signal.answer(True, f"answer {answered}")
                answered += 1
            elif action in ("before", "after", ""):
                flaky.failing = action
        flaky.failing = ""
        desk.inbox.close()
        assert len(desk.posted) <= len(asked)
        outcomes = {name: requests.take_answer(person, name) for name in asked}
        for name in asked:
            assert outcomes[name] is not None or name in withdrawn
        done = [answer.sentence for answer in outcomes.values() if answer and answer.outcome is Outcome.DONE]
        assert len(done) == len(set(done))
        assert len(done) >= answered - len(withdrawn)
        assert requests.waiting(person) == []


def test_the_thread_does_it_by_itself_and_ends(tmp_path) -> None:
    storage = LocalStorage(tmp_path)
    orphan = requests.name(0.0, "0" * 32)
    requests.answer(storage, orphan, Answered(Outcome.DONE, "of an earlier attempt"))
    written = threading.Event()
    delete = storage.delete

    def deleted(key: str) -> None:
        delete(key)
        if key == f"requests/{name}.json":
            written.set()

    storage.delete = deleted  # type: ignore[method-assign]

    def post(signal: Signal) -> None:
        assert isinstance(signal, Resize)
        threading.Thread(target=signal.answer, args=(True, "from another thread")).start()

    desk = Inbox(storage, 2, post, poll_s=0.01)
    name = requests.name(1.0, "1" * 32)
    requests.send(storage, name, RESIZE)
    desk.start()
    assert written.wait(10)
    assert requests.take_answer(storage, name) == Answered(Outcome.DONE, "from another thread")
    desk.close()
    assert not desk._thread.is_alive()
    assert storage.list("requests/") == []
