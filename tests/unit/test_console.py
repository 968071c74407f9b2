"""What the terminal shows."""

import io
import threading
from dataclasses import replace

from rich.console import Console as RichConsole

from worldline.events import Event, EventKind
from worldline.tracking.console import (
    LiveConsole,
    Pace,
    PlainConsole,
    duration,
    make_console,
    panel,
)
from worldline.tracking.status import RunState, Status

STATUS = Status(
    run="gpt", state=RunState.STARTING, reason="", step=0, steps=300, epoch=0, attempt=1, generation=0,
    world=0, min=1, max=4, workers=(), standbys=0, loss=None, rows_per_s=None, goodput=None, incidents=0,
    mlflow_run_id=None, storage="runs/gpt",
)  # fmt: skip
LOST = Event(1.7e9, EventKind.WORKER_LOST, 3, 60, 3, 2, ("w-2",), "its process was killed by signal 9")
FORMED = Event(1.7e9, EventKind.GENERATION_FORMED, 4, 60, 3, 2, (), "", 0.1284)


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
        if tick == 60:
            console.event(LOST)
            console.event(FORMED)
    now[0] += 10
    console.update(replace(STATUS, state=RunState.WAITING, reason="too few workers"))
    console.close("finished after 300 steps")
    assert out.getvalue().splitlines() == [
        "gpt: attempt 1, step 0/300, world 1 to 4, in runs/gpt",
        "step 24/300  loss 2.346  lr 0.0003  1,234 rows/s  world 3 of 4  ETA 0:58",
        "worker_lost: step 60, generation 3, world 3 -> 2, w-2: its process was killed by signal 9",
        "generation_formed: step 60, generation 4, world 3 -> 2, 0.128 s",
        "WAITING (too few workers)  step 0/300  loss -  lr -  - rows/s  world 0 of 4  ETA -",
        "finished after 300 steps",
    ]


def test_plain_lines_do_not_repeat_what_has_not_changed():
    now, out = [0.0], io.StringIO()
    console = PlainConsole(out, clock=lambda: now[0])
    for _ in range(1000):
        now[0] += 1
        console.update(running(7), 0.1)
    assert len(out.getvalue().splitlines()) == 1


def test_the_panel_shows_the_run():
    out = RichConsole(file=io.StringIO(), width=100, color_system=None, force_terminal=False)
    out.print(panel(running(150, goodput=0.973, incidents=2, reason="all well"), 3e-4, 75.0, [LOST, FORMED]))
    text = out.file.getvalue()
    for part in ("gpt", "RUNNING", "all well", "step 150/300", "ETA 1:15", "2.346", "0.0003", "1,234",
                 "3 of 4", "97.3%", "worker_lost: step 60", "0.128 s"):  # fmt: skip
        assert part in text
    assert all(len(line) == 100 for line in text.splitlines())


def test_a_run_without_a_known_end_and_without_numbers_still_draws():
    out = RichConsole(file=io.StringIO(), width=80)
    out.print(panel(replace(STATUS, steps=None), None, None, []))
    assert "step 0" in out.file.getvalue()


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


def test_pace_forgets_what_a_restore_took_back():
    pace = Pace()
    for second in range(10):
        pace.see(float(second), 10 * second)
    assert pace.seconds_left(9.0, 90, 190) == 10.0
    pace.see(10.0, 50)
    assert pace.seconds_left(10.0, 50, 190) is None
    pace.see(11.0, 60)
    assert pace.seconds_left(11.0, 60, 190) == 13.0


def test_durations():
    assert [duration(s) for s in (None, 0, 59.6, 3599, 3600, 90061)] == [
        "-", "0:00", "1:00", "59:59", "1:00:00", "25:01:01",
    ]  # fmt: skip
