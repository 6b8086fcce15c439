"""What is special to the update kernels: blocks and tiles, rows and where they stand, memory, precision."""

import math

import pytest
import torch

from minidl.kernels import update
from minidl.kernels.update import Rows, Update
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing import GuardedAllocations, assert_within
from minidl.testing.specs import bounds
from tests.launches import replace_run

DTYPES = [torch.float32, torch.float16, torch.float64] + ([] if launch.INTERPRETED else [torch.bfloat16])
NUMBERS = {
    "sgd": {"lr": 0.1, "momentum": 0.9},
    "rmsprop": {"lr": 0.01, "alpha": 0.9, "eps": 1e-6, "momentum": 0.5},
    "adagrad": {"lr": 0.05, "lr_decay": 0.1, "eps": 1e-6},
    "adam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6},
    "adamw": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1},
    "adamax": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6},
    "radam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6},
    "radamw": {"lr": 0.01, "beta1": 0.9, "beta2": 0.3, "eps": 1e-6, "weight_decay": 0.1},
    "nadam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "momentum_decay": 0.004},
    "nadamw": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "momentum_decay": 0.5, "weight_decay": 0.1},
    "muon": {"lr": 0.1, "momentum": 0.9, "adjust": 1.0},
}
SIZES = [(5, 7), (1,), (128,), (129,), (3, 128), (), (1000,), (4, 4, 4), (0,), (0, 3), (260, 130)]
WIDTHS = [1, 3, 16, 100, 128, 130, 300]
ROWS = 150


def values(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        default_device(), dtype
    )


def made(rule, params, **kwargs):
    found = Update(rule, params, update.STATES[rule], **kwargs)
    for name, value in NUMBERS[rule].items():
        found.set(name, value, 0, len(params))
    found.decay = NUMBERS[rule].get("weight_decay", 0.0) != 0.0
    return found


def some_rows(count, width, dtype=torch.float64, seed=0):
    """A gradient of `count` of the ROWS rows, in any order, and the same gradient dense."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[:count].to(default_device())
    rows = Rows(order.to(torch.int32), values(count, width, dtype=dtype, seed=seed))
    dense = torch.zeros(ROWS, width, dtype=dtype, device=default_device())
    dense[order] = rows.values
    return rows, dense


def tiles():
    names = launch.table("update") if launch.INTERPRETED else [launch.target()]
    small = [launch.Tile({"BLOCK_R": 64, "BLOCK_R_SMALL": 32, "BLOCK_C": 32, "BLOCK_V": 2}, 4, 1)]
    found = [tile for family in ("update", "update_measure") for name in names for tile in launch.tiles(family, name)]
    return {str(tile): tile for tile in [*found, *small]}


@pytest.mark.parametrize("tile", tiles())
def test_every_tile_visits_every_element_once(tile):
    """SGD with lr 1 and gradient 1 lowers each element by 1 once; the norm is the root of their number."""
    params = [values(*size).round() for size in SIZES] + [values(ROWS, width).round() for width in WIDTHS]
    before = [p.clone() for p in params]
    grads = [torch.ones_like(p) for p in params[: len(SIZES)]]
    for seed, width in enumerate(WIDTHS):
        rows, _ = some_rows(37, width, seed=seed)
        grads.append(Rows(rows.rows, torch.ones_like(rows.values)))
    step = Update("sgd", params, [])
    step.set("lr", 1.0, 0, len(params))
    with launch.force(update=tiles()[tile], update_measure=tiles()[tile]):
        step(params, grads)
    for param, old, grad in zip(params, before, grads, strict=True):
        expected = old - 1
        if isinstance(grad, Rows):
            expected = old.clone()
            expected[grad.rows.long()] -= 1
        assert torch.equal(param, expected)
    count = sum(g.values.numel() if isinstance(g, Rows) else g.numel() for g in grads)
    assert float(step.control[0]) == math.sqrt(count)


def prepare_tiles():
    names = launch.table("update_prepare") if launch.INTERPRETED else [launch.target()]
    found = [tile for name in names for tile in launch.tiles("update_prepare", name)]
    return {str(tile): tile for tile in [*found, launch.Tile({"BLOCK": 32, "BLOCK_P": 8}, 1, 1)]}


@pytest.mark.parametrize("prepare", prepare_tiles())
def test_many_partial_sums_and_parameters(prepare):
    """With the smallest tile more of both than `prepare` takes at a time."""
    params = [values(3, seed=i) for i in range(20)] + [values(900)]
    grads = [torch.ones_like(p) for p in params]
    step = made("adam", params)
    tile = launch.Tile({"BLOCK_R": 1, "BLOCK_R_SMALL": 1, "BLOCK_C": 16, "BLOCK_V": 1}, 1, 1)
    with launch.force(update_measure=tile, update_prepare=prepare_tiles()[prepare]):
        step(params, grads)
    assert float(step.control[0]) == pytest.approx(math.sqrt(960), rel=1e-15)
    assert step.steps.tolist() == [1] * 21


@pytest.mark.parametrize("rule", update.STATES)
def test_nothing_is_written_beside_the_numbers_of_three_parameters(rule):
    """The tile of parameters has four."""
    with GuardedAllocations():
        params = [values(2, 3, seed=i) for i in range(3)]
        before = [p.clone() for p in params]
        step = made(rule, params)
        step(params, before)
    assert step.steps.tolist() == [1] * 3
    assert all((p.isfinite() & (p != old)).all() for p, old in zip(params, before, strict=True))


@pytest.mark.parametrize(
    ("rule", "width"), [*((rule, 130) for rule in update.RULES), *(("adam", width) for width in WIDTHS if width != 130)]
)
def test_rows_equal_the_dense_gradient(rule, width):
    """Also rows that were in an earlier gradient and are not in this one, and fewer rows than before."""
    params, others = [values(ROWS, width)], [values(ROWS, width)]
    by_rows, by_dense = made(rule, params), made(rule, others)
    for seed, count in enumerate((40, 3, 0, ROWS, 17)):
        rows, dense = some_rows(count, width, seed=seed)
        by_rows(params, [rows])
        by_dense(others, [dense])
        assert torch.equal(params[0], others[0])
    for name in by_rows.states:
        assert torch.equal(by_rows.states[name][0], by_dense.states[name][0])


@pytest.mark.parametrize("rule", update.RULES)
def test_lazy_changes_only_the_rows_seen(rule):
    params = [values(ROWS, 20), values(9)]
    step = made(rule, params, lazy=True)
    step(params, [some_rows(50, 20, seed=1)[0], values(9, seed=1)])
    before, states = params[0].clone(), {name: kept[0].clone() for name, kept in step.states.items()}
    whole = [p.clone() for p in params]
    dense_step = made(rule, whole)
    for name, kept in step.states.items():
        dense_step.states[name][0].copy_(kept[0])
    dense_step.steps.copy_(step.steps)
    rows, dense = some_rows(31, 20, seed=2)
    step(params, [rows, None])
    dense_step(whole, [dense, None])
    seen = rows.rows.long()
    unseen = torch.ones(ROWS, dtype=torch.bool, device=before.device)
    unseen[seen] = False
    assert torch.equal(params[0][seen], whole[0][seen])
    assert torch.equal(params[0][unseen], before[unseen])
    for name, kept in step.states.items():
        assert torch.equal(kept[0][seen], dense_step.states[name][0][seen])
        assert torch.equal(kept[0][unseen], states[name][unseen])


@pytest.mark.parametrize("lazy", [False, True])
def test_negative_rows_are_padding(lazy):
    """As a CUDA graph of sparse batches needs it: a fixed number of rows, of which the last stand for nothing."""
    params, others = [values(ROWS, 8)], [values(ROWS, 8)]
    padded, plain = made("adam", params, lazy=lazy), made("adam", others, lazy=lazy)
    for seed in range(3):
        rows, _ = some_rows(20, 8, seed=seed)
        padding = Rows(torch.full((12,), -1).to(rows.rows), torch.zeros(12, 8).to(rows.values))
        padded(params, [Rows(torch.cat([rows.rows, padding.rows]), torch.cat([rows.values, padding.values]))])
        plain(others, [rows])
        assert torch.equal(params[0], others[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_around_parameters_and_gradients(dtype):
    """Views in one buffer, NaN between them: addresses on and off 16 bytes, sizes on and off whole vectors."""
    buffer = torch.full((2000,), math.nan, dtype=dtype, device=default_device())
    grads = torch.full((2000,), math.nan, dtype=dtype, device=default_device())
    params, given, at = [], [], 0
    inside = torch.zeros(2000, dtype=torch.bool, device=default_device())
    for i, size in enumerate([1, 2, 3, 4, 8, 16, 31, 32, 33, 64, 100, 128, 129, 200]):
        at += i % 5 + 1
        params.append(buffer[at : at + size].copy_(values(size, dtype=dtype)))
        given.append(grads[at : at + size].copy_(values(size, dtype=dtype, seed=1)))
        inside[at : at + size] = True
        at += size
    step = made("sgd", params)
    before, kept = buffer.clone(), grads.clone()
    step(params, given)
    exact = before.double() - 0.1 * grads.double()
    assert_within(buffer[inside], exact[inside], 3 * bounds.UNIT[dtype] * (before.abs() + grads.abs()).double()[inside])
    assert buffer[~inside].isnan().all()
    assert torch.equal(grads[inside], kept[inside])


def exact_step(rule, param, grad, states, step):
    """One step in float64 from the given state, with the states after it."""
    n = {key: NUMBERS[rule].get(key, 0.0) for key in update.HYPER}
    if rule == "sgd":
        b = n["momentum"] * states["momentum_buffer"] + grad
        return param - n["lr"] * b, {"momentum_buffer": b}
    if rule == "rmsprop":
        s = n["alpha"] * states["square_avg"] + (1 - n["alpha"]) * grad**2
        a = states["grad_avg"] + (1 - n["alpha"]) * (grad - states["grad_avg"])
        b = n["momentum"] * states["momentum_buffer"] + grad / ((s - a**2).sqrt() + n["eps"])
        return param - n["lr"] * b, {"square_avg": s, "grad_avg": a, "momentum_buffer": b}
    if rule == "adagrad":
        s = states["sum"] + grad**2
        rate = n["lr"] / (1 + (step - 1) * n["lr_decay"])
        return param - rate * grad / (s.sqrt() + n["eps"]), {"sum": s}
    m = states["exp_avg"] + (1 - n["beta1"]) * (grad - states["exp_avg"])
    rate, decayed = n["lr"] / (1 - n["beta1"] ** step), param
    if rule in ("adamw", "nadamw", "radamw"):
        decayed = param * (1 - n["lr"] * n["weight_decay"])
    if rule == "adamax":
        largest = torch.maximum(n["beta2"] * states["exp_inf"], grad.abs() + n["eps"])
        return param - rate * m / largest, {"exp_avg": m, "exp_inf": largest}
    v = n["beta2"] * states["exp_avg_sq"] + (1 - n["beta2"]) * grad**2
    states_, left = {"exp_avg": m, "exp_avg_sq": v}, 1 - n["beta2"] ** step
    if rule.startswith("radam"):
        limit = 2 / (1 - n["beta2"]) - 1
        length = limit - 2 * step * (1 - left) / left
        ratio = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
        root = (v.sqrt() + n["eps"]) / math.sqrt(ratio * left) if length > 5 else 1
        return decayed - rate * m / root, states_
    if rule.startswith("nadam"):
        momenta = [n["beta1"] * (1 - 0.96 ** (t * n["momentum_decay"]) / 2) for t in range(1, step + 2)]
        root = (v / left).sqrt() + n["eps"]
        ahead = (1 - momenta[-2]) / (1 - math.prod(momenta[:-1])) * grad + momenta[-1] / (1 - math.prod(momenta)) * m
        return decayed - n["lr"] * ahead / root, states_
    largest = torch.maximum(states["max_exp_avg_sq"], v)
    root = (largest / (1 - n["beta2"] ** step)).sqrt()
    return decayed - rate * m / (root + n["eps"]), {**states_, "max_exp_avg_sq": largest}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", update.RULES)
def test_one_step_within_the_bound_of_its_arithmetic(rule, dtype):
    """From any state: every new value is a formula of at most 16 roundings, each by u of the terms that meet there."""
    param, grad = values(40, 50, dtype=dtype), values(40, 50, dtype=dtype, seed=1)
    step = made(rule, [param])
    acc = launch.acc_torch(dtype)
    for seed, (name, kept) in enumerate(step.states.items()):
        kept[0].copy_(values(40, 50, seed=10 + seed).abs() + 0.5 if name != "grad_avg" else values(40, 50) / 8)
    step.steps.fill_(4)
    u = 16 * bounds.acc_unit(dtype)
    before = {name: kept[0].double() for name, kept in step.states.items()}
    start = param.double()
    new, states = exact_step(rule, start, grad.double(), before, 5)
    step([param], [grad])
    assert step.steps.tolist() == [5]
    terms = {name: states[name].abs() + before[name].abs() + grad.double().abs() + 1.0 for name in states}
    for name, kept in step.states.items():
        assert kept[0].dtype == acc
        # With rmsprop, s - a^2 is at least 0.3 here, so that its root loses nothing.
        assert_within(kept[0], states[name], u * terms[name] * (4.0 if rule == "rmsprop" else 1.0), what=name)
    moved = sum(terms.values()) * NUMBERS[rule]["lr"] * 4.0
    assert_within(param, new, bounds.rounded(new, u * (start.abs() + moved), dtype))
    if acc != dtype:
        assert_within(step.masters[0], new, u * (start.abs() + moved))
        assert torch.equal(param, step.masters[0].to(dtype))


def test_masters_gather_what_half_precision_would_lose():
    param = torch.ones(8, dtype=torch.float16, device=default_device())
    step = Update("sgd", [param], [])
    step.set("lr", 1.0, 0, 1)
    small = torch.full_like(param, 2.0**-13)
    for _ in range(8):
        step([param], [small])
    assert param.tolist() == [1.0 - 2.0**-10] * 8


@pytest.mark.parametrize("rule", update.RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_changes_where_a_gradient_is_not_finite(rule, bad):
    """One bad element of one gradient, dense or by rows, and the step after it is as if it had not been."""
    params = [values(ROWS, 6), values(33)]
    others = [p.clone() for p in params]
    step, calm = made(rule, params, max_norm=1.0), made(rule, others, max_norm=1.0)
    for turn in range(4):
        rows, _ = some_rows(20, 6, seed=turn)
        dense = values(33, seed=turn)
        if turn in (1, 2):
            spoiled, broken = Rows(rows.rows, rows.values.clone()), dense.clone()
            (spoiled.values if turn == 1 else broken).view(-1)[5] = bad
            kept = [t.clone() for t in (*params, *(s for names in step.states.values() for s in names), step.steps)]
            step(params, [spoiled, broken])
            for now, then in zip(
                (*params, *(s for names in step.states.values() for s in names), step.steps), kept, strict=True
            ):
                assert torch.equal(now, then)
            assert step.control[2] == 0.0
        else:
            step(params, [rows, dense])
            calm(others, [rows, dense])
    for now, expected in zip(params, others, strict=True):
        assert torch.equal(now, expected)
    assert int(step.skipped) == 2


def test_the_loss_scale_is_halved_where_a_gradient_is_not_finite():
    param = torch.ones(3, device=default_device())
    step = Update("sgd", [param], [], loss_scale=8.0)
    for value, scale in ((1.0, [8.0, 1.0]), (math.inf, [4.0, 0.0]), (1.0, [4.0, 1.0])):
        step([param], [torch.full_like(param, value)])
        assert step.scale.tolist() == scale


def test_nesterov_looks_ahead_from_the_gradient():
    param = torch.ones(3, device=default_device())
    step = Update("sgd", [param], update.STATES["sgd"], nesterov=True)
    step.set("lr", 1.0, 0, 1)
    step.set("momentum", 0.5, 0, 1)
    step([param], [torch.ones_like(param)])
    assert param.tolist() == [-0.5] * 3


@pytest.mark.parametrize("size", [1e-30, 1e30], ids=["tiny", "huge"])
def test_the_norm_neither_overflows_nor_vanishes(size):
    param = torch.zeros(1000, device=default_device())
    step = Update("sgd", [param], [], max_norm=1.0)
    step.set("lr", 1.0, 0, 1)
    grad = torch.full_like(param, size)
    step([param], [grad])
    norm = float(grad[0]) * math.sqrt(1000)
    assert float(step.control[0]) == pytest.approx(norm, rel=1e-14)
    expected = min(1.0, 1.0 / (norm + 1e-6)) * float(grad[0])
    assert_within(param, torch.full((1000,), -expected, dtype=torch.float64), 4 * bounds.UNIT[torch.float32] * expected)


def test_two_runs_are_bitwise_equal():
    results = []
    for _ in range(2):
        params = [values(ROWS, 70, dtype=torch.float32), values(513, dtype=torch.float32)]
        step = made("adam", params, max_norm=0.1)
        for seed in range(3):
            step(params, [some_rows(60, 70, torch.float32, seed)[0], values(513, dtype=torch.float32, seed=seed)])
        results.append([*params, step.control])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def launched(monkeypatch):
    names, run = [], launch.run

    def spy(kernel, *args, **meta):
        names.append(kernel.__name__)
        run(kernel, *args, **meta)

    replace_run(monkeypatch, spy)
    return names


def test_three_launches_for_all_parameters(monkeypatch):
    names = launched(monkeypatch)
    params = [values(i + 1, 3) for i in range(25)] + [values(ROWS, 5)]
    step = made("adamw", params, max_norm=1.0)
    step(params, [*(torch.ones_like(p) for p in params[:-1]), some_rows(9, 5)[0]])
    assert names == ["measure_kernel", "prepare_kernel", "update_kernel"]


def test_dtypes_side_by_side(monkeypatch):
    """One norm over all; a launch more of the first and the last kernel for each dtype."""
    names = launched(monkeypatch)
    dtypes = [torch.float32, torch.float16, torch.float64, torch.float32]
    params = [torch.zeros(30, dtype=d, device=default_device()) for d in dtypes]
    step = Update("sgd", params, [])
    step.set("lr", 0.5, 0, 4)
    for turn in range(1, 3):
        names.clear()
        step(params, [torch.ones_like(p) for p in params])
        assert names == ["measure_kernel"] * 3 + ["prepare_kernel"] + ["update_kernel"] * 3
        assert float(step.control[0]) == pytest.approx(math.sqrt(120), rel=1e-15)
        assert step.steps.tolist() == [turn] * 4
        assert all(p.tolist() == [-0.5 * turn] * 30 for p in params)


def test_every_step_is_prepared_from_its_own_sums():
    """Of more or fewer programs than in the step before: sums that are exact in any order."""
    sizes = (9000, 3, 5001) if launch.INTERPRETED else (2**22, 3, 70001)
    params = [torch.zeros(size, device=default_device()) for size in sizes]
    step = Update("sgd", params, [])
    found, expected, steps = [], [], [0] * len(params)
    for turn in range(8 if launch.INTERPRETED else 200):
        used = [i for i in range(len(params)) if (turn + i) % 3]
        value = 2.0 ** (turn % 60)
        grads = [torch.full_like(p, value) for p in params]
        step(params, [grad if i in used else None for i, grad in enumerate(grads)])
        found.append(step.control.clone())
        expected.append(math.sqrt(sum(sizes[i] for i in used)) * value)
        for i in used:
            steps[i] += 1
    assert torch.stack(found)[:, 0].tolist() == pytest.approx(expected, rel=1e-15)
    assert step.steps.tolist() == steps


def test_a_step_of_empty_gradients_counts():
    param = torch.zeros(0, 3, device=default_device())
    step = made("adam", [param])
    for turn in range(1, 3):
        step([param], [param.clone()])
        assert step.control.tolist() == [0.0, 1.0, 1.0]
        assert step.steps.tolist() == [turn]


def test_gradients_of_any_strides_and_at_new_addresses():
    params, others = [values(12, 10), values(7)], [values(12, 10), values(7)]
    step, plain = made("sgd", params), made("sgd", others)
    for seed in range(3):
        grad = values(10, 12, seed=seed)
        step(params, [grad.t(), values(1, seed=seed).expand(7)])
        plain(others, [grad.t().contiguous(), values(1, seed=seed).repeat(7)])
        assert torch.equal(params[0], others[0])
        assert torch.equal(params[1], others[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", list(update.RULES))
def test_parameters_in_channels_last_are_updated_where_they_are(rule, dtype):
    """Each value as in contiguous memory, whatever the strides of its gradient; what lies around is not touched.

    A GPU's kernel may fuse a product and a sum in whole vectors and not in the rest of a parameter.
    """
    roundings = 0.0 if launch.INTERPRETED else 16 * torch.finfo(dtype).eps
    shapes = [(5, 4, 3, 2), (3, 1, 2, 2), (6, 8, 1, 1), (4, 160, 3, 3), (7,)]
    plain = [values(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    last = [p.clone(memory_format=torch.channels_last) if p.dim() == 4 else p.clone() for p in plain]
    steps = made(rule, plain), made(rule, last)
    for turn in range(4):
        grads = [values(*shape, seed=10 * turn + i, dtype=dtype) for i, shape in enumerate(shapes)]
        turned = [g.to(memory_format=torch.channels_last) if g.dim() == 4 and turn % 2 else g for g in grads]
        steps[0](plain, grads)
        steps[1](last, turned)
    for mine, theirs in zip(last, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=roundings, atol=roundings)
    assert last[0].is_contiguous(memory_format=torch.channels_last)
    for name, states in steps[1].states.items():
        for mine, theirs in zip(states, steps[0].states[name], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=roundings, atol=roundings)
    assert_within(steps[1].control, steps[0].control, 1e-14)


def test_a_parameter_that_changed_its_layout_is_refused():
    param = values(2, 3, 2, 2)
    step = made("sgd", [param])
    with pytest.raises(RuntimeError, match="make the optimizer after moving or converting the model"):
        step([param.contiguous(memory_format=torch.channels_last)], [param])


def test_a_parameter_without_a_gradient_is_left_alone():
    params = [values(5), values(6)]
    step = made("adam", params)
    step(params, [torch.ones_like(params[0]), None])
    kept = params[1].clone()
    step(params, [None, None])
    assert step.steps.tolist() == [1, 0]
    step(params, [None, torch.ones_like(kept)])
    assert step.steps.tolist() == [1, 1]
    # Its first step, whatever the others have done: a full lr.
    assert_within(params[1], kept - 0.01 / (1 + 1e-6), 1e-14)


def test_refusals():
    good = values(3)
    with pytest.raises(TypeError, match=r"parameter 1: data has dtype torch\.int64"):
        Update("sgd", [good, torch.arange(3)], [])
    with pytest.raises(ValueError, match=r"parameter 0 of shape \[3, 2\] has strides \(1, 3\): make it contiguous"):
        Update("sgd", [values(2, 3).t()], [])
    step = Update("sgd", [good], [])
    with pytest.raises(RuntimeError, match="make the optimizer after moving or converting the model"):
        step([good.float()], [good.float()])


@pytest.mark.skipif(not launch.INTERPRETED, reason="bfloat16 is computed on a GPU")
def test_bfloat16_is_refused_by_the_interpreter():
    param = torch.zeros(3, dtype=torch.bfloat16)
    step = Update("sgd", [param], [])
    with pytest.raises(TypeError, match="bfloat16 is not supported on the CPU"):
        step([param], [param])


def test_a_narrow_parameter_that_was_set_from_outside_is_taken_over():
    params = [torch.ones(40, dtype=torch.float16, device=default_device())]
    step = made("sgd", params)
    step.set("lr", 0.0, 0, 1)
    params[0][:20].copy_(torch.full((20,), 7.0))
    step(params, [torch.zeros_like(params[0])])
    assert params[0].tolist() == [7.0] * 20 + [1.0] * 20


@pytest.mark.gpu
def test_the_first_step_of_an_update_may_be_in_a_graph():
    """Where rows stand is memory of its own: an eager step before the first replay, and replays, are as eager steps."""
    rows, _ = some_rows(20, 16, torch.float32)
    start = values(ROWS, 16, dtype=torch.float32)
    first, params, others = [start.clone()], [start.clone()], [start.clone()]
    made("adam", first)(first, [rows])  # compiles
    captured, eager = made("adam", params), made("adam", others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured(params, [rows])
    assert torch.equal(params[0], start)
    captured(params, [rows])
    graph.replay()
    graph.replay()
    for _ in range(3):
        eager(others, [rows])
    assert torch.equal(params[0], others[0])
