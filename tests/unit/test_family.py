"""A worker's whole process tree ends with it, and nothing else does."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SPAWN = "subprocess.Popen([sys.executable, '-S', '-c', {code!r}], pass_fds=[alive], **{options})"
SLEEP = "import time; time.sleep(300)"


def program(code: str, **options: object) -> str:
    return SPAWN.format(code=code, options=options)


def fork(code: str) -> str:
    return f"if not os.fork():\n    {code}\n    time.sleep(300)"


CHILDREN = {
    "a program": program(SLEEP),
    "a program of a program": program(
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], close_fds=False)"
    ),
    "a program in a session of its own": program(SLEEP, start_new_session=True),
    "a program with a clean environment": program(SLEEP, env={}),
    "a fork": fork("pass"),
    "a fork in a session of its own": fork("os.setsid()"),
    "a fork of a fork in a session of its own": fork("os.setsid(); os.fork()"),
    "a fork that has forgotten its parent": fork("os.setsid(); os.fork() and os._exit(0)"),
    "one that ignores SIGTERM": fork("signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
}

WORKER = """
import os, signal, subprocess, sys, time
from worldline.worker.family import Family
alive = int(sys.argv[1])
family = Family()
{start}
print(family.token, flush=True)
sys.stdin.read()
"""
"""Waits for an end of its input, not for a signal: one that comes just before a sleep begins wakes nobody."""


class Worker:
    """A process with a family that holds a pipe open; `gone` tells whether all have let go of it."""

    def __init__(self, start: str, shell: bool = False, **environment: str) -> None:
        self._read, alive = os.pipe()
        code = WORKER.format(start=start)
        command = [sys.executable, "-c", code, str(alive)]
        if shell:  # a parent that is there as long as the worker, as the raylet is
            command = ["/bin/sh", "-c", '"$@"; true', "sh", *command]
        self.process = subprocess.Popen(
            command,
            pass_fds=[alive],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        )
        os.close(alive)
        assert self.process.stdout is not None
        self.token = self.process.stdout.readline().strip()
        assert self.token

    @property
    def pid(self) -> int:
        return int(self.token.split("-")[0])

    def gone(self, within_s: float) -> bool:
        return bool(select.select([self._read], [], [], within_s)[0])

    def guardian_gone(self, within_s: float) -> bool:
        pidfds = [os.pidfd_open(pid) for pid in self.guardians()]
        try:
            return all(select.select([fd], [], [], within_s)[0] for fd in pidfds)
        finally:
            for fd in pidfds:
                os.close(fd)

    def guardians(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if self.token.encode() in arguments:
                found.append(int(path.parent.name))
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.gone(within_s=20)
        os.close(self._read)


@pytest.fixture
def worker():
    made = []

    def make(*args, **options) -> Worker:
        made.append(Worker(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("start", CHILDREN.values(), ids=CHILDREN)
def test_a_killed_workers_child_ends(worker, start):
    subject = worker(start)
    assert len(subject.guardians()) == 1
    subject.process.kill()
    assert subject.gone(within_s=20)
    assert subject.guardian_gone(within_s=20)


def test_all_end_at_a_clean_exit_and_without_children_the_guardian_too(worker):
    for start in ("", "\n".join(CHILDREN.values())):
        subject = worker(start)
        subject.end()
        assert subject.gone(within_s=20)
        assert subject.guardian_gone(within_s=20)
        assert subject.process.wait(timeout=20) == 0


def test_the_worker_ends_with_the_process_that_started_it(worker):
    subject = worker("\n".join(CHILDREN.values()), shell=True)
    assert not subject.gone(within_s=0)
    assert subject.process.pid != subject.pid
    subject.process.kill()
    assert subject.gone(within_s=20)
    assert subject.guardian_gone(within_s=20)


def test_the_worker_ends_with_its_raylet_whoever_stands_between(worker):
    with subprocess.Popen(["sleep", "300"]) as raylet:
        subject = worker("\n".join(CHILDREN.values()), shell=True, RAY_RAYLET_PID=str(raylet.pid))
        assert not subject.gone(within_s=0)
        raylet.kill()
        assert subject.gone(within_s=20)
        assert subject.guardian_gone(within_s=20)


def test_a_raylet_that_is_gone_is_not_taken_for_another(worker):
    """Its number may belong to a younger process by now."""
    start = """
young = subprocess.Popen(["sleep", "300"])
os.environ["RAY_RAYLET_PID"] = str(young.pid)
print(Family.if_possible(), flush=True)
young.kill()"""
    subject = worker(start)
    assert subject.token == "None"


def test_nobody_else_is_killed(worker):
    other = worker("\n".join(CHILDREN.values()))
    subject = worker("")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", "print(input())"], text=True, **pipes) as bystander:
        subject.process.kill()
        assert subject.gone(within_s=20)
        assert subject.guardian_gone(within_s=20)
        assert bystander.communicate("alive\n")[0] == "alive\n"
    assert not other.gone(within_s=0)
    assert len(other.guardians()) == 1


def test_the_guardian_holds_nothing_and_cannot_be_asked_to_end(worker):
    subject = worker("")
    (pid,) = subject.guardians()
    os.kill(pid, signal.SIGTERM)
    held = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert held <= {"/dev/null", "anon_inode:[pidfd]", "anon_inode:[eventpoll]"}
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    subject.process.kill()
    assert subject.guardian_gone(within_s=20)
