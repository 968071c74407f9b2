"""The report and the numbers in it."""

import json
import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from worldline.events import EvaluationRecord, Event, EventKind, StepRecord
from worldline.tracking import figure
from worldline.tracking.log import EVALUATIONS, EVENTS, STEPS, EvaluationLog, EventLog, StepLog
from worldline.tracking.report import write_report
from worldline.tracking.summary import Epoch, summarize

RECORD = StepRecord(
    step=0, epoch=0, loss=0.5, lr=0.1, grad_norm=0.3, rows=10, world=2, generation=1, attempt=1, step_s=0.5,
    data_s=0.05, compute_s=0.3, reduce_s=0.1, state_digest=None, rows_digest="ab", time=100.0,
)  # fmt: skip


def event(kind, step, time, before=2, after=2, **values):
    return Event(time, kind, 1, step, before, after, **values)


def steps(num):
    return [
        replace(
            RECORD,
            step=k,
            epoch=(k - 1) // 4,
            loss=math.nan if k == 3 else 4.0 / k,
            time=100.0 + k,
            world=2 if k <= num // 2 else 1,
            generation=1 if k <= num // 2 else 2,
            rows=7 if k % 4 == 0 else 10,
            state_digest=f"d{k}" if k % 5 == 0 else None,
        )
        for k in range(1, num + 1)
    ]


EVENTS_SEEN = [
    event(EventKind.ATTEMPT_STARTED, 0, 98.5),
    event(EventKind.WORKER_LOST, 5, 105.0, 2, 1, workers=("w-1",), reason="<killed> & gone"),
    event(EventKind.GENERATION_FORMED, 5, 105.2, 2, 1, seconds=0.2),
    event(EventKind.FINISHED, 10, 112.0),
]


def test_numbers():
    summary = summarize([s.__dict__ for s in steps(10)], EVENTS_SEEN, [])
    assert summary.num_steps == 10
    assert summary.epochs == (Epoch(0, 4, 37), Epoch(1, 4, 37), Epoch(2, 2, 20))
    assert summary.rows == 94
    assert summary.rows_per_s == 94 / 5.0
    assert (summary.step_s, summary.elapsed_s) == (5.0, 11.5)
    assert summary.goodput == 5.0 / 11.5
    assert summary.worlds == (1, 2)
    assert summary.generations == 2
    assert summary.final_digest == (10, "d10")
    assert [i.recovery_s for i in summary.incidents] == [0.2]
    assert summary.resumed_s == (1.0,)  # the death is of second 105, step 6 of 106
    assert [(s.generation, s.first, s.last, s.world) for s in summary.stretches] == [
        (1, 1, 5, 2),
        (2, 6, 10, 1),
    ]
    assert [s.step_s for s in summary.stretches] == [0.5, 0.5]
    assert summary.outcome == "finished"


def test_a_loss_nobody_recovered_from_has_no_time():
    summary = summarize([s.__dict__ for s in steps(5)], EVENTS_SEEN[:2], [])
    assert summary.resumed_s == (None,)
    assert figure.notes(EVENTS_SEEN[:2], summary) == [(5, "worker lost", True)]


def test_words_beside_the_marks():
    grown = event(EventKind.GENERATION_FORMED, 8, 109.0, 1, 3, seconds=0.25)
    events = [*EVENTS_SEEN, grown]
    summary = summarize([s.__dict__ for s in steps(10)], events, [])
    assert figure.notes(events, summary) == [
        (5, "worker lost, next step done 1.00 s later", True),
        (8, "joined, others paused 0.25 s", False),
    ]
    assert figure.subtitle(summary) == "10 steps on 2 → 1 workers, 94 rows"


def test_a_run_that_goes_on_after_an_end_has_not_ended():
    events = [*EVENTS_SEEN, event(EventKind.ATTEMPT_STARTED, 10, 200.0)]
    assert summarize([], events, []).outcome == "not ended"


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("num", [0, 1, 10, 400])
def test_a_report_stands_alone(tmp_path, num):
    StepLog(tmp_path / STEPS).append(steps(num))
    EventLog(tmp_path / EVENTS).append(EVENTS_SEEN)
    EvaluationLog(tmp_path / EVALUATIONS).append(
        EvaluationRecord(5, 1000, {"loss": 1.25, "bad": math.inf}, 2.0, 1, 1)
    )
    (tmp_path / "run.json").write_text(
        json.dumps({"run": "my <run>", "job_digest": "abc", "identity": {"seed": "1234"}})
    )
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = Page()
    page.feed(path.read_text())
    text = " ".join(page.text)
    assert page.open == []
    assert all(link.startswith("data:image/png") for link in page.links)
    for part in ("my <run>", "<killed> & gone", "0.200", "1.25", "finished"):
        assert part in text
    if num >= 10:
        assert f"{num:,}" in text
        assert "state digest after step" in text
        assert "1234" in text
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_an_empty_folder_gives_an_empty_report(tmp_path):
    assert "no" in write_report(tmp_path).read_text()


def test_thinning_keeps_every_spike():
    y = [1.0] * 100_000
    y[54_321], y[7] = 99.0, math.nan
    x, thin = figure.thinned(range(100_000), y)
    assert len(x) <= figure.MAX_POINTS + 2
    assert dict(zip(x, thin, strict=True))[54_321] == 99.0
    assert x == sorted(x)
    assert all(math.isfinite(v) for v in thin)


def test_smoothing_is_a_centred_mean_that_skips_what_is_not_finite():
    assert figure.smoothed([1.0, 2.0, math.nan, 4.0, 5.0], 3) == [1.5, 1.5, 3.0, 4.5, 4.5]
    assert figure.smoothed([1.0, 2.0], 1) == [1.0, 2.0]


def test_the_world_is_a_step_line():
    assert figure.runs([5, 6, 7, 8], [2, 2, 3, 1]) == ([4.0, 6.0, 7.0, 8.0], [2, 3, 1])
