"""Groups of coming generations, formed while the current one trains."""

from __future__ import annotations

import threading
from collections.abc import Callable

from worldline.collective.group import CollectiveFailed, Group
from worldline.worker.orders import Meeting, Met

FormGroup = Callable[[Meeting, Callable[[], bool]], Group | None]
"""(meeting, cancelled) -> the group of those who meet, None in a world of one."""


class Meetings:
    """Connects with others ahead of time, so that a planned change of the world does not wait for it.

    Protocol: `begin(meeting)` returns at once; what comes of it is told, from another thread. Every
    generation is begun by `enter(its meeting)`, which hands its group over: the one that met before or, where
    the number is 0, one that is formed now. What met for this or an older generation otherwise is given up
    then.

    over(generation): whether that generation was abandoned.
    """

    def __init__(self, form: FormGroup, over: Callable[[int], bool], tell: Callable[[Met], None]) -> None:
        self._form = form
        self._over = over
        self._tell = tell
        self._lock = threading.Lock()
        self._groups: dict[Meeting, Group] = {}
        self._entered = 0

    def begin(self, meeting: Meeting) -> None:
        name = f"meeting-{meeting.prefix}"
        threading.Thread(target=self._meet, args=(meeting,), name=name, daemon=True).start()

    def enter(self, meeting: Meeting, cancelled: Callable[[], bool]) -> Group | None:
        """None in a world of one. Raises CollectiveFailed where they could not be connected, or did not
        meet.
        """
        with self._lock:
            self._entered = meeting.generation
            mine = self._groups.pop(meeting, None)
            old = [m for m in self._groups if m.generation <= meeting.generation]
            given_up = [self._groups.pop(m) for m in old]
        for group in given_up:
            group.abandon()
        if meeting.number == 0:
            return self._form(meeting, cancelled)
        if mine is None:
            raise CollectiveFailed(f"this rank was not at the meeting {meeting.prefix}")
        return mine

    def _meet(self, meeting: Meeting) -> None:
        try:
            group = self._form(meeting, lambda: self._over(meeting.generation))
        except Exception as error:  # whatever it was: the others must not wait
            self._tell(Met(meeting.generation, meeting.number, str(error)))
            return
        assert group is not None, "nobody meets alone"
        with self._lock:
            late = meeting.generation <= self._entered
            if not late:
                self._groups[meeting] = group
        if late:
            group.abandon()
        else:
            self._tell(Met(meeting.generation, meeting.number))
