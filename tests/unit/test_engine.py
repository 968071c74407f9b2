"""The step: the same bits for every world, the numbers of an independent computation, whole or not at all."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit import tiny
from tests.unit.ranks import everywhere, peers
from tests.unit.tiny import Case
from torch import nn

from worldline.data.loader import Loader
from worldline.task import Loss, Task
from worldline.worker.engine import Engine, NonFinite, TornState
from worldline.worker.member import EngineSettings, Membership
from worldline.worker.state import TrainState, digest
from worldline.world import assign

STEPS = 5
UNEVEN = Case()  # the short step's shards have 3 rows (two micro-batches) or 2 (one)
EMPTY = Case(rows=8 * 4 + 3)  # the short step's shards have 1 row or none


@pytest.fixture(autouse=True)
def one_thread(restore_process):
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (UNEVEN, (2, 3, 4, 5, 8)),
        (replace(EMPTY, loss="weighted"), (2, 3, 4, 5, 8)),
        (replace(UNEVEN, bf16=True, clip=None), (3,)),
        (replace(EMPTY, skip_nonfinite=True, nan_row=5), (4,)),
    ],
    ids=["uneven", "empty", "bf16", "nan"],
)
def test_every_world_computes_the_same_bits(case, sizes):
    with peers(max(sizes)) as processes:
        (expected,) = everywhere(processes[:1], tiny.run_steps, case, STEPS)
        for size in sizes:
            for records in everywhere(processes[:size], tiny.run_steps, case, STEPS):
                assert records == expected
    assert [record[1] for record in expected] == [0, 0, 1, 1, 2]
    assert [record[2] for record in expected] == [32, case.rows - 32] * 2 + [32]
    assert len({record[5] for record in expected}) == STEPS
    skipped = [record[4] for record in expected]
    assert any(skipped) == (case.nan_row >= 0)
    if case.loss == "weighted":
        assert {name for record in expected for name in record[6]} >= {"first", "other"}


def test_same_batches_gives_the_same_rows_and_nearly_the_same_numbers():
    case = replace(UNEVEN, loss="weighted", bitwise=False)
    with peers(3) as processes:
        plain = processes[0].call(tiny.run_plain, case, STEPS)
        (bitwise,) = everywhere(processes[:1], tiny.run_steps, replace(case, bitwise=True), STEPS)
        for size in (1, 2, 3):
            everyone = everywhere(processes[:size], tiny.run_steps, case, STEPS)
            assert all(records == everyone[0] for records in everyone)
            for record, reference, (loss, norm) in zip(everyone[0], bitwise, plain, strict=True):
                assert record[:4] == reference[:4]
                numbers = {name: float.fromhex(value) for name, value in record[6].items()}
                exact = {name: float.fromhex(value) for name, value in reference[6].items()}
                assert numbers == pytest.approx(exact, rel=1e-5)
                assert numbers["loss"] == pytest.approx(loss, rel=1e-5)
                assert numbers["grad_norm"] == pytest.approx(norm, rel=1e-5)


# In this process, in a world of one


class Linear(Task):
    """A linear model in float64. spoil(model): what befalls it in `loss`."""

    def __init__(self, loss="mean", optimizer=None, spoil=lambda model: None):
        self.kind = loss
        self.optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.spoil = spoil

    def build_model(self):
        return nn.Linear(9, 4).double()

    def build_optimizer(self, model):
        return self.optimizer(model.parameters())

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def loss(self, model, batch):
        x, y = batch["x"].double()[:, 0], batch["y"].double()
        self.spoil(model)
        each = (model(x) - y).square().sum(1)
        return each.mean() if self.kind == "mean" else Loss((each * weights(y)).sum(), weights(y).sum())


def weights(y):
    """Of each row; of some none."""
    return (y[:, 0] > 0).double() * 3


class Alone:
    """An engine in a world of one, around any task."""

    def __init__(self, task, rows=51, model=None, skip_nonfinite=False):
        torch.manual_seed(0)
        self.plan = tiny.plan_of(rows, 4)
        self.model = model if model is not None else task.build_model()
        self.optimizer = task.build_optimizer(self.model)
        self.scheduler = task.build_scheduler(self.optimizer)
        self.loader = Loader(self.plan, tiny.Rows(self.plan), 2)
        settings = EngineSettings(tiny.SHARDS, 3, None, skip_nonfinite, False, True)
        self.engine = Engine(
            task,
            self.model,
            self.optimizer,
            self.scheduler,
            self.plan,
            self.loader,
            settings,
            torch.device("cpu"),
        )
        self.engine.join(Membership(1, 1, 0, assign(tiny.SHARDS, 1), None), lambda: False)
        self.state = TrainState(self.model, self.optimizer, self.scheduler)

    def step(self, digest=lambda step: None):
        return self.engine.step(halt=False, digest=digest).record

    def digest(self):
        return digest(self.state.tensors(), self.state.meta())

    def batch(self, step):
        """The whole global batch in one piece."""
        spans = [(shard, span) for shard in range(tiny.SHARDS) for span in self.plan.window_span(step, shard)]
        epoch = self.plan.locate(step)[0]
        ids = [self.plan.window(epoch, shard, i).row_ids[a:b] for shard, (i, a, b) in spans]
        columns = tiny.columns(np.concatenate(ids))
        return {name: torch.from_numpy(column) for name, column in columns.items()}


@pytest.fixture
def alone():
    started = []

    def start(*args, **options):
        started.append(Alone(*args, **options))
        return started[-1]

    yield start
    for each in started:
        each.loader.close()


@pytest.mark.parametrize("rows", [51, 35])
@pytest.mark.parametrize("kind", ["mean", "weighted"])
def test_each_step_is_that_of_the_whole_batch(alone, kind, rows):
    """The remainder of an epoch is normalised by its real number of rows; the schedule ticks once a step."""
    one = alone(Linear(kind), rows)
    torch.manual_seed(0)
    model = nn.Linear(9, 4).double()
    for step in range(1, 6):
        batch = one.batch(step)
        x, y = batch["x"].double()[:, 0], batch["y"].double()
        weight = torch.ones(len(x), dtype=torch.float64) if kind == "mean" else weights(y)
        loss = ((model(x) - y).square().sum(1) * weight).sum() / weight.sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        lr = 0.1 * 0.5 ** ((step - 1) // 2)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= lr * gradient
        record = one.step()
        assert record.rows == len(x)
        assert record.lr == pytest.approx(lr, abs=1e-15)
        assert record.loss == pytest.approx(float(loss.detach()), abs=1e-9)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        assert record.grad_norm == pytest.approx(norm, abs=1e-9)
        for ours, theirs in zip(one.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_a_row_that_is_not_finite_is_reported_or_its_update_left_out(alone):
    """Skipping leaves weights and buffers as they are; the schedule and the rows go on."""
    for skip in (False, True):
        one = alone(tiny.Tiny(Case(nan_row=5), lambda kind: None), skip_nonfinite=skip)
        (bad,) = [step for step in (1, 2) if 5 in one.batch(step)["id"]]
        for _ in range(bad - 1):
            one.step()
        before = {name: tensor.clone() for name, tensor in one.model.state_dict().items()}
        scheduled, whole = one.scheduler.last_epoch, one.digest()
        if not skip:
            with pytest.raises(NonFinite, match=f"the loss is not finite at step {bad} .logical shards"):
                one.step()
            assert (one.digest(), one.engine.completed) == (whole, bad - 1)
            continue
        record = one.step()
        assert (record.skipped, record.step, record.rows) == (True, bad, len(one.batch(bad)["id"]))
        assert math.isnan(record.loss)
        after = one.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert one.scheduler.last_epoch == scheduled + 1
        for step in range(bad + 1, bad + 4):
            assert one.step().skipped == (5 in one.batch(step)["id"])


def test_a_gradient_that_overflows_is_not_finite(alone):
    class Steep(Linear):
        def loss(self, model, batch):
            return super().loss(model, batch) * 1e200

    with pytest.raises(NonFinite, match="the gradient norm is not finite at step 1"):
        alone(Steep()).step()


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
@pytest.mark.parametrize("where", ["optimizer", "scheduler", "digest"])
def test_an_error_after_the_update_began_leaves_no_state(alone, where, error):
    one = alone(Linear())

    def fail(*args):
        raise error("no memory left")

    if where != "digest":
        getattr(one, where).step = fail
    with pytest.raises(TornState, match="the update of step 1 failed: no memory left"):
        one.step(fail if where == "digest" else lambda step: None)
    assert one.engine.completed == 0


def test_an_error_in_the_task_leaves_the_state_whole(alone):
    """Also what forward did to buffers, and what was accumulated before, is gone."""
    faults = {"after": None}

    def point(kind):
        if faults["after"] is not None:
            faults["after"] -= 1
            if faults["after"] < 0:
                raise ValueError(f"wrong in {kind}")

    undisturbed = alone(tiny.Tiny(Case(loss="weighted"), lambda kind: None))
    one = alone(tiny.Tiny(Case(loss="weighted"), point))
    for _ in range(3):
        whole = one.digest()
        for after in range(0, 24, 5):
            faults["after"] = after
            with pytest.raises(ValueError, match="wrong in"):
                one.step()
            assert one.digest() == whole
        faults["after"] = None
        assert tiny.essence(one.step(lambda _: one.digest())) == tiny.essence(
            undisturbed.step(lambda _: undisturbed.digest())
        )


def test_a_parameter_nobody_used_has_no_gradient(alone):
    """As in plain PyTorch, AdamW's decay does not touch it and makes no state for it."""
    one = alone(tiny.Tiny(Case(), lambda kind: None))
    before = one.model.unused.clone()
    one.step()
    assert one.model.unused.grad is None
    assert torch.equal(one.model.unused, before)
    assert one.model.unused not in one.optimizer.state
    assert one.model.hidden.weight in one.optimizer.state


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (lambda each: each, r"Wrong.loss must return a scalar tensor or a worldline.Loss, not Tensor\[2\]"),
        (lambda each: 1.5, "loss must return a scalar tensor"),
        (lambda each: Loss(each.sum(), 0.0), "the loss weights of step 1 add up to 0"),
    ],
    ids=["rows", "number", "weightless"],
)
def test_a_loss_of_the_wrong_kind_is_refused(alone, value, error):
    class Wrong(Linear):
        def loss(self, model, batch):
            return value(model(batch["x"].double()[:, 0]).sum(1))

    with pytest.raises((TypeError, ValueError), match=error):
        alone(Wrong()).step()


def test_a_mean_in_bf16_is_weighted_exactly(alone):
    """257 rows are no number of bf16: the product is taken in fp32."""

    class Half(Linear):
        def loss(self, model, batch):
            return (model.weight.sum() * 0 + 1).bfloat16()

    one = alone(Half())
    assert one.step().loss == 1.0
    batch = type("Batch", (), {"columns": {}, "row_ids": range(257)})
    assert float(one.engine._reduction._forward(batch).sum.detach()) == 257.0


def test_rows_that_are_not_those_planned_are_an_error(alone):
    one = alone(Linear())
    batches = one.loader.batches
    one.loader.batches = lambda step, shard, **_: batches(step, shard)[:1]
    with pytest.raises(RuntimeError, match="shard 0 of step 1: 2 rows came, 4 are planned"):
        one.step()


def test_results_do_not_depend_on_what_the_process_drew_before(alone):
    first, second = (alone(tiny.Tiny(Case(), lambda kind: None)) for _ in range(2))
    expected = [tiny.essence(first.step(lambda _: first.digest())) for _ in range(3)]
    for record in expected:
        torch.rand(5)
        np.random.rand(3)
        assert tiny.essence(second.step(lambda _: second.digest())) == record
