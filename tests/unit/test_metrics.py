"""The task's numbers and the words of a step: weighted means over the tree, whatever each shard reports."""

import math

import pytest
import torch

from worldline.task import Loss
from worldline.worker.metrics import MetricSums, combine_metrics
from worldline.worker.words import StepTotals, StepWords


def encoded(*losses):
    sums = MetricSums()
    for loss in losses:
        sums.add(loss)
    return sums.encode()


def combine(blobs):
    return combine_metrics(b"".join(blobs), [len(blob) for blob in blobs])


def test_means_are_weighted_over_micro_batches_and_shards():
    blobs = [
        encoded(Loss(torch.tensor(1.0), 1, {"a": 1.0}), Loss(torch.tensor(1.0), 3, {"a": 5.0})),
        encoded(Loss(torch.tensor(1.0), 4.0, {"a": torch.tensor(8.0)})),
    ]
    assert combine(blobs) == {"a": (1 + 15 + 32) / 8}


def test_shards_may_report_other_names_or_none():
    """A mean is over the shards that had the name."""
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    blobs = [encoded(Loss(one, 1, {"a": 1.0})), b"", encoded(Loss(two, 2, {"b": 3.0})), encoded(Loss(one, 1))]
    assert combine(blobs) == {"a": 1.0, "b": 3.0}
    assert combine([b"", b""]) == {}


def test_what_has_no_weight_says_nothing():
    nothing = Loss(torch.tensor(0.0), 0.0, {"a": float("nan")})
    assert combine([encoded(nothing, Loss(torch.tensor(1.0), 2, {"a": 3.0}))]) == {"a": 3.0}
    assert combine([encoded(nothing)]) == {}


def test_infinities_and_nan_pass_as_they_are():
    means = combine([encoded(Loss(torch.tensor(1.0), 1, {"a": float("inf"), "b": float("nan")}))])
    assert means["a"] == float("inf")
    assert math.isnan(means["b"])


def table(rows):
    """The words of four shards on two workers, with two integer buffers; who has no rows says nothing."""
    words = [StepWords(0, 1, 2), StepWords(1, 3, 2)]
    for shard, n in enumerate(rows):
        if n:
            own = words[0] if shard == 0 else words[1]
            own.set(
                shard, loss=0.1 * shard, weight=float(n), rows=n, rows_digest=2**64 - 1 - shard, metrics=shard
            )
            own.set_extra(shard, [1, -1])
    return words


def test_totals_of_a_step():
    words = table((2, 2, 0, 1))
    totals = StepTotals.combine(torch.cat([own.tensor for own in words]))
    assert (totals.rows, totals.weight) == (5, 5.0)
    assert totals.loss_sum == (0.0 + 0.1) + 0.1 * 3
    assert totals.metrics_lengths == (0, 1, 0, 3)
    assert totals.extra == (1, -1)
    assert not totals.halt
    words[1].request_halt()
    assert StepTotals.combine(torch.cat([own.tensor for own in words])).halt


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_shards_whose_loss_is_not_finite_are_named(value):
    words = table((2, 2, 2, 2))
    words[1].set(2, value, 2.0, 2, 0, 0)
    assert StepTotals.combine(torch.cat([own.tensor for own in words])).nonfinite_shards == (2,)


def test_the_rows_digest_tells_rows_their_order_and_their_shard():
    digests = set()
    for rows, first in (((2, 2, 0, 1), 5), ((2, 2, 0, 1), 6), ((2, 1, 0, 1), 5), ((2, 0, 2, 1), 5)):
        words = table(rows)
        words[0].set(0, 0.0, 2.0, rows[0], first, 0)
        digests.add(StepTotals.combine(torch.cat([own.tensor for own in words])).rows_digest)
    assert len(digests) == 4
