"""What every rank learns of every shard."""

from worldline.worker.words import StepTotals, StepWords


def test_a_halt_asked_for_outlives_what_an_earlier_try_left():
    earlier = StepWords(0, 2, num_extra=0)
    earlier.request_halt()
    for shard in (0, 1):
        earlier.set(shard, 1.0, 2.0, 2, 7, 0)
    again = StepWords(0, 2, num_extra=0)
    again.put(0, earlier.get(0))
    again.put(1, earlier.get(1))
    assert not StepTotals.combine(again.tensor).halt, "the earlier try's halt is not this one's"
    halted = StepWords(0, 2, num_extra=0)
    halted.request_halt()
    halted.put(0, earlier.get(0))
    halted.put(1, earlier.get(1))
    totals = StepTotals.combine(halted.tensor)
    assert totals.halt
    assert (totals.loss_sum, totals.weight, totals.rows) == (2.0, 4.0, 4)
