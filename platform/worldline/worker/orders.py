"""What controller and workers say to each other. Small values; no tensors, no logic."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from worldline.checkpoint.save import PartInfo
from worldline.events import EvaluationRecord, StepRecord
from worldline.world import Position, ShardRange


@dataclass(frozen=True)
class Setup:
    """All that a new worker needs to become a standby: built, checked, without a rank.

    job: the job as plain data. search: folders for the task's and the transform's modules. storage: the run's
    own storage URL. manifest, validation_manifest: as JSON. feeder: handle of the run's Ray Data feeder, if
    there is one. store_host, store_port: rendezvous in the controller's process.
    """

    job: dict[str, Any]
    search: tuple[str, ...]
    storage: str
    manifest: str
    validation_manifest: str | None
    transform_digest: str
    validation_transform_digest: str
    feeder: Any
    store_host: str
    store_port: int
    attempt: int
    last_step: int


@dataclass(frozen=True)
class Hello:
    """A standby introduces itself."""

    pid: int
    node: str
    ip: str
    numeric_fingerprint: dict[str, str]


@dataclass(frozen=True)
class Meeting:
    """A rank's part in connecting the `size` members of a generation.

    number: 0 if they meet when the generation begins; else they met before, while an older one trained.
    """

    generation: int
    number: int
    rank: int
    size: int

    @property
    def prefix(self) -> str:
        """Where they meet in the store; nobody else ever does."""
        return f"generation-{self.generation}-{self.number}"

    @staticmethod
    def generation_of(key: str) -> int | None:
        """Of a key in the store; None if it is not of a meeting."""
        found = re.match(r"generation-(\d+)-", key.removeprefix("/"))
        return int(found[1]) if found else None


@dataclass(frozen=True)
class Invitation:
    """To prepare for a generation while an older one trains: connect, and read the rows of `shards` from
    about
    `step` on.
    """

    meeting: Meeting
    shards: ShardRange
    step: int


@dataclass(frozen=True)
class GenerationOrder:
    """One place in a new generation; every member gets the same but for `rank`.

    position: where the line goes on. sources: ranks that hold its state; receivers: ranks that get it from
    them. restore: checkpoint that `sources` read first, if nobody holds it. verify_state: whether all compare
    checksums of their state before the first step. checkpoint: write one before the first step. met: number
    of the meeting at which these members have connected already, 0 if they have not.
    """

    generation: int
    rank: int
    ranges: tuple[ShardRange, ...]
    position: Position
    sources: tuple[int, ...]
    receivers: tuple[int, ...] = ()
    restore: str | None = None
    verify_state: bool = False
    checkpoint: bool = False
    met: int = 0

    @property
    def meeting(self) -> Meeting:
        return Meeting(self.generation, self.met, self.rank, len(self.ranges))


class EndKind(StrEnum):
    FINISHED = "finished"  # the last step is completed
    HALTED = "halted"  # stopped at a step border on order
    BROKEN = "broken"  # a collective failed or was abandoned
    TASK_ERROR = "task_error"  # the user's code raised
    NONFINITE = "nonfinite"  # the combined loss or gradient is not finite
    DISAGREED = "disagreed"  # members differ in state, plan or numerics
    DATA_ERROR = "data_error"  # rows could not be read
    RESTORE_FAILED = "restore_failed"  # the checkpoint could not be loaded


@dataclass(frozen=True)
class GenerationEnd:
    """How a generation ended for one worker. position None: its state is of no step any more."""

    kind: EndKind
    generation: int
    position: Position | None
    reason: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class GenerationFormed:
    """The worker is about to compute its first step of the generation; that all agree shows at its end.

    form_s: until it was connected; transfer_s: from then on, with the others' state if it had none.
    """

    generation: int
    form_s: float
    transfer_s: float


@dataclass(frozen=True)
class Met:
    """The worker is connected with the others of a coming generation, or `error` says why not."""

    generation: int
    number: int
    error: str = ""


@dataclass(frozen=True)
class StateDigest:
    """The digest of the state after `step`, from every worker, to be compared."""

    generation: int
    step: int
    digest: str


@dataclass(frozen=True)
class CheckpointPart:
    """One worker's part of the checkpoint of `position`, written or failed. meta: from rank 0's state."""

    generation: int
    rank: int
    parts: int
    position: Position
    state_digest: str
    meta: dict[str, Any]
    part: PartInfo | None
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Notice:
    """The worker is to leave: its process ends soon. lead_s: how long it may be expected to live from now."""

    reason: str
    lead_s: float


Report = GenerationFormed | Met | StateDigest | CheckpointPart | StepRecord | EvaluationRecord | Notice


@dataclass(frozen=True)
class Reports:
    """What a worker has to say since the last call, and how far it is."""

    items: tuple[Report, ...]
    position: Position | None
    phase: str
