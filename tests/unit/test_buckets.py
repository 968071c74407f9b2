"""Buckets: packed in an order that depends on the model alone, views that alias one flat tensor."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from worldline.collective.buckets import SlabPool, gradient_buckets, make_buckets


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16])), max_size=20),
    st.integers(1, 200),
)
def test_every_tensor_lies_in_one_bucket_in_order(tensors, bucket_bytes):
    given_tensors = [torch.empty(numel, dtype=dtype) for numel, dtype in tensors]
    buckets = make_buckets(given_tensors, first_index=3, bucket_bytes=bucket_bytes)
    packed = [tensor for bucket in buckets for tensor in bucket.parameters]
    assert [id(t) for t in packed] == [id(t) for t in given_tensors]
    assert [bucket.index for bucket in buckets] == list(range(3, 3 + len(buckets)))
    for bucket in buckets:
        assert {t.dtype for t in bucket.parameters} == {bucket.dtype}
        assert num_bytes(bucket.parameters) <= bucket_bytes or len(bucket.parameters) == 1
    for left, right in pairwise(buckets):
        full = num_bytes([*left.parameters, right.parameters[0]]) > bucket_bytes
        assert full or left.dtype != right.dtype


def num_bytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def test_parameters_run_from_the_last_tied_ones_once_frozen_ones_not():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    (bucket,) = gradient_buckets(model)
    assert [id(p) for p in bucket.parameters] == [id(model[2].weight), id(model[0].weight)]
    assert (bucket.numel, bucket.length) == (8, 10)


def test_views_and_presences_are_the_flat_tensor():
    (bucket,) = make_buckets([torch.empty(2, 3), torch.empty(()), torch.empty(0)])
    slab = bucket.new_slab()
    slab.views[0].fill_(1)
    slab.views[1].fill_(2)
    slab.presence.fill_(3)
    assert slab.flat.tolist() == [1.0] * 6 + [2.0] + [3.0] * 3
    assert [view.shape for view in slab.views] == [(2, 3), (), (0,)]


def test_a_slab_given_back_is_used_again():
    pool = SlabPool(make_buckets([torch.empty(2)]))
    first = pool.take(0)
    assert pool.take(0) is not first
    pool.give(0, first)
    assert pool.take(0) is first
