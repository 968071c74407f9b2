"""What the terminal shows."""

import io
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console as RichConsole

from worldline.events import Event, EventKind, StepRecord
from worldline.tracking.console import (
    LiveConsole,
    Pace,
    PlainConsole,
    make_console,
    progress_line,
)
from worldline.tracking.incidents import incidents
from worldline.tracking.log import EVENTS, STEPS, EventLog, StepLog
from worldline.tracking.narrate import Narrator, Sentence, Tone
from worldline.tracking.numbers import duration
from worldline.tracking.panel import NUM_SENTENCES, panel
from worldline.tracking.status import DRAINING, RunState, Status, StatusWriter, WorkerStatus

STATUS = Status(
    run="gpt", state=RunState.STARTING, reason="", step=0, steps=300, epoch=0, attempt=1, generation=0,
    world=0, min=1, max=4, workers=(), standbys=0, loss=None, rows_per_s=None, goodput=None, incidents=0,
    mlflow_run_id=None, storage="runs/gpt",
)  # fmt: skip
LOST = Event(
    1.7e9, EventKind.WORKER_LOST, 3, 60, 3, 2, ("w2",), "rank 1 is gone: The actor died unexpectedly"
)
ASKED = Event(1.7e9, EventKind.WORKER_REQUESTED, 4, 60, 2, 2, ("w4",))
FORMED = Event(1.7e9, EventKind.GENERATION_FORMED, 4, 60, 2, 2, ("w1", "w3"), "", 0.2084)
STARTED = Event(1.7e9, EventKind.GENERATION_FORMED, 1, 0, 0, 3, ("w1", "w2", "w3"), "", 0.05)
JOINED = Event(1.7e9, EventKind.GENERATION_FORMED, 5, 90, 2, 3, ("w1", "w3", "w4"), "", 0.35)


def running(step, **changes):
    return replace(
        STATUS, state=RunState.RUNNING, step=step, world=3, loss=2.34567, rows_per_s=1234.5, **changes
    )


def test_plain_lines():
    now, out = [100.0], io.StringIO()
    console = PlainConsole(out, clock=lambda: now[0])
    for tick in range(100):  # ten seconds, ten times a second, six steps a second from the first on
        now[0] = 100.0 + tick / 10
        step = max(0, tick - 10) * 6 // 10
        console.update(STATUS if step == 0 else running(step), 3e-4)
        if tick == 10:
            console.event(STARTED)
        if tick == 60:
            for event in (LOST, ASKED, FORMED):
                console.event(event)
    now[0] += 10
    console.update(replace(STATUS, state=RunState.WAITING, reason="too few workers"))
    console.close("stopped at step 54")
    assert out.getvalue().splitlines() == [
        "gpt: 300 steps on 1 to 4 workers, in runs/gpt",
        "step   0/300  3 of 4 workers start training",
        "step  24/300  loss 2.346   lr 0.0003    1,234 rows/s  3 of 4 workers  0:46 left",
        "step  60/300  rank 1 is gone",
        "step  60/300  going on with 2 of 4 after 0.21 s while another worker starts",
        "step   0/300  waiting: too few workers",
        "stopped at step 54",
    ]


def test_who_stands_by_and_who_leaves_is_shown():
    leaving = WorkerStatus(2, 2, 12, "n", "10.0.0.1", 7, DRAINING)
    status = running(7, standbys=1, workers=(leaving,))
    assert progress_line(status, 0.1, 5.0).endswith("3 of 4 workers  1 standing by  1 leaving  0:05 left")
    assert "3 of 4 +1 -1" in "\n".join(drawn(status))


def test_plain_lines_do_not_repeat_what_has_not_changed():
    now, out = [0.0], io.StringIO()
    console = PlainConsole(out, clock=lambda: now[0])
    for _ in range(1000):
        now[0] += 1
        console.update(running(7), 0.1)
    assert len(out.getvalue().splitlines()) == 1


def drawn(status, lr=None, left=None, told=(), width=100):
    out = RichConsole(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    out.print(panel(status, lr, left, told, width))
    return out.file.getvalue().splitlines()


def test_the_panel_shows_the_run():
    told = [("12:00:00", Sentence("rank 1 is gone, going on with 2 of 4 after 0.21 s"))]
    status = running(150, goodput=0.973, incidents=2, reason="all well", standbys=1)
    text = "\n".join(drawn(status, 3e-4, 75.0, told))
    for part in ("gpt", "running: all well", "step 150 of 300", "1:15 left", "2.346", "0.0003", "1,234",
                 "●●●○ 3 of 4 +1", "97%", "12:00:00  rank 1 is gone, going on"):  # fmt: skip
        assert part in text
    assert "attempt" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_panel_keeps_its_size(width):
    story = [("12:00:00", Sentence("word " * 50 + "\nmore"))] * NUM_SENTENCES
    sizes = {
        (len(lines), *map(len, lines))
        for lines in (
            drawn(STATUS, width=width),
            drawn(running(150, reason="x" * 300), 3e-4, 75.0, story[:2], width),
            drawn(replace(STATUS, steps=None, attempt=3, state=RunState.FAILED), None, None, story, width),
        )
    }
    assert len(sizes) == 1
    assert max(next(iter(sizes))) <= min(width, 100)


def test_a_run_of_many_workers_shows_no_dots():
    assert "●" not in "".join(drawn(replace(running(3), max=64)))


def test_the_live_console_ends_with_the_summary_and_leaves_no_thread():
    before = set(threading.enumerate())
    out = io.StringIO()
    console = LiveConsole(out)
    console.update(running(3), 0.1)
    console.event(LOST)
    console.close("done [with] brackets")
    assert out.getvalue().endswith("done [with] brackets\n")
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_lines_where_nobody_watches():
    assert isinstance(make_console(io.StringIO()), PlainConsole)


def test_a_start_is_no_part_of_the_pace():
    pace = Pace()
    for second in range(60):
        pace.see(float(second), replace(STATUS, step=314))
    for second in range(60, 65):
        pace.see(float(second), running(314 + 10 * (second - 60)))
    assert pace.seconds_left(64.0, 354, 454) == 10.0


def test_pace_forgets_what_a_restore_took_back():
    pace = Pace()
    for second in range(10):
        pace.see(float(second), running(10 * second))
    assert pace.seconds_left(9.0, 90, 190) == 10.0
    pace.see(10.0, running(50))
    assert pace.seconds_left(10.0, 50, 190) is None
    pace.see(11.0, running(60))
    assert pace.seconds_left(11.0, 60, 190) == 13.0


@pytest.mark.parametrize("kind", list(EventKind))
def test_every_event_is_told_in_words_or_not_at_all(kind):
    sentence = Narrator().tell(Event(1.0, kind, 1, 5, 2, 2, ("w1",), "why"), 3)
    assert sentence is None or ("_" not in sentence.text and "generation" not in sentence.text)


def story(*events):
    narrator = Narrator()
    told = (narrator.tell(event, 4) for event in events)
    return [(sentence.text, sentence.continues) for sentence in told if sentence is not None]


def test_the_story_of_a_loss():
    assert story(STARTED, LOST, ASKED, FORMED, JOINED) == [
        ("3 of 4 workers start training", False),
        ("rank 1 is gone", False),
        ("going on with 2 of 4 after 0.21 s while another worker starts", True),
        ("a worker joined, going on with 3 of 4 after 0.35 s", False),
    ]


def test_the_story_of_a_hang():
    hang = replace(LOST, kind=EventKind.HANG, reason="Rank 1 computes.", world_after=3, seconds=12.3)
    expelled = replace(LOST, reason="rank 1 computes")
    assert story(STARTED, hang, expelled, ASKED, FORMED) == [
        ("3 of 4 workers start training", False),
        ("no step for 12.30 s: Rank 1 computes.", False),
        ("rank 1 computes", False),
        ("going on with 2 of 4 after 0.21 s while another worker starts", True),
    ]
    assert [(i.event.kind, i.recovery_s) for i in incidents([hang, FORMED])] == [(EventKind.HANG, 0.2084)]


def test_several_requests_are_one_sentence():
    assert story(ASKED, ASKED, STARTED, ASKED, ASKED, ASKED) == [
        ("3 of 4 workers start training", False),
        ("asking Ray for another worker", False),
    ]


def test_a_standby_s_death_interrupts_nobody():
    standby = replace(LOST, world_after=3, reason="standby is gone: x")
    assert story(STARTED, standby, replace(JOINED, world_before=3, world_after=5)) == [
        ("3 of 4 workers start training", False),
        ("standby is gone", False),
        ("2 workers joined, going on with 5 of 4 after 0.35 s", False),
    ]


def test_a_task_s_traceback_is_told_whole_in_lines_and_in_short_in_the_panel():
    error = Event(1.0, EventKind.TASK_ERROR, 1, 5, 2, 2, ("w1",), "rank 0: ValueError: no\nTraceback ...")
    sentence = Narrator().tell(error, 2)
    assert sentence.text == "the job's code failed on rank 0: ValueError: no\nTraceback ..."
    assert sentence.tone is Tone.BAD
    assert "Traceback" not in "".join(drawn(STATUS, told=[("12:00:00", sentence)]))


def ended(folder, **changes):
    """A run's folder as its driver leaves it; the status before the last."""
    status = running(2, storage=str(folder), steps=2)
    record = StepRecord(
        step=0, epoch=0, loss=0.5, lr=0.1, grad_norm=0.3, rows=1000, world=2, generation=1, attempt=1,
        step_s=0.5, data_s=0.05, compute_s=0.3, reduce_s=0.1, state_digest=None, rows_digest="ab", time=100.0,
    )  # fmt: skip
    StepLog(folder / STEPS).append([replace(record, step=1, loss=4.0), replace(record, step=2)])
    EventLog(folder / EVENTS).append([LOST, FORMED])
    writer = StatusWriter(folder)
    writer.write(replace(status, state=RunState.FINISHED, workers=(), world=0) if not changes else
                 replace(status, **changes), now=True)  # fmt: skip
    writer.close()
    return status


def test_the_last_word(tmp_path):
    out = io.StringIO()
    console = PlainConsole(out)
    console.update(ended(tmp_path))
    console.close("finished\nthe tracker lacks 3 points")
    assert out.getvalue().splitlines()[1:] == [
        "finished   at step 2 of 2",
        "loss       4 -> 0.5",
        "rows       2,000",
        "incidents  1, regrouped within 0.21 s",
        f"run        {tmp_path}",
        f"look       worldline report {tmp_path}",
        "the tracker lacks 3 points",
    ]


def test_a_failure_says_why(tmp_path):
    out = io.StringIO()
    console = PlainConsole(out)
    console.update(ended(tmp_path, state=RunState.FAILED, reason="no progress"))
    console.close("failed")
    assert out.getvalue().splitlines()[-1] == "failed     at step 2 of 2: no progress"


def test_a_stop_says_how_to_go_on(tmp_path):
    out = io.StringIO()
    console = PlainConsole(out)
    console.update(ended(tmp_path, state=RunState.STOPPED, reason="SIGTERM"))
    console.close("stopped")
    last = out.getvalue().splitlines()[-1]
    assert last == "stopped    at step 2 of 2: SIGTERM; run the same command again to go on"


def test_another_driver_s_run_is_not_summed_up(tmp_path):
    out = io.StringIO()
    console = PlainConsole(out)
    console.update(replace(ended(tmp_path), attempt=7))
    console.close("stopped: another driver has the run")
    assert out.getvalue().splitlines()[1:] == ["stopped: another driver has the run"]


def test_the_live_console_joins_what_belongs_together(tmp_path):
    out = io.StringIO()
    console = LiveConsole(out)
    console.update(ended(tmp_path), 0.1)
    for event in (STARTED, LOST, ASKED, FORMED):
        console.event(event)
    console.close("finished")
    clock = time.strftime("%H:%M:%S", time.localtime(1.7e9))
    assert f"{clock}  rank 1 is gone, going on with 2 of 4 after 0.21 s" in out.getvalue()
    assert "rows       2,000" in out.getvalue()


def test_durations():
    assert [duration(s) for s in (None, 0, 59.6, 3599, 3600, 90061)] == [
        "-", "0:00", "1:00", "59:59", "1:00:00", "25:01:01",
    ]  # fmt: skip
