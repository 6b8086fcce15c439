"""Optimisers against torch's, over many steps, with drawn settings."""

import json
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl import optim
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor, default_device
from minidl.testing import assert_within

SHAPES = [(30, 5), (7,), (), (3, 4, 2), (129,)]


def values(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(default_device())


def leaves(dtype=torch.float64, shapes=SHAPES):
    return [Tensor(values(*shape, seed=i, dtype=dtype), requires_grad=True) for i, shape in enumerate(shapes)]


def give(params, seed, scale=1.0, only=None):
    """Gradients: rows for the first parameter, dense for the others. Returns all of them dense."""
    given_ = []
    for i, param in enumerate(params):
        grad = values(*param.shape, seed=1000 * seed + i, dtype=torch.float64).to(param.dtype) * scale
        if only is not None and i not in only:
            param.grad = None
            given_.append(None)
            continue
        if i == 0:
            rows = torch.randperm(30, generator=torch.Generator().manual_seed(seed))[: 3 + seed % 9].to(grad.device)
            param._grad = RowGrad(rows.to(torch.int32), grad[rows], (30, 5))
            grad = param._grad.dense()
        else:
            param.grad = Tensor(grad)
        given_.append(grad)
    return given_


def shares(low, high):
    return st.floats(low, high, allow_nan=False).map(lambda v: round(v, 4))


LR = shares(1e-3, 0.3)
DECAY = st.sampled_from([0.0, 0.01, 0.3])
EPS = st.sampled_from([1e-8, 1e-4])
BETAS = st.tuples(shares(0.0, 0.99), shares(0.5, 0.9999))
ADAM = {
    "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "amsgrad": st.booleans(), "maximize": st.booleans(),
}  # fmt: skip
WITHOUT_AMSGRAD = {key: value for key, value in ADAM.items() if key != "amsgrad"}
SETTINGS = {
    "SGD": st.fixed_dictionaries(
        {
            "lr": LR, "momentum": st.sampled_from([0.0, 0.5, 0.9]), "dampening": st.sampled_from([0.0, 0.3]),
            "weight_decay": DECAY, "nesterov": st.booleans(), "maximize": st.booleans(),
        }
    ).map(lambda s: {**s, "nesterov": s["nesterov"] and s["momentum"] > 0 and s["dampening"] == 0}),
    "RMSprop": st.fixed_dictionaries(
        {
            "lr": LR, "alpha": shares(0.5, 0.999), "eps": EPS, "weight_decay": DECAY,
            "momentum": st.sampled_from([0.0, 0.9]), "centered": st.booleans(), "maximize": st.booleans(),
        }
    ),
    "Adagrad": st.fixed_dictionaries(
        {
            "lr": LR, "lr_decay": st.sampled_from([0.0, 0.1]), "weight_decay": DECAY, "eps": EPS,
            "initial_accumulator_value": st.sampled_from([0.0, 0.5]), "maximize": st.booleans(),
        }
    ),
    "Adam": st.fixed_dictionaries({**ADAM, "decoupled_weight_decay": st.booleans()}),
    "AdamW": st.fixed_dictionaries(ADAM),
    "Adamax": st.fixed_dictionaries(WITHOUT_AMSGRAD),
    "RAdam": st.fixed_dictionaries({**WITHOUT_AMSGRAD, "decoupled_weight_decay": st.booleans()}),
    "NAdam": st.fixed_dictionaries(
        {
            **WITHOUT_AMSGRAD, "decoupled_weight_decay": st.booleans(),
            "momentum_decay": st.sampled_from([0.0, 0.004, 0.7]),
        }
    ),
}  # fmt: skip
DEFAULTS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 0.01},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "RAdam": {"lr": 0.01, "betas": (0.9, 0.8)},
    "NAdam": {"lr": 0.01},
}
NARROW = {"NAdam": 1e-6}  # torch has the product of the momenta in float32


@pytest.mark.parametrize("name", SETTINGS)
def test_many_steps_as_torch(name):
    """float64, with rows as gradient, clipping and parameters that miss some steps."""

    @settings(max_examples=max(4, settings.default.max_examples // 2))
    @given(SETTINGS[name], st.sampled_from([None, 0.5, 5.0]), st.integers(0, 99), st.booleans())
    def run(numbers, max_norm, seed, gaps):
        params = leaves()
        theirs = [torch.nn.Parameter(p.data.cpu().clone()) for p in params]
        ours = getattr(optim, name)(params, max_norm=max_norm, **numbers)
        peer = getattr(torch.optim, name)(theirs, foreach=False, **numbers)
        travelled = 0.0
        for turn in range(6):
            only = None if not gaps or turn % 3 else {0, 1, 4}
            for their, grad in zip(theirs, give(params, seed + turn, only=only), strict=True):
                their.grad = None if grad is None else grad.cpu().clone()
            norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm or math.inf)
            before = [t.detach().clone() for t in theirs]
            peer.step()
            ours.step()
            travelled += max(float((t.detach() - b).abs().max()) for t, b in zip(theirs, before, strict=True))
            assert float(ours.grad_norm) == pytest.approx(float(norm), rel=1e-14)
        for our, their in zip(params, theirs, strict=True):
            # A relative error of some 100 u in each step: 1e-12 of the way there is what 6 steps may add up to.
            assert_within(our.data, their.detach(), NARROW.get(name, 1e-12) * (travelled + their.detach().abs()))

    run()


@pytest.mark.parametrize("name", SETTINGS)
def test_float32_as_torch(name):
    """Both round in every step: apart by no more than the roundings of both, 16 each, of all that was travelled."""
    params = leaves(torch.float32)
    theirs = [torch.nn.Parameter(p.data.cpu().clone()) for p in params]
    ours = getattr(optim, name)(params, **DEFAULTS[name])
    peer = getattr(torch.optim, name)(theirs, foreach=False, **DEFAULTS[name])
    travelled = [torch.zeros_like(t) for t in theirs]
    for turn in range(8):
        for their, grad in zip(theirs, give(params, turn), strict=True):
            their.grad = grad.cpu()
        before = [t.detach().clone() for t in theirs]
        peer.step()
        ours.step()
        for way, their, old in zip(travelled, theirs, before, strict=True):
            way += (their.detach() - old).abs() + ours.lr + their.detach().abs()
    for our, their, way in zip(params, theirs, travelled, strict=True):
        assert_within(our.data, their.detach(), 32 * 2.0**-24 * way.double())


def test_groups_have_numbers_of_their_own():
    params = leaves()
    theirs = [torch.nn.Parameter(p.data.cpu().clone()) for p in params]

    def groups(tensors):
        return [
            {"params": tensors[:2], "lr": 0.1, "betas": (0.5, 0.9)},
            {"params": tensors[2], "weight_decay": 0.5, "eps": 1e-3},
            {"params": tensors[3:]},
        ]

    ours, peer = optim.AdamW(groups(params), lr=0.02), torch.optim.AdamW(groups(theirs), lr=0.02, foreach=False)
    for turn in range(6):
        for their, grad in zip(theirs, give(params, turn), strict=True):
            their.grad = grad.cpu()
        if turn == 3:
            for optimizer in (ours, peer):
                optimizer.param_groups[1]["lr"] = 0.3
                optimizer.param_groups[2]["weight_decay"] = 0.0
        peer.step()
        ours.step()
    for our, their in zip(params, theirs, strict=True):
        assert_within(our.data, their.detach(), 1e-13 * (1 + their.detach().abs()))


def test_learning_rate_of_all_groups():
    params = leaves()
    optimizer = optim.SGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=0.1)
    assert optimizer.lr == 0.5
    optimizer.lr = 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    before = params[1].data.clone()
    give(params, 1)
    optimizer.step()
    assert_within(params[1].data, before - 0.25 * params[1].grad.data, 1e-15)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(name, dtype):
    """Bit for bit, through a state of tensors and numbers only."""

    def run(optimizer, params, turns, schedule):
        for turn in turns:
            give(params, turn)
            optimizer.step()
            schedule.step()

    def fresh(params):
        optimizer = getattr(optim, name)(params, max_norm=0.5, **DEFAULTS[name])
        return optimizer, optim.CosineLR(optimizer, T_max=9, warmup=2)

    whole = leaves(dtype)
    run(*(lambda o, s: (o, whole, range(8), s))(*fresh(whole)))
    first = leaves(dtype)
    optimizer, schedule = fresh(first)
    run(optimizer, first, range(5), schedule)
    state = optimizer.flat_state()
    tensors = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    rest = {key: value for key, value in state.items() if key not in tensors}
    rest, timing = json.loads(json.dumps([rest, schedule.state_dict()]))
    second = [Tensor(p.data.clone(), requires_grad=True) for p in first]
    optimizer, schedule = fresh(second)
    schedule.load_state_dict(timing)
    optimizer.load_flat_state({**tensors, **rest})
    run(optimizer, second, range(5, 8), schedule)
    for resumed, uninterrupted in zip(second, whole, strict=True):
        assert torch.equal(resumed.data, uninterrupted.data)


def test_states_that_do_not_fit():
    params = leaves()
    optimizer = optim.Adam(params)
    state = optimizer.flat_state()
    assert {"optimizer", "steps", "skipped", "exp_avg.0", "exp_avg_sq.4", "group.0.beta2"} <= state.keys()
    before = state["exp_avg.0"].clone()
    with pytest.raises(ValueError, match="the state is of 'Adam', expected 'AdamW'"):
        optim.AdamW(params).load_flat_state(state)
    with pytest.raises(ValueError, match=r"missing nothing, unknown exp_avg\.4, exp_avg_sq\.4"):
        optim.Adam(params[:4]).load_flat_state({**state, "steps": state["steps"][:4]})
    with pytest.raises(
        ValueError, match=r"state exp_avg.0 is torch.float64 \[5, 30\], expected torch.float64 \[30, 5\]"
    ):
        optimizer.load_flat_state({**state, "exp_avg.0": torch.ones(5, 30, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"lr is -1\.0, expected a number at least 0"):
        optimizer.load_flat_state({**state, "exp_avg.0": torch.ones(30, 5, dtype=torch.float64), "group.0.lr": -1.0})
    assert torch.equal(optimizer.flat_state()["exp_avg.0"], before)


ELSEWHERE = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.2},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 0.01, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "maximize": True},
    "Adamax": {"lr": 0.01, "weight_decay": 0.1},
    "RAdam": {"lr": 0.01, "betas": (0.9, 0.8), "maximize": True},
    "NAdam": {"lr": 0.01, "momentum_decay": 0.1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_state_goes_to_torch_and_back(name):
    """Three steps in torch, three here with torch's state, three in torch with ours: as nine in torch.

    The settings travel with the state, and a parameter that has had no gradient begins in any of them.
    """
    whole, there = ([torch.nn.Parameter(p.data.cpu().clone()) for p in leaves()] for _ in range(2))
    here = leaves()
    peer, first = (getattr(torch.optim, name)(p, foreach=False, **ELSEWHERE[name]) for p in (whole, there))
    ours = getattr(optim, name)(here, lr=1.0)

    def copy(sources, targets):
        for source, target in zip(sources, targets, strict=True):
            target.data.copy_(source.data)

    def run(optimizer, tensors, turns, wrap):
        for turn in turns:
            for i, (p, grad) in enumerate(zip(tensors, give(leaves(), turn), strict=True)):
                p.grad = wrap(grad) if i != 2 or turn >= 4 else None
            optimizer.step()

    def cpu(grad):
        return grad.cpu().clone()

    run(peer, whole, range(9), cpu)
    run(first, there, range(3), cpu)
    copy(there, here)
    ours.load_state_dict(first.state_dict())
    run(ours, here, range(3, 6), Tensor)
    copy(here, there)
    last = getattr(torch.optim, name)(there, lr=1.0, foreach=False)
    last.load_state_dict(ours.state_dict())
    run(last, there, range(6, 9), cpu)
    for found, exact in zip(there, whole, strict=True):
        assert_within(found.detach(), exact.detach(), NARROW.get(name, 1e-13) * (1 + exact.detach().abs()))


def test_states_of_torch_that_do_not_fit():
    optimizer = optim.Adam(leaves())
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="expected 2"):
        optim.Adam([{"params": leaves()[:2]}, {"params": leaves()[2:]}]).load_state_dict(state)
    with pytest.raises(ValueError, match="group 0 of the state has 5 parameters, expected 4"):
        optim.Adam(leaves()[:4]).load_state_dict(state)
    with pytest.raises(ValueError, match="the state is of 'Adam', expected 'Adagrad'"):
        optim.Adagrad(leaves()).load_state_dict(state)
    turned = {**state, "state": {0: {**state["state"][0], "exp_avg": torch.ones(5, 30)}}}
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 is \[5, 30\], expected \[30, 5\]"):
        optimizer.load_state_dict(turned)
    decoupled = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]).state_dict()
    with pytest.raises(ValueError, match="use AdamW"):
        optimizer.load_state_dict(decoupled)
    optim.AdamW(leaves()).load_state_dict(decoupled)


def test_a_group_that_is_added_later():
    params = leaves()
    theirs = [torch.nn.Parameter(p.data.cpu().clone()) for p in params]
    ours, peer = optim.Adam(params[:2], lr=0.1), torch.optim.Adam(theirs[:2], lr=0.1, foreach=False)
    for turn in range(4):
        if turn == 2:
            ours.add_param_group({"params": params[2:], "lr": 0.01})
            peer.add_param_group({"params": theirs[2:], "lr": 0.01})
        for their, grad in zip(theirs, give(params, turn), strict=True):
            their.grad = grad.cpu().clone()
        ours.step()
        peer.step()
    for our, their in zip(params, theirs, strict=True):
        assert_within(our.data, their.detach(), 1e-13 * (1 + their.detach().abs()))
    with pytest.raises(ValueError, match="parameters 0 and 5 are the same tensor"):
        ours.add_param_group({"params": params[0]})


def test_named_parameters_closures_and_zeros():
    params = leaves()
    optimizer = optim.SGD([(f"p{i}", p) for i, p in enumerate(params)], lr=0.5, foreach=True, fused=None)
    assert optimizer.param_groups[0]["param_names"][4] == "p4"

    def closure():
        optimizer.zero_grad()
        loss = (params[1] * params[1]).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) > 0
    assert_within(params[1].data, torch.zeros(7), 0.0)  # p - 0.5 * 2 p
    optimizer.zero_grad(set_to_none=False)
    assert params[1].grad.tolist() == [0.0] * 7


def test_a_gradient_that_is_not_finite_is_counted():
    params = leaves()
    optimizer = optim.Adam(params)
    before = [p.data.clone() for p in params]
    give(params, 0)
    params[1].grad.data[3] = math.nan
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(1 if default_device().type == "cpu" else 64):  # on a GPU it is said later, and nothing waits
            optimizer.step()
        optimizer._update.device.type == "cuda" and torch.cuda.synchronize()
        count = optimizer.skipped
        optimizer.step()
    assert [w.category for w in said] == [optim.NotFiniteWarning]
    assert "its gradient has NaN or infinity" in str(said[0].message)
    assert optimizer.skipped == count + 1
    assert math.isnan(float(optimizer.grad_norm))
    assert all(torch.equal(p.data, old) for p, old in zip(params, before, strict=True))
    give(params, 0)
    optimizer.step()
    assert optimizer.skipped == count + 1
    assert not torch.equal(params[0].data, before[0])


def test_a_gradient_that_is_not_finite_is_taken_on_request():
    """As torch: the weight and its state become NaN, the others go on."""
    params = leaves()
    theirs = [torch.nn.Parameter(p.data.cpu().clone()) for p in params]
    ours, peer = optim.Adam(params, skip_nonfinite=False), torch.optim.Adam(theirs, foreach=False)
    for turn in range(2):
        for i, (our, their, grad) in enumerate(zip(params, theirs, give(params, turn), strict=True)):
            grad = grad.cpu().clone()
            if i == 1 and turn == 0:
                grad[3] = math.nan
            our.grad, their.grad = Tensor(grad.to(default_device())), grad
        ours.step()
        peer.step()
    assert ours.skipped == 1
    for our, their in zip(params, theirs, strict=True):
        assert_within(our.data, their.detach(), 1e-13 * (1 + their.detach().abs().nan_to_num()))


def test_steps_count_as_changes_in_place():
    """A saved tensor that the optimizer has changed since is noticed by the engine."""
    params = leaves()
    optimizer = optim.SGD(params, lr=0.1)
    give(params, 0, only={0, 1})
    versions = [p.data._version for p in params]
    optimizer.step()
    assert [p.data._version - v for p, v in zip(params, versions, strict=True)] == [1, 1, 0, 0, 0]


def test_zero_grad():
    params = leaves()
    give(params, 0)
    optimizer = optim.SGD(params)
    optimizer.zero_grad()
    assert all(p.raw_grad is None for p in params)
    before = params[0].data.clone()
    optimizer.step()
    assert torch.equal(params[0].data, before)


def test_nothing_is_read_back_in_a_step(monkeypatch):
    """A step asks the device for no value, so a CUDA graph can hold it."""
    params = leaves()
    optimizer = optim.AdamW(params, max_norm=1.0)

    def refuse(*_):
        raise AssertionError("a value was read back")

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with pytest.raises(AssertionError):
        bool(torch.ones(1))
    give(params, 0)
    optimizer.step()


@pytest.mark.gpu
def test_a_cuda_graph_holds_a_step():
    """Captured once and replayed, with a learning rate set in between: as eager steps."""
    params, others = leaves(torch.float32), leaves(torch.float32)
    captured, eager = optim.Adam(params, max_norm=1.0), optim.Adam(others, max_norm=1.0)
    give(params, 0)
    give(others, 0)
    captured.step()
    eager.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for rate in (1e-3, 1e-2, 1e-4):
        captured.lr = eager.lr = rate
        graph.replay()
        eager.step()
    assert all(torch.equal(p.data, q.data) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: optim.SGD([]), ValueError, "SGD: there are no parameters; pass model.parameters()"),
        (lambda p: optim.SGD(p[0]), TypeError, "params is a Tensor, expected a list"),
        (lambda p: optim.SGD([p[0], 3.0]), TypeError, "parameter 1 is a float, expected a Tensor"),
        (lambda p: optim.SGD([p[0].data]), TypeError, r"is a torch tensor; .* torch\.optim\.SGD updates torch tensors"),
        (lambda p: optim.SGD([p[0], p[1], p[0]]), ValueError, "parameters 0 and 2 are the same tensor"),
        (lambda p: optim.SGD([Tensor(torch.arange(3))]), TypeError, "parameter 0: data has dtype torch.int64"),
        (lambda p: optim.SGD([{"params": p}, p[0]]), TypeError, "got groups and a Tensor"),
        (lambda p: optim.SGD([{"params": p, "alpha": 0.5}]), ValueError, "a group has alpha; known: lr, momentum"),
        (lambda p: optim.SGD(p, lr=-0.1), ValueError, "SGD: lr is -0.1, expected a number at least 0"),
        (lambda p: optim.SGD(p, lr=math.nan), ValueError, "lr is nan"),
        (lambda p: optim.SGD(p, lr="fast"), ValueError, "lr is 'fast'"),
        (lambda p: optim.SGD(p, nesterov=True), ValueError, "nesterov requires a momentum above 0"),
        (lambda p: optim.SGD(p, differentiable=True), ValueError, "differentiable is not supported"),
        (
            lambda p: optim.SGD([{"params": p[:1], "maximize": True}, {"params": p[1:]}]),
            ValueError,
            "groups differ in maximize",
        ),
        (
            lambda p: optim.Adam(p, loss_scale=2.0, skip_nonfinite=False),
            ValueError,
            "loss_scale requires skip_nonfinite=True",
        ),
        (lambda p: optim.Adam(p).register_step_post_hook(print), NotImplementedError, "Adam has no hooks"),
        (lambda p: optim.SGD(p, max_norm=0.0), ValueError, "max_norm is 0.0, expected a number above 0"),
        (lambda p: optim.Adam(p, betas=(0.9, 1.0)), ValueError, "beta2 is 1.0, expected a number from 0 to below 1"),
        (lambda p: optim.Adam(p, betas=0.9), ValueError, "betas is 0.9, expected two numbers"),
        (lambda p: optim.AdamW(p, weight_decay=-1), ValueError, "weight_decay is -1"),
        (lambda p: optim.RMSprop(p, alpha=1.5), ValueError, "alpha is 1.5, expected a number from 0 to 1"),
        (lambda p: optim.Adagrad(p, eps=-1e-8), ValueError, "eps is -1e-08"),
        (lambda p: optim.Adagrad(p, initial_accumulator_value=-1.0), ValueError, "initial_accumulator_value is -1.0"),
        (lambda p: setattr(optim.SGD(p), "lr", -1.0), ValueError, "lr is -1.0"),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make(leaves())


def test_a_tensor_that_an_operation_made_is_refused():
    leaf = leaves()[0]
    made = leaf * 2
    with pytest.raises(ValueError, match=r"parameter 1 of shape \[30, 5\] is the result of an operation"):
        optim.SGD([leaf, made])


def test_repr():
    text = repr(optim.Adam(leaves(), lr=0.5))
    assert "Adam of 311 values" in text
    assert "5 parameters: lr=0.5" in text


def test_a_momentum_may_come_later():
    params = leaves()
    theirs = [torch.nn.Parameter(p.data.cpu().clone()) for p in params]
    ours, peer = optim.SGD(params, lr=0.1), torch.optim.SGD(theirs, lr=0.1, foreach=False)
    for turn in range(4):
        if turn == 2:
            for optimizer in (ours, peer):
                optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
        for their, grad in zip(theirs, give(params, turn), strict=True):
            their.grad = grad.cpu().clone()
        ours.step()
        peer.step()
    for our, their in zip(params, theirs, strict=True):
        assert_within(our.data, their.detach(), 1e-14 * (1 + their.detach().abs()))


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.2, 0.9), (0.9, 0.999)])
def test_adam_keeps_its_accuracy_at_every_beta(betas):
    start, grads = values(3000, dtype=torch.float32), [values(3000, seed=i, dtype=torch.float32) for i in range(6)]
    ours = Tensor(start.clone(), requires_grad=True)
    exact = start.double().clone().requires_grad_()
    mine, reference = optim.Adam([ours], lr=0.1, betas=betas), torch.optim.Adam([exact], lr=0.1, betas=betas)
    for grad in grads:
        ours.grad, exact.grad = Tensor(grad), grad.double()
        mine.step()
        reference.step()
    # Six steps of 0.1, each off by a few units in the last place of itself and of the parameter.
    assert_within(ours.data, exact.detach(), 6 * 2.0**-24 * (exact.detach().abs() + 8 * 0.1))


@pytest.mark.parametrize("name", [*SETTINGS])
def test_a_group_without_decay_keeps_an_infinite_weight(name):
    params = [Tensor(torch.tensor([1.0, math.inf, -math.inf]).to(default_device()), True) for _ in range(2)]
    groups = [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:], "weight_decay": 0.5}]
    optimizer = getattr(optim, name)(groups, lr=0.125)
    for param in params:
        param.grad = Tensor(torch.ones(3).to(default_device()))
    optimizer.step()
    assert params[0].tolist()[1:] == [math.inf, -math.inf]
    assert math.isfinite(params[0].tolist()[0])
