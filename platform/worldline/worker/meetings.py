"""Groups of coming generations, formed while the current one trains."""

from __future__ import annotations

import threading
from collections.abc import Callable

from worldline.collective.group import Abandoned, CollectiveFailed, Group
from worldline.worker.orders import Meeting, Met

FormGroup = Callable[[Meeting, Callable[[], bool]], Group | None]
"""(meeting, cancelled) -> the group of those who meet, None in a world of one."""


class Meetings:
    """Connects with others ahead of time, so that a planned change of the world does not wait for it.

    Protocol: `begin(meeting)` returns at once; what comes of it is told, from another thread. `take(meeting)`
    hands the group over to the generation that begins with it, once; all others are given up then.

    over(generation): whether that generation was abandoned.
    """

    def __init__(self, form: FormGroup, over: Callable[[int], bool], tell: Callable[[Met], None]) -> None:
        self._form = form
        self._over = over
        self._tell = tell
        self._lock = threading.Lock()
        self._groups: dict[Meeting, Group] = {}

    def begin(self, meeting: Meeting) -> None:
        name = f"meeting-{meeting.prefix}"
        threading.Thread(target=self._meet, args=(meeting,), name=name, daemon=True).start()

    def take(self, meeting: Meeting) -> Group:
        """Raises CollectiveFailed if they did not meet."""
        with self._lock:
            groups, self._groups = self._groups, {}
        group = groups.pop(meeting, None)
        for other in groups.values():
            other.abandon()
        if group is None:
            raise CollectiveFailed(f"this rank was not at the meeting {meeting.prefix}")
        return group

    def _meet(self, meeting: Meeting) -> None:
        try:
            group = self._form(meeting, lambda: self._over(meeting.generation))
        except (CollectiveFailed, Abandoned) as error:
            self._tell(Met(meeting.generation, meeting.number, str(error)))
            return
        assert group is not None
        with self._lock:
            self._groups[meeting] = group
        self._tell(Met(meeting.generation, meeting.number))
