"""A worker and all processes that it starts end together."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys

from worldline.process import start_time
from worldline.worker import guardian

START_S = 30.0
RAYLET = "RAY_RAYLET_PID"
"""Ray tells its workers by this variable; where it is not set, the parent counts as the raylet."""

logger = logging.getLogger(__name__)


class Family:
    """This process and its descendants, from now on. Make it before anything of the job's is imported.

    When this process ends, however it does, its descendants are killed, within about a second; and when the
    raylet that started it ends, so does this process. A guardian outside sees to it (`guardian` says what it
    finds and what it cannot). Ray does a part of this itself: since 2.57 a raylet kills a dead worker's
    process group, if it lives, and who left the group is spared.

    Keep the object: without it, forked children are not known any more. Raises OSError where the system has
    no pidfds (Linux before 5.3, other systems), TimeoutExpired or CalledProcessError if the guardian does not
    start.
    """

    def __init__(self) -> None:
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        self.token = f"{os.getpid()}-{os.urandom(8).hex()}"
        self._mapping = _named_mapping(guardian.mapping(self.token))
        _start_guardian(self.token)
        os.environ[guardian.MARK] = self.token

    @classmethod
    def if_possible(cls) -> Family | None:
        """None, and a line in the worker's log, where there can be no guardian: Ray does what it does."""
        try:
            return cls()
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            logger.warning("what this worker starts may outlive it: %s: %s", type(error).__name__, error)
            return None


def _named_mapping(name: str) -> mmap.mmap:
    """A page that forked processes inherit, and `/proc/PID/maps` shows by this name."""
    file = os.memfd_create(name)
    try:
        os.ftruncate(file, mmap.PAGESIZE)
        return mmap.mmap(file, mmap.PAGESIZE)
    finally:
        os.close(file)


def _start_guardian(token: str) -> None:
    """Returns when the guardian watches."""
    # The raylet need not be the parent: `uv run`, which a job may have its workers started by, stays between.
    raylet = int(os.environ.get(RAYLET) or os.getppid())
    ends = [os.pidfd_open(os.getpid()), os.pidfd_open(raylet)]
    since = start_time(raylet)
    if since is None or since > (start_time(os.getpid()) or 0):  # or its number belongs to another by now
        raise OSError("the raylet is gone, or whatever started this worker")
    arguments = [str(end) for end in ends] + [str(os.getpid()), token]
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", guardian.__file__, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            pass_fds=ends,
            start_new_session=True,
            timeout=START_S,
            check=True,
        )
    finally:
        for end in ends:
            os.close(end)
