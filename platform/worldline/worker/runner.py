"""One worker through one generation: form, catch up, agree, train, end."""

from __future__ import annotations

import threading
import time
import traceback
from dataclasses import dataclass

from worldline.checkpoint.manifest import CheckpointError, CheckpointManifest
from worldline.checkpoint.restore import read
from worldline.collective.group import Abandoned, CollectiveFailed, Group
from worldline.data.loader import Loader, ReadCancelled
from worldline.data.manifest import DataError
from worldline.health.condition import Condition, capture
from worldline.storage import Storage, StorageError
from worldline.worker.agree import Agreement, Disagreed
from worldline.worker.checksum import checksum
from worldline.worker.engine import Engine, NonFinite, TornState
from worldline.worker.evaluate import Evaluator
from worldline.worker.mailbox import Mailbox
from worldline.worker.meetings import FormGroup, Meetings
from worldline.worker.member import Membership
from worldline.worker.orders import (
    EndKind,
    GenerationEnd,
    GenerationFormed,
    GenerationOrder,
    Invitation,
    StateDigest,
)
from worldline.worker.parts import Parts
from worldline.worker.state import StateError, TrainState, digest
from worldline.worker.transfer import transfer
from worldline.world import Position

STATE = "state checksum"


@dataclass(frozen=True)
class Schedule:
    """When a worker does more than step. fingerprints: what all members must share, name -> value."""

    last_step: int
    digest_every: int
    checkpoint_every: int
    evaluate_every: int | None
    attempt: int
    fingerprints: dict[str, str]

    def digest_due(self, step: int) -> bool:
        return step % self.digest_every == 0 or self.checkpoint_due(step) or step == self.last_step

    def checkpoint_due(self, step: int) -> bool:
        return step > 0 and (step % self.checkpoint_every == 0 or step == self.last_step)

    def evaluation_due(self, position: Position) -> bool:
        if self.evaluate_every is None or position.evaluated or position.step == 0:
            return False
        return position.step % self.evaluate_every == 0 or position.step == self.last_step


class Runner:
    """Executes generation orders on the training thread.

    Protocol: `run(order)` returns how the generation ended, never raises for anything foreseen. From
    another thread, `meet(i)` prepares for a coming generation ahead of its order; `halt(g)` makes
    generation g stop at the next step border, all ranks at the same one; `abandon(g)` makes every wait of
    generations up to g end at once. Both are remembered, so an order that comes late finds itself
    cancelled. `condition(g)` tells what the training thread does, even if it is stuck. After any end the
    worker is at `position`, whole, or has no position.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        evaluator: Evaluator | None,
        state: TrainState,
        storage: Storage,
        schedule: Schedule,
        form: FormGroup,
        mailbox: Mailbox,
    ) -> None:
        self._engine = engine
        self._loader = loader
        self._evaluator = evaluator
        self._state = state
        self._storage = storage
        self._schedule = schedule
        self._mailbox = mailbox
        self._generation = 0
        self._group: Group | None = None
        self._thread_id = 0
        self._halted = 0
        self._abandoned = 0
        self._meetings = Meetings(form, lambda generation: self._abandoned >= generation, mailbox.post)
        self._position: Position | None = Position(0)
        self._agreement: Agreement | None = None
        self._received = False
        self._parts = Parts(state, storage, schedule.attempt, mailbox)

    @property
    def position(self) -> Position | None:
        return self._position

    @property
    def phase(self) -> str:
        return self._engine.phase

    def meet(self, invitation: Invitation) -> None:
        if invitation.meeting.generation > self._generation:
            self._meetings.begin(invitation.meeting)
            self._loader.expect(invitation.shards.shards, invitation.step)

    def halt(self, generation: int) -> None:
        self._halted = max(self._halted, generation)

    def abandon(self, generation: int) -> None:
        self._abandoned = max(self._abandoned, generation)

    def condition(self, generation: int) -> Condition:
        """Of a generation that is not the current one it says only that."""
        current = self._generation
        phase, since = self._engine.doing
        if phase == "evaluate" and self._evaluator is not None and self._evaluator.waits_for_rows:
            phase = "data"
        return capture(
            self._thread_id,
            self._group if current == generation else None,
            generation=current,
            step=self._engine.completed,
            phase=phase,
            since=since,
            now=time.monotonic(),
        )

    def close(self, timeout_s: float) -> bool:
        return self._parts.close(timeout_s)

    def run(self, order: GenerationOrder) -> GenerationEnd:
        try:
            return GenerationEnd(self._train(order), order.generation, self._position)
        except (CollectiveFailed, Abandoned, ReadCancelled) as error:
            return self._end(EndKind.BROKEN, order, error)
        except NonFinite as error:
            return self._end(EndKind.NONFINITE, order, error)
        except (Disagreed, StateError) as error:
            return self._end(EndKind.DISAGREED, order, error)
        except (CheckpointError, StorageError) as error:
            return self._end(EndKind.RESTORE_FAILED, order, error)
        except DataError as error:
            return self._end(EndKind.DATA_ERROR, order, error)
        except TornState as error:
            self._position = None
            return self._end(EndKind.TASK_ERROR, order, error)
        except (Exception, SystemExit) as error:  # Ray would take sys.exit() for the loss of a node
            return self._end(EndKind.TASK_ERROR, order, error)
        finally:
            self._engine.phase = "idle"

    def write_checkpoint(self, generation: int, part: int, parts: int) -> None:
        """Write this worker's part of a checkpoint of its position; the result comes as a report."""
        if self._position is None:
            raise RuntimeError("this worker has no state to write")
        self._parts.write(self._position, generation, part, parts)

    def _train(self, order: GenerationOrder) -> EndKind:
        generation = order.generation

        def cancelled() -> bool:
            return self._abandoned >= generation

        self._group, self._generation = None, generation
        self._thread_id = threading.get_ident()
        self._agreement, self._received = None, False
        self._engine.phase = "form"
        self._mailbox.narrate(order.rank == 0)
        # The rows come while the group forms and the state travels.
        self._loader.focus(order.ranges[order.rank].shards, order.position.step + 1)
        began = time.perf_counter()
        group = self._group = self._meetings.enter(order.meeting, cancelled)
        formed = time.perf_counter()
        try:
            agreement = self._agreement = self._catch_up(order, group)
            member = Membership(generation, self._schedule.attempt, order.rank, order.ranges, group)
            self._engine.join(member, cancelled, agreement)
            if self._evaluator is not None:
                self._evaluator.join(member, cancelled)
            caught_up = time.perf_counter()
            if order.rank == 0:  # one word is enough, of thousands as well
                self._mailbox.post(GenerationFormed(generation, formed - began, caught_up - formed))
            return self._steps(order, agreement)
        finally:
            if self._agreement is not None and not self._agreement.reached():
                self._agreement = None  # a group that was left is asked nothing more
            if group is not None:
                group.abandon()

    def _catch_up(self, order: GenerationOrder, group: Group | None) -> Agreement:
        """Bring every member to the order's position; that all are the same is being agreed on."""
        if order.restore is not None and order.rank in order.sources:
            self._restore(order.restore)
        claims = dict(self._schedule.fingerprints)
        if order.receivers and group is not None:
            self._transfer(order, group, claims)
        if order.verify_state and order.rank in order.sources:
            claims[STATE] = self._checksum()
        if self._position is not None and self._position.step == order.position.step:
            self._take(order.position)
        claims["step"] = str(self._position and self._position.step)
        agreement = Agreement(group, claims)
        if self._position is None or self._position.step != order.position.step:
            agreement.finish()
            raise Disagreed(
                f"no member holds the state of step {order.position.step}, where the line goes on"
            )
        if order.checkpoint:
            agreement.finish()
            self.write_checkpoint(order.generation, order.rank, len(order.ranges))
        return agreement

    def _transfer(self, order: GenerationOrder, group: Group, claims: dict[str, str]) -> None:
        """Send or receive the state; those who receive it and the first who sends it claim its checksum."""
        is_source = order.rank in order.sources
        tensors = self._state.tensors() if is_source else {}
        meta = self._state.meta() if is_source else {}

        def meanwhile() -> None:
            if order.rank == order.sources[0]:
                claims[STATE] = checksum(tensors, meta)

        received = transfer(group, order.sources, order.receivers, tensors, meta, meanwhile)
        if received is not None:
            self._position, self._received = None, True
            self._state.load(*received)
            self._take(order.position)
            claims[STATE] = self._checksum()

    def _restore(self, key: str) -> None:
        manifest = CheckpointManifest.from_json(self._storage.get(f"{key}/manifest.json"))
        tensors = read(self._storage, manifest)
        self._position = None
        self._state.load(tensors, manifest.meta)
        found = digest(self._state.tensors(), self._state.meta())
        if found != manifest.state_digest:
            raise CheckpointError(f"{key}: the state loaded has digest {found}, not {manifest.state_digest}")
        self._take(manifest.position)

    def _take(self, position: Position) -> None:
        self._position = position
        self._parts.forget()
        self._engine.completed = position.step
        self._mailbox.forget_after(position.step)

    def _steps(self, order: GenerationOrder, agreement: Agreement) -> EndKind:
        schedule = self._schedule
        halted = False
        while True:
            assert self._position is not None
            last = self._position.step >= schedule.last_step
            if halted and not last:
                return EndKind.HALTED
            if schedule.evaluation_due(self._position):
                agreement.finish()
                self._evaluate()
            elif last:
                agreement.finish()
                return EndKind.FINISHED
            else:
                halted = self._step(order)

    def _step(self, order: GenerationOrder) -> bool:
        completed = self._engine.step(halt=self._halted >= order.generation, digest=self._digest_if_due)
        record = completed.record
        self._position = Position(record.step)
        self._mailbox.post_step(record)
        if record.state_digest is not None:
            self._mailbox.post(StateDigest(order.generation, record.step, record.state_digest))
        if self._schedule.checkpoint_due(record.step):
            self.write_checkpoint(order.generation, order.rank, len(order.ranges))
        self._engine.after_step()
        return completed.halt

    def _checksum(self) -> str:
        return checksum(self._state.tensors(), self._state.meta())

    def _digest_if_due(self, step: int) -> str | None:
        return self._parts.digest(step) if self._schedule.digest_due(step) else None

    def _evaluate(self) -> None:
        assert self._evaluator is not None
        assert self._position is not None
        self._engine.phase = "evaluate"
        record = self._evaluator.run(self._position.step)
        self._position = Position(self._position.step, evaluated=True)
        self._mailbox.post(record)

    def _end(self, kind: EndKind, order: GenerationOrder, error: BaseException) -> GenerationEnd:
        if self._received and self._agreement is None:
            self._position = None  # nobody has confirmed what was received
        text = "".join(traceback.format_exception(error)) if kind is EndKind.TASK_ERROR else ""
        return GenerationEnd(
            kind, order.generation, self._position, f"{type(error).__name__}: {error}"[:2000], text[-20_000:]
        )
