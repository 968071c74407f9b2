"""One driver a run.

Every attempt has a file `lease/attempt-000007.json` in the run's storage. It comes into being by
`Storage.create`, which of several lets one through, and afterwards only its owner writes it: to count up
`renewed` while it lives, to set `released` when it is done. The attempt with the highest number holds the
run; so taking over is one create of the next number, which at the same moment fences the one before. Files of
past attempts stay: they are the count.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum

from worldline.process import Liveness, ProcessId
from worldline.storage import Storage, StorageError

log = logging.getLogger(__name__)

TTL_S = 30.0


class LeaseHeld(Exception):
    """Another driver has the run. claim: what that driver says of itself."""

    def __init__(self, message: str, claim: Claim) -> None:
        super().__init__(message, claim)
        self.claim = claim

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Claim:
    """The content of one attempt's file. ttl_s: after so long without a renewal the owner counts as dead."""

    attempt: int
    owner: ProcessId
    ttl_s: float
    renewed: int = 0
    released: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(data: bytes) -> Claim:
        """Raises ValueError."""
        try:
            tree = json.loads(data)
            return Claim(**(tree | {"owner": ProcessId(**tree["owner"])}))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"not a claim: {error}") from error


@dataclass(frozen=True)
class Sighting:
    """What an acquirer saw first, and the time after that by its own monotonic clock."""

    attempt: int
    renewed: int
    time: float


class Verdict(Enum):
    TAKE = "take"
    HELD = "held"
    WATCH = "watch"  # its owner may be dead: look again until it has moved or its time is over


def decide(claim: Claim | None, owner: Liveness, first: Sighting | None, now: float) -> Verdict:
    """Whether the run can be taken from `claim`, the newest there is.

    first: what was seen when the watching began, None before. now: before `claim` was read, by the clock of
    `first`; no other machine's clock plays a part.
    """
    if claim is None or claim.released or owner is Liveness.GONE:
        return Verdict.TAKE
    if owner is Liveness.ALIVE:
        return Verdict.HELD
    if first is None:
        return Verdict.WATCH
    if (claim.attempt, claim.renewed) != (first.attempt, first.renewed):
        return Verdict.HELD
    return Verdict.TAKE if now - first.time >= claim.ttl_s else Verdict.WATCH


class Lease:
    """A run held by this process, as attempt number `attempt`.

    `acquire`, then `start` keeps it in a thread; or call `renew` at least every third of the ttl. Once
    `renew` says False the run belongs to another driver and this one must write nothing more; ask it before
    what must not be written twice, such as the commit of a checkpoint. `release` at the end lets the next
    driver in at once.
    """

    def __init__(self, storage: Storage, claim: Claim) -> None:
        self._storage = storage
        self._claim = claim
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def attempt(self) -> int:
        return self._claim.attempt

    @classmethod
    def acquire(
        cls,
        storage: Storage,
        *,
        ttl_s: float = TTL_S,
        process: ProcessId | None = None,
        notify: Callable[[str], None] = log.info,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Lease:
        """Take the run in `storage`. Raises LeaseHeld, at the latest after the holder's ttl, and
        StorageError.

        At once if nobody holds it or the holder was a process of this machine that is gone; otherwise the
        holder is watched for its ttl and must not move.
        """
        process = process or ProcessId.current()
        first: Sighting | None = None
        while True:
            now = clock()  # before the look: however long that takes, the owner had its ttl
            claim = _newest(storage)
            owner = claim.owner.liveness(process) if claim else Liveness.GONE
            verdict = decide(claim, owner, first, now)
            if claim is None or verdict is Verdict.TAKE:
                mine = Claim(claim.attempt + 1 if claim else 1, process, ttl_s)
                if storage.create(_key(mine.attempt), mine.to_json()):
                    return cls(storage, mine)
                continue  # somebody was faster: look at that one
            if verdict is Verdict.HELD:
                raise LeaseHeld(_held_message(storage, claim, owner), claim)
            if first is None:
                first = Sighting(claim.attempt, claim.renewed, clock())
                notify(
                    f"{_who(claim)} held run {storage.url} last, and only silence can tell that it is dead: "
                    f"waiting up to {claim.ttl_s:g} s"
                )
            sleep(min(claim.ttl_s / 10, max(first.time + claim.ttl_s - clock(), 0)))

    def start(self, on_lost: Callable[[str], None]) -> None:
        """Renew every third of the ttl in a daemon thread; `on_lost` is called from it, once, with a
        message."""

        def keep() -> None:
            while not self._stop.wait(self._claim.ttl_s / 3):
                try:
                    if not self.renew():
                        on_lost(
                            f"another driver has taken run {self._storage.url} from attempt {self.attempt}: "
                            f"it saw no sign of life for {self._claim.ttl_s:g} s"
                        )
                        return
                except StorageError as error:
                    # Not lost yet: whoever takes over says so in the storage, and then this sees it.
                    log.warning("the lease of attempt %d is not renewed: %s", self.attempt, error)

        self._thread = threading.Thread(target=keep, name="lease", daemon=True)
        self._thread.start()

    def renew(self) -> bool:
        """Show that this driver lives; False if another has taken the run. Raises StorageError."""
        with self._writing:
            if max(_attempts(self._storage), default=0) != self.attempt:
                return False
            self._write(replace(self._claim, renewed=self._claim.renewed + 1))
            return True

    def release(self) -> None:
        """Let the run go, once. A failure of the storage is logged: the lease then ends with its time."""
        if self._claim.released:
            return
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=self._claim.ttl_s)
        try:
            with self._writing:
                self._write(replace(self._claim, released=True))
        except StorageError as error:
            log.warning("the lease of attempt %d is not released: %s", self.attempt, error)

    def _write(self, claim: Claim) -> None:
        self._storage.put(_key(claim.attempt), claim.to_json())
        self._claim = claim


def _key(attempt: int) -> str:
    return f"lease/attempt-{attempt:06d}.json"


def _attempts(storage: Storage) -> list[int]:
    keys = storage.list("lease/")
    return [int(match[1]) for key in keys if (match := re.fullmatch(r"lease/attempt-(\d+)\.json", key))]


def _newest(storage: Storage) -> Claim | None:
    attempts = _attempts(storage)
    if not attempts:
        return None
    try:
        return replace(Claim.from_json(storage.get(_key(max(attempts)))), attempt=max(attempts))
    except ValueError:
        # Damaged. An owner that lives writes it anew, so it can be watched like any other.
        return Claim(max(attempts), ProcessId("unknown", "", 0, 0), TTL_S, renewed=-1)


def _who(claim: Claim) -> str:
    return f"attempt {claim.attempt}, process {claim.owner.pid} on host {claim.owner.host},"


def _held_message(storage: Storage, claim: Claim, owner: Liveness) -> str:
    where = "here" if owner is Liveness.ALIVE else "elsewhere"
    return (
        f"run {storage.url} is being trained {where}: {_who(claim)} holds it. Follow it with "
        f"`worldline watch`, end it with SIGTERM (kill {claim.owner.pid}), or give this run another name"
    )
