"""Events as sentences for whoever watches. `events.jsonl` keeps them as they are. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from worldline.events import Event, EventKind
from worldline.tracking.numbers import workers


class Tone(Enum):
    GOOD = auto()
    PLAIN = auto()
    BAD = auto()


@dataclass(frozen=True)
class Sentence:
    """continues: it goes on with the sentence before, as what was done about what happened."""

    text: str
    tone: Tone = Tone.PLAIN
    continues: bool = False


class Narrator:
    """Tells the story of one attempt; keeps of it what the next sentence depends on.

    Protocol: `tell` of each event, in order, with the largest world the job allows. What needs no words,
    because a line or number says it anyhow, gives None: requests and readiness before the first step, the
    ends (the summary follows), a request after another one, and one in the middle of a recovery, whose own
    sentence tells of it.
    """

    def __init__(self) -> None:
        self._trains = False
        self._broken = False
        self._asked = False  # the last event was a request
        self._replacing = False  # there was one since the generation broke

    def tell(self, event: Event, most: int) -> Sentence | None:
        asked, self._asked = self._asked, event.kind is EventKind.WORKER_REQUESTED
        match event.kind:
            case EventKind.ATTEMPT_STARTED:
                self._trains = self._broken = self._replacing = False
            case EventKind.GENERATION_FORMED:
                return self._formed(event, most)
            case EventKind.WORKER_LOST:
                self._broken |= event.world_after < event.world_before
                return Sentence(_who_is_lost(event.reason), Tone.BAD)
            case EventKind.DRAINING:
                return Sentence(event.reason, Tone.BAD)
            case EventKind.WORKER_RELEASED if self._trains:
                return Sentence(f"{_names(event)} left: {event.reason}")
            case EventKind.WORKER_REQUESTED if self._broken:
                self._replacing = True
            case EventKind.WORKER_REQUESTED if self._trains and not asked:
                return Sentence("asking Ray for another worker")
            case EventKind.WORKER_START_FAILED:
                return Sentence(f"worker {_names(event)} could not start: {event.reason}", Tone.BAD)
            case EventKind.HANG:
                self._broken = True
                return Sentence(f"no step{_took(' for', event)}: {event.reason}", Tone.BAD)
            case EventKind.COLLECTIVE_FAILED:
                self._broken = True
                return Sentence(f"the workers lost touch with each other: {event.reason}", Tone.BAD)
            case EventKind.TASK_ERROR:
                self._broken = True
                return Sentence(f"the job's code failed on {event.reason}", Tone.BAD)
            case EventKind.OUT_OF_MEMORY:
                return Sentence(event.reason, Tone.BAD)
            case EventKind.NONFINITE:
                return Sentence(event.reason, Tone.BAD)
            case EventKind.WAITING:
                return Sentence(f"waiting: {event.reason}", Tone.BAD)
            case EventKind.CHECKPOINT_SAVED:
                return Sentence(f"checkpoint of {event.reason} saved{_took(' in', event)}")
            case EventKind.CHECKPOINT_FAILED:
                return Sentence(f"no checkpoint of {event.reason}", Tone.BAD)
            case EventKind.CHECKPOINT_PASSED_OVER:
                return Sentence(f"checkpoint passed over: {event.reason}", Tone.BAD)
            case EventKind.RESTORED:
                return Sentence(f"state restored from {event.reason}")
            case EventKind.DEGRADED:
                return Sentence(f"note: {event.reason}")
            case EventKind.STOP_REQUESTED:
                return Sentence(f"stopping: {event.reason}")
            case EventKind.RESIZED:
                return Sentence(event.reason)
            case EventKind.FAULT_INJECTED:
                return Sentence(f"fault script: {event.reason}")
        return None

    def _formed(self, event: Event, most: int) -> Sentence:
        first, broken, replacing = not self._trains, self._broken, self._replacing
        self._trains, self._broken, self._replacing = True, False, False
        if first:
            begin = "starts" if event.world_after == 1 else "start"
            return Sentence(f"{workers(event.world_after, most)} {begin} training", Tone.GOOD)
        goes_on = f"going on with {event.world_after} of {most}{_took(' after', event)}"
        joined = event.world_after - event.world_before
        if joined > 0:
            who = "a worker joined" if joined == 1 else f"{joined} workers joined"
            return Sentence(f"{who}, {goes_on}", Tone.GOOD, continues=broken)
        meanwhile = " while another worker starts" if replacing else ""
        return Sentence(goes_on + meanwhile, Tone.GOOD, continues=broken)


def _who_is_lost(reason: str) -> str:
    """Ray's own words for a death say nothing that "is gone" does not."""
    who, gone, _ = reason.partition(" is gone:")
    return f"{who} is gone" if gone else reason


def _names(event: Event) -> str:
    return " ".join(event.workers)


def _took(word: str, event: Event) -> str:
    return "" if event.seconds is None else f"{word} {event.seconds:.2f} s"
