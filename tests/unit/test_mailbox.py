"""What a worker has to say is kept until it is fetched, and each step can be asked for later."""

import threading

from worldline.events import StepRecord
from worldline.worker.mailbox import KEPT_STEPS, Mailbox
from worldline.worker.orders import GenerationFormed

FORMED = GenerationFormed(1, 0.0, 0.0)


def record(step):
    return StepRecord(step, 0, 1.0, 0.1, 1.0, 8, 1, 1, 1, 0.0, 0.0, 0.0, 0.0, None, "", 0.0)


def test_only_a_narrator_posts_steps_but_all_keep_them():
    mailbox = Mailbox()
    mailbox.post_step(record(1))
    mailbox.narrate(True)
    mailbox.post(FORMED)
    mailbox.post_step(record(2))
    assert mailbox.fetch(0) == (FORMED, record(2))
    assert mailbox.fetch(0) == ()
    assert mailbox.steps_after(0) == (record(1), record(2))
    assert mailbox.steps_after(1) == (record(2),)


def test_a_fetch_waits_for_what_comes():
    mailbox = Mailbox()
    fetched = []
    thread = threading.Thread(target=lambda: fetched.append(mailbox.fetch(30)))
    thread.start()
    mailbox.post(FORMED)
    thread.join()
    assert fetched == [(FORMED,)]


def test_steps_beyond_where_the_line_goes_on_are_forgotten():
    mailbox = Mailbox()
    mailbox.narrate(True)
    for step in (1, 2, 3):
        mailbox.post_step(record(step))
    mailbox.post(FORMED)
    mailbox.forget_after(2)
    assert mailbox.steps_after(0) == (record(1), record(2))
    assert mailbox.fetch(0) == (record(1), record(2), FORMED)


def test_the_last_steps_are_kept():
    mailbox = Mailbox()
    for step in range(KEPT_STEPS + 2):
        mailbox.post_step(record(step))
    mailbox.forget_after(KEPT_STEPS + 2)
    mailbox.post_step(record(KEPT_STEPS + 2))
    assert [r.step for r in mailbox.steps_after(0)] == list(range(3, KEPT_STEPS + 3))
