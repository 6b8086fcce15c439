"""L-BFGS beside torch's: weights after ten steps, numbers of evaluations, states, settings."""

import copy
import pickle  # noqa: TID251

import pytest
import torch

import minidl
from minidl import optim
from minidl.optim import lr_scheduler
from minidl.tensors import Tensor, default_device
from minidl.testing import assert_within

GENERATOR = torch.Generator().manual_seed(0)
A, B = (torch.randn(shape, generator=GENERATOR, dtype=torch.float64) for shape in ((12, 5), (12,)))
EVERY_STEP = {"max_iter": 4, "history_size": 3}


def rosenbrock(x):
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


PROBLEMS = {  # starts, function, learning rate without line search
    "rosenbrock": ([torch.tensor([-1.2, 1.0])], lambda of, x: rosenbrock(x), 1e-3),
    "least squares": (
        [torch.zeros(5, 1), torch.tensor(0.5), torch.ones(2)],  # the last gets no gradient
        lambda of, w, b, _: ((of(A) @ w + b - of(B.unsqueeze(1))) ** 2).sum(),
        0.05,
    ),
}  # fmt: skip


class Run:
    def __init__(self, home, problem, dtype=torch.float64, **options):
        self.of = (lambda t: t.to(dtype)) if home is torch else (lambda t: Tensor(t.to(default_device(), dtype)))
        starts, self.function, self.lr = PROBLEMS[problem]
        self.params = [self.of(start.clone()) for start in starts]
        for param in self.params:
            param.requires_grad_()
        options = {"lr": 1.0 if "line_search_fn" in options else self.lr, **options}
        self.optimizer, self.evaluations = getattr(home, "optim").LBFGS(self.params, **options), 0  # noqa: B009

    def closure(self):
        self.evaluations += 1
        self.optimizer.zero_grad()
        loss = self.function(self.of, *self.params)
        loss.backward()
        return loss

    def steps(self, count):
        for _ in range(count):
            loss = self.optimizer.step(self.closure)
        return loss.detach()

    def values(self):
        return torch.cat([param.detach().cpu().reshape(-1) for param in map(raw, self.params)]).double()


def raw(x):
    return x.data if isinstance(x, Tensor) else x


def both(problem, dtype=torch.float64, **options):
    return Run(minidl, problem, dtype, **options), Run(torch, problem, dtype, **options)


SEARCHES = [{}, {"line_search_fn": "strong_wolfe"}]


@pytest.mark.parametrize("options", SEARCHES, ids=["fixed", "strong_wolfe"])
@pytest.mark.parametrize("history", [100, 2])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_weights_after_ten_steps(problem, history, options):
    ours, theirs = both(problem, max_iter=4, history_size=history, **options)
    a, b = ours.steps(10), theirs.steps(10)
    assert_within(ours.values(), theirs.values(), 1e-10)
    assert_within(a.cpu().data, b, 1e-10 * (1 + b.abs()))
    assert ours.evaluations == theirs.evaluations
    mine, other = (run.optimizer.state_dict()["state"][0] for run in (ours, theirs))
    assert mine.keys() == other.keys()
    assert (mine["func_evals"], mine["n_iter"]) == (other["func_evals"], other["n_iter"])
    assert len(mine["old_dirs"]) == len(other["old_dirs"])


def test_float32():
    ours, theirs = both("rosenbrock", torch.float32)
    ours.steps(2), theirs.steps(2)
    assert_within(ours.values(), theirs.values(), 1e-5)


@pytest.mark.parametrize(
    "options", [{"max_iter": 1}, {"max_eval": 2}, {"tolerance_grad": 1e3}, {"tolerance_change": 1.0}], ids=str
)
@pytest.mark.parametrize("search", SEARCHES, ids=["fixed", "strong_wolfe"])
def test_where_a_step_ends(options, search):
    ours, theirs = both("least squares", **options, **search)
    ours.steps(3), theirs.steps(3)
    assert ours.evaluations == theirs.evaluations
    assert_within(ours.values(), theirs.values(), 1e-12)


@pytest.mark.parametrize("options", SEARCHES, ids=["fixed", "strong_wolfe"])
def test_states_are_exchanged_with_torch(options):
    ours, theirs = both("least squares", **EVERY_STEP, **options)
    ours.steps(2), theirs.steps(2)
    swapped = both("least squares", max_iter=7, **options)
    for run, source in zip(swapped, (theirs, ours), strict=True):
        with torch.no_grad():
            for param, value in zip(run.params, source.params, strict=True):
                raw(param).copy_(raw(value))
        run.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
        assert run.optimizer.param_groups[0]["max_iter"] == 4
        run.steps(2)
    ours.steps(2)
    for run in swapped:
        assert_within(run.values(), ours.values(), 1e-10)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_go_on(way):
    run = Run(minidl, "least squares", **EVERY_STEP)
    run.steps(2)
    params, optimizer = way((run.params, run.optimizer))
    assert optimizer.param_groups[0]["params"][0] is params[0]
    other = Run(minidl, "least squares")
    other.params, other.optimizer = params, optimizer
    run.steps(2), other.steps(2)
    assert torch.equal(run.values(), other.values())


def test_schedules_and_representation():
    ours, theirs = both("least squares")
    schedules = [lr_scheduler.StepLR(run.optimizer, 1, 0.5) for run in (ours, theirs)]
    for run, schedule in zip((ours, theirs), schedules, strict=True):
        run.steps(1), schedule.step(), run.steps(1)
    assert_within(ours.values(), theirs.values(), 1e-12)
    assert ours.optimizer.lr == 0.025
    ours.optimizer.lr = 0.5
    assert ours.optimizer.param_groups[0]["lr"] == 0.5
    assert repr(ours.optimizer).startswith("LBFGS of 8 values\n  3 parameters: lr=0.5, max_iter=20, max_eval=25")
    assert Run(minidl, "rosenbrock").optimizer.state_dict()["state"] == {}


X, Y = (minidl.zeros(2, requires_grad=True) for _ in "xy")
STATE = {"n_iter": 1, "d": torch.zeros(3)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: optim.LBFGS([]), ValueError, "LBFGS: there are no parameters"),
        (lambda: optim.LBFGS([{"params": [X]}, {"params": [Y]}]), ValueError, "LBFGS: got 2 groups, expected one"),
        (lambda: optim.LBFGS([X, X]), ValueError, "parameters 0 and 1 are the same"),
        (lambda: optim.LBFGS([X, minidl.zeros(1, dtype=torch.float64)]), TypeError, "LBFGS: .*float64"),
        (lambda: optim.LBFGS([X], -1), ValueError, "LBFGS: lr is -1, expected a number at least 0"),
        (lambda: optim.LBFGS([X], max_iter=0), ValueError, "LBFGS: max_iter is 0, expected 1 or more"),
        (lambda: optim.LBFGS([X], history_size=2.5), TypeError, "LBFGS: history_size is 2.5, expected a whole"),
        (lambda: optim.LBFGS([X], tolerance_grad="low"), TypeError, "tolerance_grad is 'low', expected a number"),
        (lambda: optim.LBFGS([X], line_search_fn="armijo"), ValueError, "line_search_fn is 'armijo', expected"),
        (lambda: optim.LBFGS([X]).add_param_group({"params": [Y]}), ValueError, "adds a second group"),
        (lambda: optim.LBFGS([X]).register_step_pre_hook(print), NotImplementedError, "LBFGS has no hooks"),
        (lambda: optim.LBFGS([X]).load_state_dict(optim.LBFGS([X, Y]).state_dict()), ValueError, "expected one of 1"),
        (
            lambda: optim.LBFGS([X]).load_state_dict({**optim.LBFGS([X]).state_dict(), "state": {0: STATE}}),
            ValueError, r"LBFGS: state d has shape \[3\], expected \[2\]",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
