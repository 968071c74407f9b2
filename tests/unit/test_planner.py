"""Membership and planner together, through any history, in a simulated cluster."""

import math
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worldline.collective.operations import Operation
from worldline.control import places, planner
from worldline.control.decisions import (
    Abandon,
    Condemn,
    Expel,
    Form,
    Halt,
    Inquire,
    Limits,
    Meet,
    Over,
    Proceed,
    Release,
    Save,
    Wait,
)
from worldline.control.member import Drain, MemberState, Suspicion
from worldline.control.membership import START, Gathering, Membership
from worldline.control.selection import last_call
from worldline.health.condition import Condition
from worldline.worker.orders import EndKind, GenerationEnd, Hello, Met
from worldline.world import Position

HELLO = Hello(1, "node", "10.0.0.1", {})
LIMITS = Limits(min=2, max=3, standby=0, num_shards=8, start_s=60, timeout_s=30)
LAST_STEP = 12
PATIENCE_S = 20.0
WAITS = Operation(0, 1, "all_to_all", "bucket 0", 64)


@dataclass
class Worker:
    """What a worker really is, whether or not the membership knows it. told: to abandon; halt: to halt."""

    position: Position | None = START
    fresh: bool = True
    frozen: bool = False
    busy: bool = False
    told: bool = False
    halt: bool = False


class History(RuleBasedStateMachine):
    """A cluster in which anything happens at any time, and a controller that always does what it is told."""

    @initialize(minimum=st.integers(1, 3), more=st.integers(0, 3), standby=st.integers(0, 2))
    def begin(self, minimum, more, standby):
        self.limits = replace(LIMITS, min=minimum, max=minimum + more, standby=standby)
        self.membership = Membership()
        self.workers = {}
        self.count = 0
        self.now = 0.0
        self.durable = -1
        self.stopping = False
        self.below_min_since = None
        self.caught_up = False
        self.over = False
        self.until = None
        self.drive()

    # What happens

    def teardown(self):
        """A stop always ends, whoever is frozen or busy, and by the deadlines alone."""
        if not hasattr(self, "limits"):
            return
        self.stopping = True
        self.drive()
        for _ in range(20):
            if self.over:
                return
            assert self.until is not None, "a wait without a deadline"
            self.now = self.until
            self.drive()
        raise AssertionError("the stop does not end")

    @rule(seconds=st.floats(0.01, 40))
    def time_passes(self, seconds):
        self.now += seconds
        self.drive()

    @precondition(lambda self: self.membership.in_state(MemberState.REQUESTED))
    @rule(data=st.data())
    def one_gets_a_place(self, data):
        waiting = [m.id for m in self.membership.in_state(MemberState.REQUESTED)]
        self.membership = self.membership.arrived(
            data.draw(st.sampled_from(waiting)), 1, "node", "10.0.0.1", self.now
        )
        self.drive()

    @precondition(lambda self: self.membership.members)
    @rule(data=st.data(), lead=st.floats(0.1, 60))
    def some_shall_leave(self, data, lead):
        ids = data.draw(st.sets(st.sampled_from(sorted(self.membership.members)), min_size=1))
        self.membership = self.membership.draining(
            sorted(ids), Drain(self.now, self.now + lead, "its node goes")
        )
        self.drive()

    @precondition(lambda self: self.membership.members)
    @rule(data=st.data(), seconds=st.floats(0, 3))
    def one_is_suspected(self, data, seconds):
        """Of a thing that may be so or not."""
        id = data.draw(st.sampled_from(sorted(self.membership.members)))
        suspicion = Suspicion(self.now + seconds, "is not to be heard", silent=data.draw(st.booleans()))
        self.membership = self.membership.suspected(id, suspicion)
        self.drive()

    @precondition(lambda self: any(m.suspicion for m in self.membership.members.values()))
    @rule()
    def all_are_heard_again(self):
        for id in self.membership.members:
            self.membership = self.membership.cleared(id)
        self.drive()

    @rule(most=st.integers(0, 5))
    def the_world_is_resized(self, most):
        self.limits = replace(self.limits, max=self.limits.min + most)
        self.drive()

    @precondition(lambda self: self.requested())
    @rule()
    def all_become_ready(self):
        for id in self.requested():
            self.membership = self.membership.ready(id, HELLO, self.now)
        self.drive()

    @precondition(lambda self: self.requested())
    @rule(data=st.data(), starts=st.booleans())
    def one_becomes_ready_or_not(self, data, starts):
        id = data.draw(st.sampled_from(self.requested()))
        if starts:
            self.membership = self.membership.ready(id, HELLO, self.now)
        else:
            self.leave(id)
        self.drive()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def a_worker_dies(self, data):
        self.leave(data.draw(st.sampled_from(sorted(self.workers))))
        self.drive()

    @precondition(lambda self: self.membership.training and not self.caught_up)
    @rule()
    def all_who_have_the_state_die_before_they_give_it(self):
        for m in self.membership.training:
            if not self.workers[m.id].fresh:
                self.leave(m.id)
        self.drive()

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), busy=st.booleans())
    def a_worker_is_held_up(self, data, busy):
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        worker.busy, worker.frozen = busy, not busy

    @precondition(lambda self: self.membership.gathering)
    @rule(data=st.data(), error=st.sampled_from(["", "", "", "a peer did not come"]), late=st.integers(0, 1))
    def somebody_is_connected(self, data, error, late):
        """Or is not; or says it of an older meeting."""
        gathering = self.membership.gathering
        id = data.draw(st.sampled_from(gathering.ids))
        said = Met(self.membership.generation + 1, gathering.number - late, error)
        self.membership = self.membership.met(id, said)
        self.drive()

    @precondition(lambda self: self.able())
    @rule(save=st.booleans())
    def the_world_trains(self, save):
        """All complete a step, or end in order if they were told to or are done."""
        self.catch_up()
        members = self.membership.training
        halt = any(self.workers[m.id].halt for m in members)
        for m in members:
            worker = self.workers[m.id]
            if worker.position.step < LAST_STEP:
                worker.position, worker.fresh = Position(worker.position.step + 1), False
        step = self.workers[members[0].id].position.step
        if save:
            self.durable = max(self.durable, step)
        done = step >= LAST_STEP
        if halt or done:
            for m in members:
                self.end(m.id, EndKind.FINISHED if done else EndKind.HALTED)
        self.drive()

    @precondition(lambda self: self.able())
    @rule(data=st.data())
    def a_step_breaks(self, data):
        """Some have completed it, the others not; some of them say so at once, some only when asked."""
        self.catch_up()
        for m in self.membership.training:
            worker = self.workers[m.id]
            if data.draw(st.booleans()) and worker.position.step < LAST_STEP:
                worker.position, worker.fresh = Position(worker.position.step + 1), False
        for m in self.membership.training:
            if data.draw(st.booleans()):
                self.end(m.id, EndKind.BROKEN)
        self.drive()

    @precondition(lambda self: self.able())
    @rule(data=st.data())
    def an_update_fails(self, data):
        self.catch_up()
        id = data.draw(st.sampled_from([m.id for m in self.membership.training]))
        self.workers[id].position, self.workers[id].fresh = None, False
        self.end(id, EndKind.TASK_ERROR)
        self.drive()

    @precondition(lambda self: self.count > 6)
    @rule()
    def a_stop_is_requested(self):
        self.stopping = True
        self.drive()

    # The simulated cluster

    def requested(self):
        """Those who are not ready yet."""
        states = (MemberState.REQUESTED, MemberState.STARTING)
        return [m.id for state in states for m in self.membership.in_state(state)]

    def able(self):
        """Whether the generation can go on: nobody is gone, held up or told to stop at once."""
        training = self.membership.training
        return (
            bool(training)
            and not self.membership.trouble
            and len(training) == len(self.membership.current)
            and not any(self.workers[m.id].frozen or self.workers[m.id].busy for m in training)
        )

    def catch_up(self):
        if self.caught_up:
            return
        self.caught_up = True
        for m in self.membership.training:
            self.workers[m.id].position, self.workers[m.id].fresh = self.membership.position, False

    def end(self, id, kind):
        worker = self.workers[id]
        self.membership = self.membership.ended(
            {id: GenerationEnd(kind, self.membership.generation, worker.position, "as told")}
        )

    def leave(self, id):
        trained = id in self.membership.members and self.membership.members[id].training
        self.workers.pop(id, None)
        self.membership = self.membership.out(id, "is gone")
        assert self.membership.trouble or not trained

    # The controller: what the real one does with a decision

    def drive(self):
        for _ in range(30):
            self.answer()
            self.see_below_min()
            decision = planner.decide(
                self.membership,
                self.limits,
                stopping=self.stopping,
                durable=self.durable,
                below_min_since=self.now if self.below_min_since is None else self.below_min_since,
                patience_s=PATIENCE_S,
                now=self.now,
            )
            if self.carry_out(decision):
                return
        raise AssertionError(f"no rest at {self.now}: {decision}")

    def answer(self):
        """Those who are told to abandon their generation and can, do."""
        for m in self.membership.training:
            worker = self.workers[m.id]
            if worker.told and not worker.frozen and not worker.busy:
                self.end(m.id, EndKind.BROKEN)

    def see_below_min(self):
        ready = len(self.membership.members) - len(self.requested())
        if ready >= self.limits.min:
            self.below_min_since = None
        elif self.below_min_since is None:
            self.below_min_since = self.now

    def carry_out(self, decision):
        """True when there is nothing more to do at this time."""
        self.over, self.until = False, None
        match decision:
            case Over():
                assert not self.membership.training
                self.over = True
            case Proceed(until):
                assert until is None or until > self.now
                if until is None:
                    assert self.membership.training
                    assert not any(m.drain or m.suspicion for m in self.membership.current)
                    assert not self.membership.trouble
                    assert not self.stopping
                self.until = until
                self.top_up()
            case Wait(_, until, look):
                if self.now >= until:
                    self.stopping = True
                    return False
                assert look > self.now
                self.until = min(look, until)
                self.top_up()
            case Abandon(ids, reason):
                assert all(self.membership.members[id].asked is None for id in ids)
                for id in ids:
                    self.workers[id].told = True
                self.membership = self.membership.asked_to_abandon(ids, reason, self.now)
                return False
            case Expel(ids, _):
                for id in ids:
                    # Standbys of this history never answer, and may be asked to connect.
                    member = self.membership.members[id]
                    assert (
                        member.state in (MemberState.STANDBY, MemberState.STARTING)
                        or member.suspicion
                        or self.workers[id].frozen
                        or self.workers[id].busy
                        or self.is_a_stranger(member)
                    )
                    self.leave(id)
                return False
            case Inquire(ids):
                assert {m.id for m in self.membership.training} >= set(ids)
                self.membership = self.membership.inquired(ids, self.now)
                for id in ids:
                    if not self.workers[id].frozen:
                        self.membership = self.membership.described(id, self.condition(id))
                return False
            case Condemn(reasons):
                for id in reasons:
                    member, worker = self.membership.members[id], self.workers[id]
                    assert member.suspicion or worker.frozen or worker.busy, "it is not to blame"
                    self.leave(id)
                if not reasons:
                    ids = [m.id for m in self.membership.training]
                    for id in ids:
                        self.workers[id].told = True
                    self.membership = self.membership.asked_to_abandon(ids, decision.diagnosis, self.now)
                return False
            case Release(ids):
                self.release(ids)
                return False
            case Save(ids, position, until):
                assert not self.membership.training
                assert self.now < until
                assert position.step > self.durable
                assert all(self.membership.members[id].position == position for id in ids)
                if self.count % 3:  # else it cannot be written
                    self.durable = position.step
                    return False
                self.until = until
                self.top_up()
            case Meet(gathering):
                assert not self.stopping
                assert not self.membership.trouble
                assert self.limits.min <= len(gathering.ids) <= self.limits.max + 1
                assert set(gathering.ids) != {m.id for m in self.membership.current}
                self.membership = self.membership.asked_to_meet(gathering)
                return False
            case Halt(ids):
                assert set(ids) == {m.id for m in self.membership.training}
                for id in ids:
                    self.workers[id].halt = True
                self.membership = self.membership.asked_to_halt(self.now)
                return False
            case Form():
                self.form(decision)
                return False
        return True

    def is_a_stranger(self, member):
        """One of the new in a generation that broke before it came anywhere; the others are enough."""
        current = self.membership.current
        old = [m for m in current if m.generations > 1]
        return (
            member.generations == 1
            and len(old) >= self.limits.min
            and self.membership.lost == 0
            and self.membership.furthest == self.membership.position
            and all(m.end.kind is EndKind.BROKEN for m in current)
        )

    def top_up(self):
        if self.stopping or (self.membership.training and self.membership.trouble):
            return
        for _ in range(planner.missing(self.membership, self.limits)):
            self.count += 1
            id = f"w{self.count}"
            self.workers[id] = Worker()
            self.membership = self.membership.requested(id, self.now)
        assert sum(m.drain is None for m in self.membership.members.values()) >= self.limits.target

    def condition(self, id):
        """Who is busy has not come to where the others wait."""
        generation = self.membership.generation
        if self.workers[id].busy:
            return Condition(generation, 1, "compute", 9.0)
        return Condition(generation, 1, "reduce", 9.0, WAITS, 9.0, (WAITS,), (WAITS,))

    def release(self, ids):
        members = self.membership.members
        assert not any(members[id].training for id in ids)
        truth = max((m.position for m in self.membership.current if m.position), default=Position(0))
        holders = {m.id for m in self.membership.current if m.position == truth}
        if holders and holders <= set(ids) and truth.step > max(self.durable, 0):
            assert self.now >= min(members[id].drain.deadline for id in ids), "the state left unsaved"
        for id in ids:
            self.workers.pop(id)
        self.membership = self.membership.released(ids)

    def form(self, form):
        limits, membership = self.limits, self.membership
        assert not membership.training
        assert not self.stopping
        assert limits.min <= len(form.ids) <= max(limits.max + 1, limits.num_shards)
        assert len(set(form.ids)) == len(form.ids)
        ready = {
            m.id: m
            for m in membership.members.values()
            if m.state in (MemberState.STANDBY, MemberState.MEMBER) and not m.suspicion
        }
        assert set(form.ids) <= set(ready)
        staying = [id for id, m in ready.items() if not m.drain]
        chosen = [id for id in form.ids if id in staying]
        handover = len(form.ids) == limits.num_shards
        assert len(chosen) >= min(len(staying), limits.max) - handover, "nobody who could help is left out"
        for id in set(form.ids) - set(chosen):
            assert self.now < last_call(ready[id].drain, limits), "it must leave"
            assert len(chosen) < limits.min or not any(
                ready[id].position == form.position for id in chosen
            ), "it is not needed"
        holders = {
            m.id: m.position
            for m in membership.current
            if m.position is not None and m.position.step >= self.durable
        }
        if form.position is None:
            late = [id for id in holders if ready[id].drain and holders[id].step > max(self.durable, 0)]
            assert all(self.now >= ready[id].drain.deadline for id in late), "a state is lost unsaved"
            assert all(ready[id].drain for id in holders), "a checkpoint is read although a survivor has more"
            position, restore = (Position(self.durable), "key") if self.durable > 0 else (Position(0), None)
        else:
            assert form.position == max(holders.values())
            assert {form.ids[rank] for rank in form.sources} == {
                id for id, position in holders.items() if position == form.position and id in form.ids
            }
            assert 0 in form.sources, "the rank that tells the steps must know them"
            position, restore = form.position, None
        if form.position is None and restore is None:
            used = [id for id in form.ids if not self.workers[id].fresh]
            assert all(membership.members[id].generations for id in used)
            members = [id for id in form.ids if membership.members[id].generations]
            for id in members:
                self.leave(id)
            if members:
                return
        self.check_orders(form, position, restore)
        generation = membership.generation
        self.membership = membership.formed(form.ids, position, self.now)
        assert self.membership.generation == generation + 1
        self.caught_up = False
        for worker in self.workers.values():
            worker.told = worker.halt = False

    def check_orders(self, form, position, restore):
        orders = places.orders(
            form,
            self.membership.generation + 1,
            self.limits,
            position=position,
            restore=restore,
            checkpoint=False,
            met=self.membership.met_as(form.ids),
        )
        assert list(orders) == list(form.ids)
        gathering = self.membership.gathering
        if any(order.met for order in orders.values()):
            assert gathering.there == set(gathering.ids), "they have not all met"
            assert gathering.ids == form.ids, "they met as others"
        size = len(form.ids)
        for rank, order in enumerate(orders.values()):
            assert order.rank == rank
            assert sorted([*order.sources, *order.receivers]) == list(range(size))
            assert order.sources
            assert len(order.ranges) == size
            owned = sorted(shard for range_ in order.ranges for shard in range_.shards)
            assert owned == list(range(self.limits.num_shards))
            assert replace(order, rank=0) == replace(orders[form.ids[0]], rank=0)
        if restore is None:
            for rank in orders[form.ids[0]].sources:
                worker = self.workers[form.ids[rank]]
                assert worker.position == position, "a source does not hold what it is to give"

    @invariant()
    def no_two_members_of_one_rank(self):
        if hasattr(self, "limits"):
            ranks = [m.rank for m in self.membership.current]
            assert len(set(ranks)) == len(ranks)
            assert all(0 <= rank < self.limits.num_shards for rank in ranks)

    @invariant()
    def a_world_under_min_does_not_train(self):
        if hasattr(self, "limits") and self.membership.training and not self.membership.trouble:
            assert len(self.membership.current) >= self.limits.min


History.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHistory = History.TestCase


# Single decisions, where the figures matter.


def ready(*ids, now=0.0):
    membership = Membership()
    for id in ids:
        membership = membership.requested(id, now).ready(id, HELLO, now)
    return membership


def training(*ids):
    return ready(*ids).formed(ids, Position(0), 0.0)


def decide(
    membership,
    limits=LIMITS,
    *,
    stopping=False,
    durable=-1,
    below_min_since=0.0,
    patience_s=math.inf,
    now=0.0,
):
    decision = planner.decide(
        membership,
        limits,
        stopping=stopping,
        durable=durable,
        below_min_since=below_min_since,
        patience_s=patience_s,
        now=now,
    )
    return Proceed() if decision == Proceed(math.inf) else decision


def forms(decision):
    assert isinstance(decision, Form)
    return decision.ids, decision.sources, decision.position


def ended(membership, **steps):
    for id, step in steps.items():
        membership = membership.ended(
            {id: GenerationEnd(EndKind.BROKEN, membership.generation, Position(step), "peer gone")}
        )
    return membership


def test_below_min_it_waits_as_long_as_it_may_start():
    membership = ready("a").requested("b", 0.0)
    assert decide(membership, below_min_since=5.0) == Wait(
        "1 of at least 2 workers are ready; asked Ray for 2: 1 ready, 0 starting, 1 pending", 65.0, 65.0
    )


def test_those_who_are_ready_wait_a_little_for_the_others():
    membership = ready("a", "b", now=10.0).requested("c", 10.0)
    assert decide(membership, now=11.0) == Proceed(13.0)
    assert forms(decide(membership, now=13.0)) == (("a", "b"), (), None)
    assert forms(decide(ready("a", "b", "c", now=10.0), now=10.0)) == (("a", "b", "c"), (), None)


def test_survivors_wait_for_nobody():
    membership = ended(training("a", "b", "c").out("c", "died"), a=5, b=5).requested("d", 1.0)
    assert forms(decide(membership, now=1.0)) == (("a", "b"), (0, 1), Position(5))


def test_who_is_ahead_comes_first_and_the_others_keep_their_order():
    membership = ended(training("a", "b", "c"), a=5, b=6, c=6)
    assert forms(decide(membership)) == (("b", "c", "a"), (0, 1), Position(6))


def test_a_survivor_behind_is_better_than_an_older_checkpoint():
    membership = ended(training("a", "b"), a=60, b=60)
    assert forms(decide(membership, durable=50)) == (("a", "b"), (0, 1), Position(60))


def test_a_newcomer_at_step_0_does_not_take_the_line_back_past_a_checkpoint():
    membership = ended(training("a", "b"), a=0, b=0)
    assert forms(decide(membership, durable=50)) == (("a", "b"), (), None)


def test_who_is_silent_is_given_up_soon_and_who_is_busy_late():
    membership = training("a", "b", "c").out("c", "died").asked_to_abandon(["a", "b"], "c", 10.0)
    assert decide(membership, now=10.0) == Proceed(40.0)
    silent = membership.suspected("a", Suspicion(16.5, "gave no sign of life", silent=True))
    assert decide(silent, now=15.0) == Expel(("a",), "gave no sign of life"), "nobody need be asked about it"
    assert decide(membership, now=40.0) == Expel(("a", "b"), "did not say within 30 s where it is")


def test_a_halt_that_does_not_come_breaks_the_generation():
    membership = training("a", "b").asked_to_halt(10.0)
    assert decide(membership, stopping=True, now=10.0) == Proceed(70.0)
    assert decide(membership, stopping=True, now=70.0) == Abandon(
        ("a", "b"), "no step border came within 60 s"
    )


def test_standbys_are_let_in_at_a_border_if_there_is_room():
    membership = training("a", "b").requested("c", 1.0).ready("c", HELLO, 1.0)
    assert decide(membership, replace(LIMITS, max=2, standby=1), now=1.0) == Proceed()
    meet = decide(membership, now=1.0)
    assert meet == Meet(Gathering(1, ("a", "b", "c"), 1.0))
    membership = membership.asked_to_meet(meet.gathering)
    assert decide(membership, now=1.0) == Proceed(1.0 + LIMITS.meet_s)
    for id in ("a", "b", "c"):
        assert membership.met_as(("a", "b", "c")) == 0
        assert decide(membership, now=2.0) == Proceed(1.0 + LIMITS.meet_s)
        membership = membership.met(id, Met(2, 1))
    assert decide(membership, now=2.0) == Halt(("a", "b"))
    assert membership.met_as(("a", "b", "c")) == 1
    assert membership.met_as(("b", "a", "c")) == membership.met_as(("a", "b")) == 0


def test_nobody_waits_long_for_those_who_do_not_meet():
    gathering = Gathering(1, ("a", "b", "c"), 1.0)
    membership = training("a", "b").requested("c", 1.0).ready("c", HELLO, 1.0).asked_to_meet(gathering)
    over = 1.0 + LIMITS.meet_s
    assert decide(membership, now=over) == Halt(("a", "b"))
    assert decide(membership, stopping=True, now=1.0) == Halt(("a", "b"))


def test_who_cannot_connect_goes_and_the_others_train_on():
    gathering = Gathering(1, ("a", "b", "c"), 1.0)
    membership = training("a", "b").requested("c", 1.0).ready("c", HELLO, 1.0).asked_to_meet(gathering)
    failed = membership.met("a", Met(2, 1, "c did not come"))
    assert failed.met_as(gathering.ids) == 0
    expulsion = Expel(("c",), "could not connect with the others: c did not come")
    assert decide(failed, now=1.0) == expulsion
    assert decide(failed.out("c", ""), now=1.0) == Proceed()
    # Without anybody new it is no newcomer's fault: they may still connect while nobody trains.
    drained = training("a", "b", "c").draining(["c"], Drain(1.0, 2.0, "for a test"))
    drained = drained.asked_to_meet(Gathering(1, ("a", "b"), 1.0)).met("a", Met(2, 1, "b did not come"))
    assert decide(drained, replace(LIMITS, max=2), now=1.5) == Halt(("a", "b", "c"))


def test_newcomers_go_after_a_generation_that_broke_before_its_first_step():
    def broken(membership, at=START, kind=EndKind.BROKEN):
        ends = {m.id: GenerationEnd(kind, membership.generation, at) for m in membership.training}
        return membership.ended(ends)

    first = broken(training("a", "b"))
    assert decide(first, now=1.0) == Form(("a", "b"), (0, 1), START, (None, None))
    grown = first.formed(("a", "b"), START, 1.0).requested("c", 1.0).ready("c", HELLO, 1.0)
    halted = broken(grown, Position(4), EndKind.HALTED)
    grown = halted.formed(("a", "b", "c"), Position(4), 2.0)
    gone = Expel(("c",), "came into a generation that completed no step: rank 0: ")
    assert decide(broken(grown, Position(4)), now=3.0) == gone
    # Not if they came further, if somebody was lost, if the task raised, or if the others are too few.
    for innocent in (
        broken(grown.came_to(Position(5), 3.0), Position(5)),
        broken(grown.out("b", "is gone"), Position(4)),
        broken(grown, Position(4), EndKind.TASK_ERROR),
    ):
        assert isinstance(decide(innocent, now=3.0), Form)
    assert isinstance(decide(broken(grown, Position(4)), replace(LIMITS, min=3), now=3.0), Form)


def test_who_was_ready_first_comes_first():
    membership = training("a").requested("b", 1.0).requested("c", 1.0).ready("c", HELLO, 2.0)
    first = decide(membership, replace(LIMITS, max=2, standby=1), now=9.0)
    assert first.gathering.ids == ("a", "c")
    later = membership.asked_to_meet(first.gathering).ready("b", HELLO, 9.5)
    assert decide(later, replace(LIMITS, max=2, standby=1), now=9.5) == Proceed(9.0 + LIMITS.meet_s)
    assert decide(later, now=9.5).gathering.ids == ("a", "c", "b")


def test_who_comes_while_others_meet_makes_them_meet_anew():
    gathering = Gathering(1, ("a", "b", "c"), 1.0)
    membership = training("a", "b").requested("c", 1.0).ready("c", HELLO, 1.0).asked_to_meet(gathering)
    membership = membership.requested("d", 2.0).ready("d", HELLO, 2.0)
    again = decide(membership, replace(LIMITS, max=4), now=2.0)
    assert again == Meet(Gathering(2, ("a", "b", "c", "d"), 2.0))
    membership = membership.asked_to_meet(again.gathering)
    assert membership.met("a", Met(2, 1)) == membership.met("a", Met(1, 2)) == membership
    assert membership.out("c", "is gone").met_as(("a", "b", "d")) == 0


@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 4))
def test_as_many_are_missing_as_are_wanted(there, most, standby):
    membership = ready(*(f"w{i}" for i in range(there)))
    limits = replace(LIMITS, min=1, max=most, standby=standby)
    assert planner.missing(membership, limits) == max(0, most + standby - there)


def at_border(membership, step=3):
    """All who train have halted there."""
    for m in membership.training:
        membership = membership.ended(
            {m.id: GenerationEnd(EndKind.HALTED, membership.generation, Position(step))}
        )
    return membership


def leaving(membership, *ids, since=10.0, lead=60.0):
    return membership.draining(ids, Drain(since, since + lead, "its node goes"))


def test_who_shall_leave_does_so_when_it_is_replaced():
    membership = leaving(training("a", "b", "c"), "b")
    assert decide(membership, now=10.0) == Proceed(40.0), "half of the time it may wait for another"
    replaced = membership.requested("d", 11.0).ready("d", HELLO, 20.0)
    met = decide(replaced, now=20.0)
    assert met.gathering.ids == ("a", "c", "d")
    assert forms(decide(at_border(replaced), now=20.0)) == (("a", "c", "d"), (0, 1), Position(3))
    assert decide(membership, now=40.0).gathering.ids == ("a", "c")
    assert forms(decide(at_border(membership), now=40.0)) == (("a", "c"), (0, 1), Position(3))


def test_who_is_needed_stays_as_long_as_it_can_then_the_state_is_saved():
    membership = leaving(training("a", "b"), "b")
    assert decide(membership, now=40.0) == Proceed(65.0)
    assert decide(membership, now=65.0) == Halt(("a", "b"))
    halted = at_border(membership)
    assert decide(halted, now=65.0) == Save(("a", "b"), Position(3), 70.0)
    assert decide(halted, now=66.0, durable=3) == Release(("b",))
    assert decide(halted, now=70.0) == Release(("b",)), "what could not be saved in time is not waited for"
    left = halted.released(["b"])
    assert isinstance(decide(left, now=66.0, durable=3), Wait)
    again = left.requested("c", 67.0).ready("c", HELLO, 68.0)
    assert forms(decide(again, now=68.0, durable=3)) == (("a", "c"), (0,), Position(3))


def test_the_last_who_has_the_state_hands_it_over_before_it_leaves():
    limits = replace(LIMITS, min=1, max=1, standby=1)
    membership = leaving(training("a"), "a").requested("b", 11.0).ready("b", HELLO, 20.0)
    assert decide(membership, limits, now=20.0).gathering.ids == ("a", "b")
    both = forms(decide(at_border(membership), limits, now=20.0))
    assert both == (("a", "b"), (0,), Position(3))
    handed_over = at_border(membership).formed(("a", "b"), Position(3), 20.0)
    assert decide(handed_over, limits, now=21.0) == Halt(("a", "b"))
    assert forms(decide(at_border(handed_over, 4), limits, now=21.0)) == (("b",), (0,), Position(4))


def test_all_shall_leave_and_nobody_comes():
    membership = leaving(training("a", "b"), "a", "b")
    assert decide(membership, now=64.0) == Proceed(65.0)
    halted = at_border(membership)
    assert decide(halted, now=65.0) == Save(("a", "b"), Position(3), 70.0)
    assert decide(halted, now=66.0, durable=3) == Release(("a", "b"))


def test_a_smaller_world_lets_the_last_ranks_go_and_nobody_waits():
    limits = replace(LIMITS, max=2)
    membership = training("a", "b", "c")
    assert decide(membership, limits, now=1.0).gathering.ids == ("a", "b")
    assert forms(decide(at_border(membership), limits, now=1.0))[0] == ("a", "b")
    smaller = at_border(membership).formed(("a", "b"), Position(3), 1.0)
    assert decide(smaller, limits, now=1.0) == Release(("c",))
    pending = training("a", "b", "c").requested("d", 1.0)
    assert decide(pending, now=1.0) == Release(("d",)), "what is not needed any more is not asked for either"


def test_who_is_suspected_is_given_up_at_its_time_and_nothing_is_planned_before():
    membership = training("a", "b").suspected("b", Suspicion(5.0, "gave no sign of life"))
    assert decide(membership, now=4.0) == Proceed(5.0)
    assert decide(membership, stopping=True, now=4.0) == Proceed(5.0)
    assert decide(membership, now=5.0) == Expel(("b",), "gave no sign of life")
    assert decide(membership.cleared("b"), now=5.0) == Proceed()


def condition(membership, phase="reduce", waits_in=WAITS, where=""):
    entered = () if waits_in is None else (waits_in,)
    return Condition(membership.generation, 1, phase, 9.0, waits_in, 9.0, entered, entered, where)


def test_who_is_silent_goes_once_the_others_have_said_what_they_wait_for():
    silence = Suspicion(6.5, "gave no sign of life", silent=True)
    membership = training("a", "b", "c").suspected("b", silence)
    assert decide(membership, now=5.0) == Inquire(("a", "c"))
    membership = membership.inquired(("a", "c"), 5.0)
    assert decide(membership, now=5.0) == Proceed(6.0)
    told = membership.described("a", condition(membership)).described("c", condition(membership))
    condemned = decide(told, now=5.1)
    assert condemned.reasons == {"b": "gave no sign of life"}
    assert not condemned.alive
    assert "all_to_all bucket 0" in condemned.diagnosis
    assert decide(membership, now=6.0).reasons == {}, "if nobody answers, who is cut off cannot be told"
    assert decide(membership, now=6.5) == Expel(("b",), "gave no sign of life")


def test_a_generation_that_stands_still_is_looked_into_and_who_holds_it_up_goes():
    membership = training("a", "b")
    assert decide(membership, patience_s=10.0, now=9.0) == Proceed(10.0)
    assert decide(membership, patience_s=10.0, now=10.0) == Inquire(("a", "b"))
    asked = membership.inquired(("a", "b"), 10.0)
    loops = condition(membership, "compute", None, "model.py:7 in loss")
    told = asked.described("a", condition(membership)).described("b", loops)
    condemned = decide(told, patience_s=10.0, now=10.1)
    assert list(condemned.reasons) == ["b"]
    assert condemned.alive
    assert "model.py:7 in loss" in condemned.diagnosis
    assert decide(told.came_to(Position(1), 10.1), patience_s=10.0, now=10.1) == Proceed(20.1)


def test_where_nobody_is_to_blame_all_connect_anew():
    membership = training("a", "b")
    asked = membership.inquired(("a", "b"), 10.0)
    told = asked.described("a", condition(membership)).described("b", condition(membership))
    condemned = decide(told, patience_s=10.0, now=10.1)
    assert (condemned.reasons, condemned.alive) == ({}, False)
    assert "network" in condemned.diagnosis


def test_a_process_that_never_becomes_ready_does_not_hold_its_place_for_ever():
    membership = training("a", "b").requested("c", 0.0).arrived("c", 7, "node", "10.0.0.1", 2.0)
    assert decide(membership, now=61.0) == Proceed(62.0)
    late = Expel(("c",), "was not ready 60 s after its process began")
    assert decide(membership, now=62.0) == late
    pending = training("a", "b").requested("c", 0.0)
    assert decide(pending, now=9999.0) == Proceed(), "while there is no place it is the demand for one"


def test_a_world_that_changes_too_often_lets_newcomers_wait():
    limits = replace(LIMITS, changes_a_minute=2)
    membership = at_border(training("a", "b")).formed(("a", "b"), Position(3), 10.0)
    membership = membership.requested("c", 11.0).ready("c", HELLO, 12.0)
    assert decide(membership, limits, now=20.0) == Proceed(60.0)
    assert isinstance(decide(membership, limits, now=60.0), Meet)
