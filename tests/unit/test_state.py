"""Training state: after a load into a freshly built task the training goes on with the same bits."""

import hashlib
import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from worldline.worker.encoding import canonical_json, decode, decode_inline, encode, encode_inline
from worldline.worker.state import StateError, TrainState, digest, snapshot


@pytest.fixture(autouse=True)
def one_thread():
    """The models are tiny: threads cost more than they give, and much more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """BatchNorm, a convolution, tied weights, a frozen parameter, buffers of both kinds."""

    def __init__(self, dtype=torch.float32, layout=torch.contiguous_format):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.grid = nn.Conv2d(1, 2, 2)
        self.norm = nn.BatchNorm1d(4)
        self.embed = nn.Linear(4, 6, bias=False)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("table", torch.arange(6), persistent=False)
        self.to(dtype)
        self.grid.to(memory_format=layout)

    def forward(self, x):
        self.calls += 1
        hidden = self.norm(self.conv(x)).mean(2) * self.scale
        grid = self.grid(x.reshape(-1, 1, 3, 3)).mean((1, 2, 3))
        return self.out(hidden) + self.embed(hidden.tanh()) + grid[:, None]


def build(optimizer, scheduler=None, seed=0, **options):
    torch.manual_seed(seed)
    model = Net(**options)
    built = optimizer(model.parameters())
    return model, built, scheduler and scheduler(built)


def train(built, steps):
    model, optimizer, scheduler = built
    losses = []
    for step in steps:
        x = torch.randn(8, 1, 9, generator=torch.Generator().manual_seed(step)).to(model.scale.dtype)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def stored(state):
    """What a checkpoint gives back: tensors that share nothing, and a tree that was JSON text."""
    return snapshot(state.tensors()), json.loads(json.dumps(state.meta(), allow_nan=False))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


class Warmup:
    """A callable object: LambdaLR keeps its attributes in its state."""

    def __init__(self):
        self.factors = (0.5, 0.25)

    def __call__(self, step):
        return self.factors[step % 2]


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 3)),
    "callable": lambda o: lr_scheduler.LambdaLR(o, Warmup()),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 3)], optimizer=o
    ),
}


def check_continues(optimizer, scheduler, steps, **options):
    original = build(optimizer, scheduler, **options)
    train(original, range(steps))
    state = TrainState(*original)
    tensors, meta = stored(state)

    fresh = build(optimizer, scheduler, seed=1, **options)
    train(fresh, range(90, 92))  # a joiner that has been used before must not keep any of it
    loaded = TrainState(*fresh)
    loaded.load(tensors, meta)
    assert digest(loaded.tensors(), loaded.meta()) == digest(tensors, meta)
    for tensor in tensors.values():
        tensor.zero_()  # nothing may refer to what was loaded

    assert train(fresh, range(10, 13)) == train(original, range(10, 13))
    assert digest(loaded.tensors(), loaded.meta()) == digest(state.tensors(), state.meta())


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_continue_with_the_same_bits(name, steps):
    check_continues(OPTIMIZERS[name], None, steps)


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
def test_schedulers_continue_with_the_same_bits(name, steps):
    check_continues(OPTIMIZERS["momentum"], SCHEDULERS[name], steps)


def test_tensor_learning_rate_under_a_scheduler():
    check_continues(OPTIMIZERS["adam-tensor-lr"], SCHEDULERS["cosine"], 5)


@pytest.mark.parametrize("name", ["momentum", "adamw-foreach", "adamw-fused"])
def test_bf16_parameters(name):
    check_continues(OPTIMIZERS[name], None, 5, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["momentum", "adamw-fused"])
def test_channels_last_keeps_its_layout(name):
    check_continues(OPTIMIZERS[name], None, 5, layout=torch.channels_last)


def test_state_that_lives_in_another_dtype_than_the_parameter_keeps_it():
    model, optimizer, _ = build(OPTIMIZERS["momentum"], dtype=torch.bfloat16)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "momentum_buffer": torch.randn(parameter.shape) + 1e-3,
            "step": torch.tensor(3.0),
        }
    tensors, meta = stored(TrainState(model, optimizer))
    other = build(OPTIMIZERS["momentum"], dtype=torch.bfloat16, seed=1)
    TrainState(*other).load(tensors, meta)
    buffer = other[1].state[other[0].scale]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    assert torch.equal(buffer, optimizer.state[model.scale]["momentum_buffer"])


def test_nested_optimizer_state():
    def lbfgs(parameters):
        return torch.optim.LBFGS([p for p in parameters if p.requires_grad], history_size=3)

    model, optimizer, _ = build(lbfgs)
    x = torch.randn(8, 1, 9)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    tensors, meta = stored(TrainState(model, optimizer))
    assert any("/old_dirs/0" in name for name in tensors)
    loaded = TrainState(*build(lbfgs, seed=1))
    loaded.load(tensors, meta)
    assert digest(loaded.tensors(), loaded.meta()) == digest(tensors, meta)


def test_names_views_and_identity():
    model, optimizer, _ = build(OPTIMIZERS["adamw-foreach"])
    state = TrainState(model, optimizer)
    tensors = state.tensors()
    assert {name for name in tensors if name.startswith("model/")} == {
        *(f"model/{layer}.{kind}" for layer in ("conv", "grid", "norm") for kind in ("weight", "bias")),
        *(f"model/norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        "model/embed.weight",
        "model/scale",
        "model/frozen",
        "model/calls",
    }
    assert tensors["model/scale"].data_ptr() == model.scale.data_ptr()
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    state.load(*stored(state))
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    train((model, optimizer, None), range(1))
    assert {"optimizer/scale/step", "optimizer/scale/exp_avg"} <= state.tensors().keys()
    assert "optimizer/frozen/step" not in state.tensors()


def test_snapshot_does_not_change_with_the_next_step():
    built = build(OPTIMIZERS["momentum"])
    state = TrainState(*built)
    train(built, range(2))
    taken, meta = snapshot(state.tensors()), state.meta()
    before = digest(taken, meta)
    train(built, range(2, 4))
    assert digest(taken, meta) == before
    assert digest(state.tensors(), state.meta()) != before


def test_extra_state_of_modules():
    class Scaled(nn.Linear):
        history = (1, torch.tensor([1.0, 2.0]))

        def get_extra_state(self):
            return {"history": self.history}

        def set_extra_state(self, state):
            self.history = state["history"]

    def state(history):
        model = nn.Sequential(Scaled(2, 2))
        model[0].history = history
        return model, TrainState(model, torch.optim.SGD(model.parameters()))

    _, source = state((7, torch.tensor([3.0, 4.0])))
    model, target = state((1, torch.tensor([0.0])))
    target.load(*stored(source))
    assert model[0].history[0] == 7
    assert torch.equal(model[0].history[1], torch.tensor([3.0, 4.0]))


class TestMisfit:
    def state(self, model, optimizer=torch.optim.SGD, scheduler=None):
        built = optimizer(model.parameters(), lr=0.1)
        return TrainState(model, built, scheduler and scheduler(built))

    def test_everything_that_changed_is_named_and_nothing_is_loaded(self):
        source = self.state(nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2)}))
        target = self.state(nn.ModuleDict({"a": nn.Linear(2, 4), "c": nn.Linear(2, 2)}))
        before = digest(target.tensors(), target.meta())
        with pytest.raises(StateError) as caught:
            target.load(*stored(source))
        for part in (
            "missing model/c.weight",
            "unexpected model/b.bias",
            "model/a.weight is float32[3, 2] in the state and float32[4, 2] in the model",
            "definition",
        ):
            assert part in str(caught.value)
        assert digest(target.tensors(), target.meta()) == before

    def test_dtype(self):
        with pytest.raises(StateError, match=r"model/weight is float32\[2, 2\].* and bfloat16"):
            self.state(nn.Linear(2, 2).bfloat16()).load(*stored(self.state(nn.Linear(2, 2))))

    def test_optimizer_and_scheduler(self):
        source = self.state(nn.Linear(2, 2))
        adam = self.state(nn.Linear(2, 2), torch.optim.Adam, SCHEDULERS["cosine"])
        with pytest.raises(
            StateError, match=r"optimizer SGD became Adam.*scheduler None became CosineAnnealingLR"
        ):
            adam.load(*stored(source))

    def test_missing_optimizer_tensor(self):
        built = build(OPTIMIZERS["momentum"])
        train(built, range(1))
        tensors, meta = stored(TrainState(*built))
        del tensors["optimizer/scale/momentum_buffer"]
        with pytest.raises(StateError, match="missing optimizer/scale/momentum_buffer"):
            TrainState(*built).load(tensors, meta)

    def test_parameter_outside_the_model(self):
        with pytest.raises(StateError, match=r"group 0 .*shape \(3,\).* not in the model"):
            TrainState(nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(3))]))

    def test_value_that_cannot_be_stored_is_named(self):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.bias] = {"history": [1, {"hook": len}]}
        with pytest.raises(
            StateError, match=r"optimizer/bias/history/1/hook: it is a builtins.builtin_function"
        ):
            TrainState(model, optimizer).meta()


class TestDigest:
    def test_every_part_counts(self):
        base = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}
        variants = [
            (base, {}),
            (base, {"x": 1}),
            ({"a": base["a"]}, {}),
            ({"a": base["a"], "c": base["b"]}, {}),
            ({"a": base["a"].reshape(1, 2), "b": base["b"]}, {}),
            ({"a": base["a"].view(torch.int32), "b": base["b"]}, {}),
            ({"a": torch.nextafter(base["a"], torch.tensor(9.0)), "b": base["b"]}, {}),
            ({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}, {"y": -0.0}),
            (base, {"y": 0.0}),
        ]
        assert len({digest(tensors, meta) for tensors, meta in variants}) == len(variants)

    def test_layout_and_order_do_not_count(self):
        matrix = torch.arange(6.0).reshape(2, 3)
        one = digest({"a": matrix, "b": torch.ones(1)}, {"x": 1, "y": 2})
        other = digest({"b": torch.ones(1), "a": matrix.t().contiguous().t()}, {"y": 2, "x": 1})
        assert one == other

    def test_golden(self):
        tensors = {
            "w": torch.tensor([[1.0, -2.5]], dtype=torch.bfloat16),
            "n": torch.tensor(7),
            "e": torch.empty(0),
        }
        content = (
            b'["e", "float32", [0]]'
            + b'["n", "int64", []]\x07\0\0\0\0\0\0\0'
            + b'["w", "bfloat16", [1, 2]]\x80\x3f\x20\xc0'
            + b'{"lr":0.1}'
        )
        assert digest(tensors, {"lr": 0.1}) == hashlib.sha256(content).hexdigest()

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.int8, torch.float16, torch.float64, torch.complex64, torch.float8_e4m3fn]
    )
    def test_any_dtype(self, dtype):
        assert digest({"a": torch.ones(3).to(dtype)}, {}) != digest({"a": torch.zeros(3).to(dtype)}, {})


# The exact encoding of Python values.

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.floats().map(np.float64)
    | st.integers(-100, 100).map(np.int16)
)
keys = (
    st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.sampled_from(["$tuple", "$", "lr"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
)


def same(a, b):
    """Equal in type, order and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b


@given(values)
def test_encoding_round_trips_exactly(value):
    tree = encode(value, "value", encode_inline)
    text = json.dumps(tree, allow_nan=False)
    assert same(decode(json.loads(text), "value", decode_inline), value)
    assert canonical_json(tree) == canonical_json(json.loads(text))


def test_plateau_like_state_and_inline_tensors():
    value = {
        "best": math.inf,
        "lrs": [torch.tensor(0.1, dtype=torch.float64), torch.empty(0, 2, dtype=torch.bfloat16)],
        "worst": -math.inf,
        "none": math.nan,
    }
    tree = encode(value, "scheduler", encode_inline)
    assert same(decode(json.loads(json.dumps(tree)), "", decode_inline), value)


def test_an_unknown_form_is_refused():
    with pytest.raises(StateError, match=r"scheduler/x is written as \$set"):
        decode({"x": {"$set": [1]}}, "scheduler", decode_inline)


@pytest.mark.parametrize("value", [{1, 2}, np.ones(2), lambda: 0, torch.float32, type("Sub", (dict,), {})()])
def test_what_cannot_be_told_exactly_is_refused(value):
    with pytest.raises(StateError, match="cannot store a/b/0"):
        encode({"b": [value]}, "a", encode_inline)
