"""A step for nothing leaves nothing: the line is as if it had not been."""

import pytest
import torch
from tests.unit import tiny
from tests.unit.ranks import peers

from worldline.worker.rehearsal import rehearse

CASE = tiny.Case()
STEPS = 4


def rehearse_and_run(room, rehearsal):
    """Whether the rehearsal left the state alone, how often it called the task, and the steps after it."""
    tiny.build(room, CASE)
    before = tiny.state_digest(room)
    rehearsal(room)
    untouched, calls = tiny.state_digest(room) == before, sum(tiny.count_losses(room).values())
    return untouched, calls, tiny.go_on(room, rank=0, size=1, prefix="", steps=STEPS)


def none(room):
    pass


def whole(room):
    rehearse(room.engine, room.state, room.loaders[0].batches(1, 0)[0])


def failing(room):
    def fail(*_):
        raise ValueError("no loss today")

    room.task.loss = fail
    whole(room)
    del room.task.loss


def failing_in_the_update(room):
    def fail():
        with torch.no_grad():
            next(room.model.parameters()).add_(1)
        raise ValueError("no update today")

    step, room.engine._optimizer.step = room.engine._optimizer.step, fail
    whole(room)
    room.engine._optimizer.step = step


@pytest.mark.parametrize(("rehearsal", "calls"), [(whole, 2), (failing, 0), (failing_in_the_update, 2)])
def test_the_line_is_the_same_with_and_without(rehearsal, calls):
    with peers(1) as (peer,):
        plain = peer.call(rehearse_and_run, none)
        assert plain[:2] == (True, 0)
        assert peer.call(rehearse_and_run, rehearsal) == (True, calls, plain[2])


class Counting(torch.optim.SGD):
    """Keeps its count where some optimizers do: in the parameter groups, from the first step on."""

    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


def rehearse_counting(room):
    tiny.build(room, CASE)
    counting = Counting(room.model.parameters(), lr=0.1)
    room.engine._optimizer = room.state._optimizer = counting
    whole(room)
    return [group.get("count", 0) for group in counting.param_groups]


def test_what_a_step_adds_to_the_groups_is_taken_back():
    with peers(1) as (peer,):
        assert peer.call(rehearse_counting) == [0]


def rehearse_with_a_passing_buffer(room):
    tiny.build(room, CASE)
    room.model.register_buffer("passing", torch.zeros(2), persistent=False)
    room.model.register_forward_hook(lambda model, *_: model.passing.add_(1))
    whole(room)
    return room.model.passing.tolist()


def test_buffers_that_are_no_state_are_put_back_too():
    with peers(1) as (peer,):
        assert peer.call(rehearse_with_a_passing_buffer) == [0, 0]


class Growing(torch.nn.Module):
    """Its extra state cannot be made less."""

    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = max(self.count, state["count"])


def rehearse_growing(room):
    tiny.build(room, CASE)
    growing = room.model.growing = Growing()
    room.model.register_forward_hook(lambda *_: setattr(growing, "count", growing.count + 1))
    with pytest.raises(RuntimeError) as caught:
        whole(room)
    return str(caught.value)


def test_a_state_that_cannot_be_put_back_is_refused():
    with peers(1) as (peer,):
        assert "cannot be put back after a step" in peer.call(rehearse_growing)
