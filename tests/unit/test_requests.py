"""What operators ask: it comes back as it was written, anything else is refused with what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldline.control import requests
from worldline.control.requests import (
    Answered,
    BadRequest,
    DrainAsked,
    Named,
    Outcome,
    Request,
    ResizeAsked,
    StopAsked,
    decode,
    encode,
    named,
    size_fault,
)
from worldline.storage import LocalStorage

WORKERS = [
    Named("w1", 0, "aaaa1111", "10.0.0.1"),
    Named("w4", 1, "aaaa2222", "10.0.0.2"),
    Named("w3", 2, "aaaa2222", "10.0.0.2"),
    Named("w5", -1, "55550000", "10.0.0.3"),
]

attempts = st.integers(1, 2**31 - 1)
texts = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=requests.MAX_TEXT)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
every_request = st.one_of(
    st.builds(StopAsked, attempts, texts),
    st.builds(ResizeAsked, attempts, texts, attempts),
    st.builds(DrainAsked, attempts, texts, texts, st.floats(0, 1e9)),
)


@given(every_request)
def test_a_request_comes_back_as_it_was_written(request: Request) -> None:
    assert decode(encode(request)) == request


@given(st.binary() | anything.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        decode(data)


@given(every_request, st.sampled_from(["command", "attempt", "by", "workers", "lead_s", "more"]), anything)
def test_a_changed_request_is_refused_or_a_request(request: Request, key: str, value: Any) -> None:
    content = json.loads(encode(request)) | {key: value}
    try:
        changed = decode(json.dumps(content).encode())
    except BadRequest:
        return
    assert json.loads(encode(changed)) == content


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "the request is no JSON object"),
        ({"command": "kill"}, "unknown command 'kill': this driver knows stop, resize, drain"),
        ({"command": "stop", "attempt": 1}, "a request to stop needs 'by'"),
        ({"command": "stop", "attempt": True, "by": "a"},
         "stop: attempt must be a number above 0, found True"),
        ({"command": "resize", "attempt": 1, "by": "me", "workers": 0},
         "resize: workers must be a number above 0, found 0"),
        ({"command": "stop", "attempt": 1, "by": "a", "now": 1}, "stop: unknown 'now': it takes attempt, by"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(content: object, sentence: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(json.dumps(content).encode())
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("target", "ids"),
    [
        ("0", ("w1",)),
        ("2", ("w3",)),
        ("w5", ("w5",)),
        ("10.0.0.2", ("w4", "w3")),
        ("aaaa2", ("w4", "w3")),
        ("aaaa1111", ("w1",)),
        ("5555", ("w5",)),
    ],
)
def test_a_worker_or_node_has_several_names(target: str, ids: tuple[str, ...]) -> None:
    assert named(target, WORKERS) == ids


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("7", "there is no worker or node '7'; there is 0 (w1 on 10.0.0.1), 1 (w4 on 10.0.0.2), "
              "2 (w3 on 10.0.0.2), w5"),
        ("-1", "there is no worker or node '-1'"),
        ("aaa", "there is no worker or node 'aaa'"),
        ("aaaa", "'aaaa' begins the ids of 2 nodes: give more of it"),
    ],
)  # fmt: skip
def test_what_names_nobody_is_refused_with_who_is_there(target: str, sentence: str) -> None:
    with pytest.raises(ValueError, match="node") as caught:
        named(target, WORKERS)
    assert str(caught.value).startswith(sentence)


def test_of_many_workers_a_few_are_named() -> None:
    with pytest.raises(ValueError, match=r"there is 0 .*, 7 .*, 9992 more$"):
        named("x", [Named(f"w{k}", k, "n", "10.0.0.1") for k in range(10_000)])


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_a_run_can_have_between_min_workers_and_one_a_shard(workers: int, least: int, shards: int) -> None:
    assert (size_fault(workers, least, shards) == "") == (least <= workers <= shards)


def test_a_request_and_its_answer_pass_through_the_storage(tmp_path) -> None:
    storage = LocalStorage(tmp_path)
    first, second = requests.name(1000.0, "b" * 32), requests.name(1000.5, "a" * 32)
    requests.send(storage, second, StopAsked(1, "me"))
    requests.send(storage, first, ResizeAsked(1, "me", 3))
    storage.put("requests/note.txt", b"not ours")
    assert requests.waiting(storage) == [first, second]
    assert requests.read(storage, first) == ResizeAsked(1, "me", 3)
    assert requests.take_answer(storage, first) is None
    requests.answer(storage, first, Answered(Outcome.DONE, "three workers"))
    assert requests.waiting(storage) == [second]
    assert requests.take_answer(storage, first) == Answered(Outcome.DONE, "three workers")
    requests.withdraw(storage, second)
    assert storage.list("requests/") == ["requests/note.txt"]


def test_a_request_of_many_bytes_is_not_read(tmp_path) -> None:
    storage = LocalStorage(tmp_path)
    name = requests.name(1.0, "0" * 32)
    storage.put(f"requests/{name}.json", b" " * (requests.MAX_BYTES + 1))
    with pytest.raises(BadRequest, match="more than 65536 bytes"):
        requests.read(storage, name)


def test_json_that_is_nested_without_end_is_refused() -> None:
    with pytest.raises(BadRequest, match="not JSON"):
        decode(b"[" * requests.MAX_BYTES)
