"""One driver a run: who may take it, who has lost it, and that of several exactly one gets it."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import worldline.storage
from worldline.control.lease import Claim, Lease, LeaseHeld, Sighting, Verdict, decide
from worldline.process import Liveness, ProcessId
from worldline.storage import LocalStorage, StorageError, open_storage

SOURCE = str(Path(worldline.storage.__file__).parents[1])
HERE = ProcessId.current()
ELSEWHERE = ProcessId("other-host", "other-boot/pid:[1]", 4711, 99)


@pytest.fixture
def storage(tmp_path):
    return open_storage(str(tmp_path / "run"))


class Time:
    """A clock that only sleeping moves; `during` runs in each sleep."""

    def __init__(self, during=lambda: None):
        self.now = 1000.0
        self.during = during

    def clock(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0
        self.now += max(seconds, 0.001)
        self.during()


def acquire(storage, time=None, **options):
    time = time or Time(during=lambda: pytest.fail("waited"))
    return Lease.acquire(storage, clock=time.clock, sleep=time.sleep, **options)


# The decision.

claims = st.builds(
    Claim,
    attempt=st.integers(1, 5),
    owner=st.just(ELSEWHERE),
    ttl_s=st.floats(1, 100),
    renewed=st.integers(0, 5),
    released=st.booleans(),
)
sightings = st.builds(Sighting, attempt=st.integers(1, 5), renewed=st.integers(0, 5), time=st.floats(0, 1000))


@given(claims, st.sampled_from(Liveness), st.none() | sightings, st.floats(0, 2000))
def test_a_run_is_taken_only_from_who_let_go_is_gone_or_was_silent(claim, owner, first, now):
    verdict = decide(claim, owner, first, now)
    silent = (
        owner is Liveness.UNKNOWN
        and first is not None
        and (first.attempt, first.renewed) == (claim.attempt, claim.renewed)
        and now - first.time >= claim.ttl_s
    )
    assert (verdict is Verdict.TAKE) == (claim.released or owner is Liveness.GONE or silent)
    if verdict is Verdict.WATCH:
        assert owner is Liveness.UNKNOWN


def test_a_run_nobody_had():
    assert decide(None, Liveness.GONE, None, 0) is Verdict.TAKE


def test_a_sign_of_life_ends_the_watch():
    claim = Claim(3, ELSEWHERE, ttl_s=30, renewed=7)
    first = Sighting(3, 7, time=100)
    assert decide(claim, Liveness.UNKNOWN, first, 129.9) is Verdict.WATCH
    assert decide(claim, Liveness.UNKNOWN, first, 130) is Verdict.TAKE
    assert decide(replace(claim, renewed=8), Liveness.UNKNOWN, first, 130) is Verdict.HELD
    assert decide(replace(claim, attempt=4), Liveness.UNKNOWN, first, 130) is Verdict.HELD


# The lease.


def test_attempts_count_on_over_releases(storage):
    for attempt in (1, 2, 3):
        lease = acquire(storage)
        assert lease.attempt == attempt
        assert lease.renew()
        lease.release()


def test_a_living_process_of_this_machine_keeps_its_run(storage):
    acquire(storage)
    with pytest.raises(LeaseHeld) as caught:
        acquire(storage)
    for part in (storage.url, "attempt 1", str(os.getpid()), HERE.host, f"kill {os.getpid()}"):
        assert part in str(caught.value)
    assert caught.value.claim.owner == HERE


@pytest.mark.parametrize(
    "gone",
    [replace(HERE, start=HERE.start + 1), replace(HERE, pid=2**22 + 1)],
    ids=["the pid is another process now", "no such pid"],
)
def test_a_dead_process_of_this_machine_loses_it_at_once(storage, gone):
    old = acquire(storage, process=gone)
    new = acquire(storage)
    assert new.attempt == 2
    assert new.renew()
    assert not old.renew()


@pytest.mark.parametrize("other", [ELSEWHERE, replace(HERE, machine=""), replace(ELSEWHERE, pid=HERE.pid)])
def test_a_silent_holder_elsewhere_loses_it_after_its_ttl(storage, other):
    acquire(storage, process=other, ttl_s=20)
    time, notes = Time(), []
    new = acquire(storage, time, ttl_s=5, notify=notes.append)
    assert new.attempt == 2
    assert time.now == pytest.approx(1020, abs=0.1)
    [note] = notes
    assert f"host {other.host}" in note
    assert "up to 20 s" in note


def test_a_living_holder_elsewhere_keeps_it(storage):
    holder = acquire(storage, process=ELSEWHERE)
    time = Time(during=lambda: holder.renew())
    with pytest.raises(LeaseHeld, match=r"elsewhere.* other-host"):
        acquire(storage, time)
    assert time.now < 1004  # the first sign of life is enough
    assert holder.renew()


def test_a_look_that_takes_long_does_not_count_as_silence(tmp_path):
    """The acquirer is stopped while it reads: what it read says nothing of the time since."""
    holder = acquire(LocalStorage(tmp_path), process=ELSEWHERE)
    time = Time()

    class Slow(LocalStorage):
        def get(self, key):
            data = super().get(key)
            time.now += 1000
            assert holder.renew()
            return data

    with pytest.raises(LeaseHeld):
        acquire(Slow(tmp_path), time)


def test_of_two_watchers_the_slower_finds_it_held(storage):
    acquire(storage, process=ELSEWHERE)
    faster = []

    def overtaken():
        if time.now > 1025 and not faster:
            other = Time()
            faster.append(acquire(storage, other))

    time = Time(during=overtaken)
    with pytest.raises(LeaseHeld, match="attempt 2"):
        acquire(storage, time)
    assert faster[0].renew()


def test_who_was_overtaken_is_told_once_by_the_thread(storage):
    old = acquire(storage, process=ELSEWHERE, ttl_s=0.03)
    messages, told = [], threading.Event()
    new = acquire(storage, Time())
    old.start(lambda message: (messages.append(message), told.set()))
    assert told.wait(timeout=60)
    old.release()
    assert len(messages) == 1
    assert "another driver has taken run" in messages[0]
    assert "from attempt 1" in messages[0]
    assert new.renew()  # releasing the old attempt lets nobody into the new one
    with pytest.raises(LeaseHeld, match="attempt 2"):
        acquire(storage)


def test_the_thread_renews_through_storage_failures(tmp_path, caplog):
    failed, renewed = threading.Event(), threading.Event()

    class Failing(LocalStorage):
        def put_file(self, key, write):
            if not failed.is_set():
                failed.set()
                raise StorageError(f"cannot write {key}: No space left on device")
            super().put_file(key, write)
            renewed.set()

    lease = acquire(Failing(tmp_path), ttl_s=0.03)
    lease.start(pytest.fail)
    assert renewed.wait(timeout=60)
    lease.release()
    assert "No space left on device" in caplog.text
    assert acquire(LocalStorage(tmp_path)).attempt == 2


def test_a_damaged_file_is_watched_like_a_holder_elsewhere(storage):
    holder = acquire(storage)
    storage.put("lease/attempt-000001.json", b'{"attempt"')
    alive = Time(during=lambda: holder.renew())
    with pytest.raises(LeaseHeld):
        acquire(storage, alive)
    storage.put("lease/attempt-000001.json", b"")
    assert acquire(storage, Time()).attempt == 2


def test_the_storage_failing_is_no_lease(tmp_path):
    (tmp_path / "lease").write_text("in the way")
    with pytest.raises(StorageError, match="lease"):
        acquire(LocalStorage(tmp_path))


# Real processes.

DRIVER = """
    import sys
    from worldline.control.lease import Lease, LeaseHeld
    from worldline.storage import open_storage
    sys.stdin.readline()
    try:
        lease = Lease.acquire(open_storage(sys.argv[1]))
        print("attempt", lease.attempt, flush=True)
        sys.stdin.readline()
        if "release" in sys.argv:
            lease.release()
    except LeaseHeld as error:
        print("held", error.claim.attempt, flush=True)
"""


class Driver:
    def __init__(self, storage, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(DRIVER), storage.url, *arguments],
            env=os.environ | {"PYTHONPATH": SOURCE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self):
        return self.process.stdout.readline().strip()

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def drivers():
    started = []
    yield started
    for driver in started:
        driver.end()


def test_of_racing_processes_exactly_one_wins(storage, drivers):
    drivers += [Driver(storage) for _ in range(5)]
    for attempt in (1, 2):
        racers = drivers if attempt == 1 else [Driver(storage) for _ in range(5)]
        drivers += [racer for racer in racers if racer not in drivers]
        for racer in racers:
            racer.go()
        said = sorted(racer.says() for racer in racers)
        assert said == [f"attempt {attempt}", *[f"held {attempt}"] * 4]
        for racer in racers:
            racer.end()  # the winner, too: by SIGKILL, and the next race starts from a dead holder


def test_a_killed_holder_is_followed_at_once_and_a_stopped_one_is_not(storage, drivers):
    holder = Driver(storage)
    drivers.append(holder)
    holder.go()
    assert holder.says() == "attempt 1"
    holder.process.send_signal(signal.SIGSTOP)
    with pytest.raises(LeaseHeld):
        acquire(storage)
    holder.process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.process.pid, os.WEXITED | os.WNOWAIT)  # dead, but a zombie still
    assert acquire(storage).attempt == 2


def test_a_holder_that_ends_without_release_or_with_it_is_followed_at_once(storage, drivers):
    for attempt, arguments in enumerate((["release"], [], []), start=1):
        driver = Driver(storage, *arguments)
        drivers.append(driver)
        driver.go()
        assert driver.says() == f"attempt {attempt}"
        driver.go()
        assert driver.process.wait(timeout=60) == 0
