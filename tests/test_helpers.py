"""The helpers themselves: a battery that passes wrong kernels would be worse than none, so kernels are broken here.

One operation, the rows of a matrix weighted and added, has a switch for each kind of mistake; the check that is there
for that mistake must find it, and the right kernel must pass every check.
"""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, settings
from hypothesis import strategies as st

from minidl import nn, ops
from minidl.autograd import Function
from minidl.kernels import gemm, launch
from minidl.specs import Bad, Case, OpSpec, bounds
from minidl.specs.make import KINDS, LAYOUTS, SPECIAL, Replay, SeededMake, fits, lay_out, values
from minidl.tensor import Tensor, default_device, ones
from minidl.testing import (
    GradientError,
    GuardedAllocations,
    MemoryGuardError,
    assert_not_vacuous,
    assert_within,
    check_grads,
    error_bound,
    guarded,
    poisoned_memory,
)
from tests import battery
from tests.battery import pose
from tests.strategies import DrawnMake
from tests.test_operations import holds

NONE = tl.constexpr(0)
DROPS_LAST = tl.constexpr(1)
UNMASKED_TAIL = tl.constexpr(2)
TF32 = tl.constexpr(3)
PAST_THE_END = tl.constexpr(4)
UNWRITTEN = tl.constexpr(5)
FLOOR = tl.constexpr(6)
SWALLOWS_NAN = tl.constexpr(7)
CHANGES_INPUT = tl.constexpr(8)
IGNORES_STRIDE = tl.constexpr(9)


@triton.jit
def weigh_kernel(
    p_x, p_w, p_y, M, K, s_xm, s_xk, s_wk, BUG: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y[m] = sum over k of x[m, k] w[k]."""
    i_m = tl.program_id(0)
    end = K
    blocks = tl.cdiv(K, BLOCK)
    if BUG == DROPS_LAST:
        end = K - 1
    if BUG == FLOOR:
        blocks = tl.maximum(K // BLOCK, 1)
    if BUG == IGNORES_STRIDE:
        s_xk = 1
    b_acc = tl.zeros((BLOCK,), dtype=ACC)
    for i in range(blocks):
        o_k = i * BLOCK + tl.arange(0, BLOCK)
        m_k = o_k < end
        if BUG == UNMASKED_TAIL:
            b_x = tl.load(p_x + i_m * s_xm + o_k * s_xk, mask=o_k < end + 1, other=0.0).to(ACC)
        else:
            b_x = tl.load(p_x + i_m * s_xm + o_k * s_xk, mask=m_k, other=0.0).to(ACC)
        b_w = tl.load(p_w + o_k * s_wk, mask=m_k, other=0.0).to(ACC)
        if BUG == TF32:
            b_x = (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        if BUG == SWALLOWS_NAN:
            b_x = tl.where(b_x == b_x, b_x, 0.0)
        b_acc += b_x * b_w
    b_y = tl.sum(b_acc, axis=0).to(p_y.dtype.element_ty)
    if BUG == UNWRITTEN:
        tl.store(p_y + i_m, b_y, mask=i_m != M - 1)
    else:
        tl.store(p_y + i_m, b_y)
    if BUG == PAST_THE_END:
        tl.store(p_y + i_m + 1, b_y, mask=i_m == M - 1)
    if BUG == CHANGES_INPUT:
        tl.store(p_x, b_y, mask=K > 0)


class Weigh(Function):
    calls = 0

    @staticmethod
    def forward(ctx, x, w, bug, mistake):
        ctx.save(x, w)
        ctx.mistake = mistake
        y = torch.empty(x.shape[:1], dtype=x.dtype, device=x.device)
        tile = launch.tile("gemm_sum", x.dtype, total=x.shape[1])
        block = min(tile["BLOCK"], triton.next_power_of_2(x.shape[1]))
        launch.run(
            weigh_kernel, (len(x),), x, w, y, *x.shape, *x.stride(), *w.stride(),
            BUG=bug, ACC=launch.acc(x.dtype), **{**tile.options, "BLOCK": block},
        )  # fmt: skip
        if mistake == "alias":
            return x[:, 0]
        if mistake == "not repeatable":
            Weigh.calls += 1
            return y.fill_(Weigh.calls)
        return y.to(torch.float32) if mistake == "dtype" else y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved
        dx = gemm.gemm(dy[:, None], w[None, :])
        dw = gemm.gemm(dy[None, :], x)[0]
        if ctx.mistake == "factor":
            dw = gemm.gemm((dy * 1.001)[None, :], x)[0]
        if ctx.mistake == "one element":
            dx.view(-1)[-1:].mul_(1.5)
        if ctx.mistake == "no gradient":
            dw = None
        return dx, dw, None, None


def weigh_spec(bug=NONE, mistake=None):
    def bound(case, result, dtype):
        x, w = case.args
        total = x.abs() @ w.abs()
        error = bounds.gamma(x.shape[1] + 2, bounds.acc_unit(dtype)) * total + x.shape[1] * 2.0**-126
        error = torch.where(total > torch.finfo(launch.acc_torch(dtype)).max / 2, math.inf, error)
        return bounds.rounded(result, error, dtype)

    def grad_bound(case, dy, grads, dtype):
        x, w = case.args
        totals = dy.abs()[:, None] * w.abs(), dy.abs() @ x.abs()
        chains = 2, len(x) + 2
        # Several units: float32 products on a GPU are made of parts.
        errors = [t * bounds.gamma(d, 16 * bounds.acc_unit(dtype)) for t, d in zip(totals, chains, strict=True)]
        errors = [torch.where(t > 1e38, math.inf, e + 1e-36) for t, e in zip(totals, errors, strict=True)]
        return tuple(bounds.rounded(g, e, dtype) for g, e in zip(grads, errors, strict=True))

    def inputs(make):
        M, K = make.size(1, 20), make.size(1, 20)
        return Case((make.tensor(M, K), make.tensor(K)))

    return OpSpec(
        name="weigh",
        op=lambda x, w: Weigh.apply(x, w, bug, mistake),
        reference=lambda x, w: x @ w,
        inputs=inputs,
        bound=bound,
        grad_bound=grad_bound,
        differentiable=(0, 1),
        dtypes=(torch.float32, torch.float64),
        families=("gemm_sum",),
        examples={"long": lambda make: Case((make.tensor(3, 1500), make.tensor(1500)))},
        bad=(Bad(inputs, ValueError, "never"),),
        exact=True,
    )


def fixed(spec, dtype=torch.float32):
    return battery.examples(spec, dtype)["long"]


class TestTheBatteryOnARightKernel:
    @pytest.mark.parametrize("check", battery.CHECKS)
    def test_passes(self, check):
        holds(check, weigh_spec(), torch.float64 if check == "real gradients" else torch.float32, 0.5)

    def test_passes_on_fixed_examples(self):
        problem = fixed(weigh_spec())
        for check in (battery.check_forward, battery.check_gradients, battery.check_repeats, battery.check_aliases):
            check(problem)


class TestTheBatteryFindsPlantedBugs:
    @pytest.mark.parametrize(
        ("check", "bug", "message"),
        [
            ("forward", DROPS_LAST, "outside their bound"),
            ("exact", DROPS_LAST, "outside their bound"),
            ("forward", UNMASKED_TAIL, "got nan"),
            ("forward", TF32, "outside their bound"),
            ("forward", PAST_THE_END, "1 elements outside a float32 tensor .* were written, the first 1 past its end"),
            ("forward", UNWRITTEN, "got nan"),
            ("forward", CHANGES_INPUT, "elements of the input .* were changed"),
            ("forward", IGNORES_STRIDE, "outside their bound|got nan"),
            ("specials", SWALLOWS_NAN, "expected nan"),
        ],
        ids=["last", "last, integers", "tail", "tf32", "past the end", "unwritten", "input", "stride", "nan"],
    )
    def test_in_the_kernel(self, check, bug, message):
        with pytest.raises(AssertionError, match=message):
            # More cases than a GPU profile draws: not every one has strides.
            holds(check, weigh_spec(bug), torch.float32, 64 / settings.default.max_examples, phases=[Phase.generate])

    @pytest.mark.parametrize("mistake", ["factor", "one element", "no gradient"])
    def test_in_the_gradient(self, mistake):
        spec = weigh_spec(mistake=mistake)
        with pytest.raises(AssertionError, match="gradient of argument"):
            holds("gradients", spec, torch.float32, phases=[Phase.generate])
        with pytest.raises(GradientError, match="the gradient of input"):
            holds("real gradients", spec, torch.float64, phases=[Phase.generate])

    def test_in_one_tile(self):
        """The blocks of K are counted too low, which only shows where one block does not hold K."""
        problem = fixed(weigh_spec(FLOOR))
        large = launch.Tile({"BLOCK": 2048})
        with launch.force(gemm_sum=large):
            battery.check_forward(problem)
        with launch.force(gemm_sum=launch.Tile({"BLOCK": 1024})), pytest.raises(AssertionError, match="outside"):
            battery.check_forward(problem)

    def test_the_tables_of_a_gpu_have_such_a_tile(self):
        assert any(tile["BLOCK"] < 1500 for name in ("sm_80", "sm_90") for tile in launch.tiles("gemm_sum", name))

    def test_in_memory(self):
        with pytest.raises(AssertionError, match="output 0 shares memory"):
            battery.check_aliases(fixed(weigh_spec(mistake="alias")))

    def test_in_repeatability(self):
        with pytest.raises(AssertionError, match="two runs differ"):
            battery.check_repeats(fixed(weigh_spec(mistake="not repeatable")))

    def test_in_the_dtype_of_the_result(self):
        with pytest.raises(AssertionError, match=r"torch.float32, expected torch.float64"):
            battery.check_forward(fixed(weigh_spec(mistake="dtype"), torch.float64))

    def test_a_reference_of_zeros_shows_nothing(self):
        with pytest.raises(AssertionError, match="the comparison shows nothing"):
            assert_not_vacuous(torch.zeros(3), torch.zeros(0), what="examples")
        assert_not_vacuous(torch.zeros(3), torch.ones(1))


class TestRepeating:
    def test_a_failure_prints_the_command_that_repeats_it(self, monkeypatch, capsys):
        spec = weigh_spec(DROPS_LAST)
        make = SeededMake(3, torch.float32, default_device(), KINDS, LAYOUTS, battery.EXTENTS)
        problem = pose(spec, make, "forward")
        monkeypatch.setattr(battery, "all_specs", lambda: {"weigh": spec})
        with pytest.raises(AssertionError, match="repeat: python -c") as caught:
            battery.check_forward(problem)
        command = str(caught.value).split("repeat(", 1)[1].rsplit(")", 1)[0]
        with pytest.raises(AssertionError) as again:
            eval(f"battery.repeat({command})", {"battery": battery})
        assert str(again.value).splitlines()[:3] == str(caught.value).splitlines()[:3]
        assert "inputs of weigh([" in capsys.readouterr().out

    def test_the_command_works_in_a_shell(self):
        code = "from tests.battery import repeat; repeat('matmul', 'exact', 'float32', [0, 1, 2, 0, 1] + [0] * 20)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
        )
        assert done.stdout.strip().endswith("passes"), done.stderr

    def test_decisions_that_do_not_fit(self):
        with pytest.raises(ValueError, match=r"decision 0 of \[7\] is not an integer in \[0, 2\]"):
            Replay([7]).integer(0, 2)
        with pytest.raises(ValueError, match=r"decision 0 of \[\]"):
            Replay([]).size()


class TestMakes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_kinds_are_finite_and_stay_between_their_limits(self, kind, dtype):
        for limits in ({}, {"low": -0.5, "high": 0.25}, {"low": 1.0}, {"high": -1.0}):
            made = values(kind, (7, 9), dtype, torch.Generator().manual_seed(0), **limits)
            assert made.dtype == dtype
            assert made.isfinite().all()
            assert (made >= limits.get("low", -math.inf)).all()
            assert (made <= limits.get("high", math.inf)).all()
            assert made.ne(0).any()

    def test_what_kinds_are(self):
        def make(kind, dtype=torch.float32):
            return values(kind, (1000,), dtype, torch.Generator().manual_seed(0)).double()

        assert set(make("integers").tolist()) == {-3, -2, -1, 0, 1, 2, 3}
        assert make("constant").unique().numel() == 1
        assert (make("cancelling")[::2] > 0).all()
        assert (make("cancelling")[1::2] < 0).all()
        assert (make("positive") > 0).all()
        assert make("mixed").abs().max() > 2**15 * make("mixed").abs().min()
        assert (make("tiny").abs() < 2.0**-126).any()
        assert make("huge").abs().max() > 1e30
        special = make(SPECIAL)
        assert special.isnan().any()
        assert (special == math.inf).any()
        assert (special == -math.inf).any()
        assert not values(SPECIAL, (99,), torch.float32, torch.Generator(), low=0.0, high=1.0).isinf().any()

    def test_unknown_names(self):
        with pytest.raises(ValueError, match="unknown kind 'odd'"):
            values("odd", (1,), torch.float32, torch.Generator())
        with pytest.raises(ValueError, match="unknown kind 'odd'"):
            values("odd", (1,), torch.float32, torch.Generator(), low=0.0)
        with pytest.raises(ValueError, match="unknown layout 'odd'"):
            lay_out(torch.ones(1), "odd")

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 4), (1, 1)], ids=str)
    def test_layouts_keep_the_values(self, layout, shape):
        if layout == "expanded" or not fits(layout, len(shape)):
            return
        x = torch.randn(shape)
        y = lay_out(x, layout)
        assert torch.equal(x, y)
        assert lay_out(torch.ones(shape, dtype=torch.int32), layout).sum() == x.numel()

    def test_what_layouts_are(self):
        x = torch.randn(4, 6)
        assert lay_out(x, "transposed").stride() == (1, 4)
        assert lay_out(x, "padded").stride() == (9, 1)
        assert lay_out(x, "step").stride() == (12, 2)
        assert lay_out(x, "offset").data_ptr() % 16 == 4
        padded = lay_out(x, "padded")
        assert padded.as_strided((4, 3), (9, 1), 6).isnan().all()
        assert 0 in SeededMake(0, layouts=("expanded",)).tensor(4, 6).stride()

    def test_a_drawn_case_can_be_made_again(self):
        drawn = SeededMake(5, torch.float16, kinds=KINDS, layouts=LAYOUTS)
        shape = drawn.shape(1, 4, smallest=1)
        first = drawn.tensor(*shape)
        assert drawn.integers(9, low=2, high=4).unique().tolist() == [2, 3, 4]
        again = Replay(drawn.decisions, torch.float16, kinds=KINDS, layouts=LAYOUTS)
        assert again.shape(1, 4, smallest=1) == shape
        second = again.tensor(*shape)
        assert (second.stride(), second.dtype) == (first.stride(), torch.float16)
        assert torch.equal(first, second)

    def test_the_same_seed_the_same_values(self):
        assert torch.equal(SeededMake(1).tensor(9), SeededMake(1).tensor(9))
        assert not torch.equal(SeededMake(1).tensor(9), SeededMake(2).tensor(9))

    def test_sizes(self):
        make = SeededMake(0)
        seen = {make.size(1, 40) for _ in range(500)}
        assert {1, 2, 7, 16, 17, 31, 37} <= seen
        assert min(seen) >= 1
        assert max(seen) <= 40
        assert SeededMake(0).size(70, 72) in (70, 71, 72)

    def test_hypothesis_shrinks_to_the_simplest_case(self):
        from hypothesis import find

        found = find(
            st.composite(lambda draw: (m := DrawnMake(draw, torch.float32, KINDS, LAYOUTS), m.tensor(m.size(), 4)))(),
            lambda pair: pair[1].numel() > 0,
            settings=settings(max_examples=2000),
        )
        # Hypothesis is free to stop one short of the smallest.
        assert found[1].shape in ((2, 4), (5, 4))
        assert max(found[0].decisions) <= 1


class TestComparing:
    def test_the_message(self):
        exact = torch.ones(2, 3, dtype=torch.float64)
        actual = exact.float()
        actual[1, 2] += 3e-6
        actual[0, 1] += 1e-6
        with pytest.raises(AssertionError) as caught:
            assert_within(actual, exact, torch.full((2, 3), 5e-7), what="sum", repeat="again")
        assert str(caught.value).splitlines() == [
            "sum: 2 of 6 elements of float32 [2, 3] are outside their bound",
            "  worst at [1, 2]: got 1.0000029802322388, expected 1.0",
            "  error 2.98e-06, bound 5e-07, error/bound 5.96, 25 ulp",
            "  repeat: again",
        ]

    def test_returns_the_largest_share_of_the_bound(self):
        assert assert_within(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]).double(), 1.0) == 0.5
        assert assert_within(torch.zeros(0), torch.zeros(0).double(), 0.0) == 0.0

    def test_equal_is_inside_a_bound_of_zero(self):
        assert assert_within(torch.tensor([1.0]), torch.tensor([1.0]).double(), 0.0) == 0.0

    @pytest.mark.parametrize(
        ("actual", "exact", "bound"),
        [
            (1.0, math.nan, 1.0),
            (math.nan, 1.0, 1.0),
            (math.inf, 1.0, 1.0),
            (math.inf, -math.inf, 1.0),
            (1.0, math.inf, 1.0),
            (math.nan, math.inf, 1.0),
            (-math.inf, 4e38, 1.0),
            (1.0, 2.0, 0.5),
        ],
    )
    def test_refuses(self, actual, exact, bound):
        with pytest.raises(AssertionError, match="outside"):
            assert_within(torch.tensor([actual]), torch.tensor([exact], dtype=torch.float64), bound)

    @pytest.mark.parametrize(
        ("actual", "exact", "bound"),
        [
            (math.nan, math.nan, 0.0),
            (math.inf, math.inf, 0.0),
            (math.inf, 4e38, 1.0),
            (math.inf, 3.4028e38, 1e35),
            (7.0, 1.0, math.inf),
            (math.nan, 1.0, 1e39),
        ],
    )
    def test_accepts(self, actual, exact, bound):
        assert_within(torch.tensor([actual]), torch.tensor([exact], dtype=torch.float64), bound)

    def test_a_bound_that_says_nothing_by_mistake(self):
        for bound in (math.nan, -1.0):
            with pytest.raises(AssertionError, match="the bound is NaN or negative"):
                assert_within(torch.ones(1), torch.ones(1).double(), bound)

    def test_integers_are_equal_or_not(self):
        assert_within(torch.tensor([3]), torch.tensor([3]), 5.0)
        with pytest.raises(AssertionError, match="1 of 1 elements of int64"):
            assert_within(torch.tensor([3]), torch.tensor([4]), 5.0)

    def test_shapes(self):
        with pytest.raises(AssertionError, match=r"shape \[1\], expected \[2\]"):
            assert_within(torch.ones(1), torch.ones(2).double(), 1.0)

    def test_the_reference_in_float64_is_off_as_well(self):
        assert assert_within(torch.tensor([1.0]).double(), torch.tensor([1.5]).double(), 0.3) == pytest.approx(
            0.8333333
        )


class TestErrorBound:
    def test_of_an_operation(self):
        a, b = SeededMake(0).tensor(5, 7), SeededMake(1).tensor(7, 3)
        bound = error_bound(ops.matmul, Tensor(a), Tensor(b))
        assert bound.shape == (5, 3)
        assert bound.dtype == torch.float64
        error = (a.to(default_device()) @ b.to(default_device())).cpu().double() - (a.double() @ b.double())
        assert (error.abs() <= bound).all()
        assert bound.max() < 1e-4
        assert torch.equal(error_bound("matmul", a, b), bound)

    def test_unknown(self):
        with pytest.raises(LookupError, match=r"nothing has no record; operations with one: .*matmul"):
            error_bound("nothing", ones(1))

    def test_without_a_floating_argument(self):
        with pytest.raises(TypeError, match="no argument of transposed is a floating tensor"):
            error_bound(ops.transposed, Tensor(torch.ones(2, dtype=torch.int64)))


class Cube(Function):
    """x^3 with a mistake in the gradient, on request."""

    @staticmethod
    def forward(ctx, x, factor, only):
        ctx.save(x)
        ctx.factor, ctx.only = factor, only
        return x * x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved
        dx = 3 * x * x * dy
        if ctx.only is None:
            return dx * ctx.factor, None, None
        dx.view(-1)[ctx.only] *= ctx.factor
        return dx, None, None


def cube(x, factor=1.0, only=None):
    return Cube.apply(x, factor, only)


def point(*shape, dtype=torch.float64, requires_grad=True):
    return Tensor(SeededMake(0, dtype, default_device()).tensor(*shape), requires_grad)


class TestCheckGrads:
    @pytest.mark.parametrize("mode", ["fast", "slow"])
    def test_passes(self, mode):
        check_grads(cube, point(3, 4), mode=mode)
        check_grads(cube, point(), mode=mode)
        check_grads(cube, point(0, 3), mode=mode)
        check_grads(ops.mean, point(0, 3), mode=mode)

    @pytest.mark.parametrize("mode", ["fast", "slow"])
    @pytest.mark.parametrize("factor", [1.001, -1.0, 0.0, math.nan])
    def test_a_wrong_factor(self, mode, factor):
        with pytest.raises(GradientError, match=r"the gradient of input 0 \(shape \[3, 4\]\) is wrong"):
            check_grads(partial(cube, factor=factor), point(3, 4), mode=mode)

    def test_the_report_of_the_fast_mode_names_the_element(self):
        x = point(3, 4)
        with pytest.raises(GradientError, match=r"1 of 12 elements are off; worst at \[1, 3\]: numeric .*, analytic"):
            check_grads(partial(cube, factor=1.1, only=7), x)

    def test_the_report_of_the_slow_mode_names_input_output_and_values(self):
        x = Tensor(torch.full((2, 2), 2.0, dtype=torch.float64, device=default_device()), True)
        with pytest.raises(GradientError) as caught:
            check_grads(partial(cube, factor=2.0, only=2), x, mode="slow")
        lines = str(caught.value).splitlines()
        assert lines[0].endswith("the gradient of input 0 (shape [2, 2]) is wrong in 1 of 16 places")
        assert "d output 0 [1, 0] / d input 0 [1, 0]: numeric 12" in lines[1]
        assert "analytic 24" in lines[1]

    @pytest.mark.parametrize("mode", ["fast", "slow"])
    def test_several_inputs_and_outputs(self, mode):
        def function(x, count, y, labels):
            assert count == 3
            assert labels.dtype == torch.int64
            return cube(y), labels, cube(x, factor=1.01)

        labels = Tensor(torch.zeros(2, dtype=torch.int64))
        with pytest.raises(GradientError, match="the gradient of input 0"):
            check_grads(function, point(2), 3, point(3), labels, mode=mode)
        check_grads(function, point(2, requires_grad=False), 3, point(3), labels, mode=mode)

    def test_float32_inputs_are_checked_in_float64(self):
        x = point(3, dtype=torch.float32)

        def function(x):
            assert x.dtype == torch.float64
            return cube(x)

        check_grads(function, x)
        assert x.dtype == torch.float32
        assert x.grad is None

    def test_a_module(self):
        model = nn.Linear(3, 2)
        before = {name: p.data for name, p in model.named_parameters()}
        model.weight.grad = ones(2, 3)
        check_grads(model, point(4, 3, requires_grad=False))
        check_grads(model, point(4, 3), mode="slow")
        assert all(p.data is before[name] for name, p in model.named_parameters())
        assert model.weight.grad.tolist() == [[1.0] * 3] * 2

    def test_a_wrong_module(self):
        class Wrong(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(ones(3))

            def forward(self, x):
                return cube(self.scale, factor=0.5)

        with pytest.raises(GradientError, match=r"the gradient of parameter 'scale' \(shape \[3\]\)"):
            check_grads(Wrong(), ones(1))

    def test_a_wrong_module_is_restored(self):
        model = nn.Linear(3, 2)
        with pytest.raises(RuntimeError, match="on purpose"):
            check_grads(lambda x: (_ for _ in ()).throw(RuntimeError("on purpose")), point(2))
        with pytest.raises(ValueError, match=r"do not fit|expected x"):
            check_grads(model, point(4, 5))
        assert model.weight.dtype == torch.float32

    def test_nothing_to_check(self):
        with pytest.raises(ValueError, match="no input and no parameter requires a gradient"):
            check_grads(cube, point(2, requires_grad=False))
        with pytest.raises(ValueError, match="no output depends on an input"):
            check_grads(lambda x: x.detach(), point(2))

    def test_a_function_must_repeat_itself(self):
        count = iter(range(100))
        with pytest.raises(
            ValueError, match="two calls with the same inputs gave different results; seed what is random"
        ):
            check_grads(lambda x: cube(Tensor(x.data + next(count), True)), point(2))

    def test_a_function_must_return_tensors(self):
        with pytest.raises(TypeError, match="returned float, expected floating Tensors"):
            check_grads(lambda x: 1.0, point(2))

    def test_unknown_mode(self):
        with pytest.raises(ValueError, match="unknown mode 'careful'; known: fast, slow"):
            check_grads(cube, point(2), mode="careful")


def overrun(allocate, offset, value=1.0, error=None):
    """Write one element of guarded memory at `offset` from the start of a tensor."""
    with GuardedAllocations():
        x = allocate()
        x.as_strided((1,), (1,), x.storage_offset() + offset).fill_(value)
        if error is not None:
            raise error


class TestMemoryGuards:
    @pytest.mark.parametrize(
        "allocate",
        [
            lambda: torch.empty(3, 5),
            lambda: torch.empty_like(torch.ones(3, 5)),
            lambda: torch.ones(1).new_empty((3, 5)),
            lambda: torch.empty_strided((3, 5), (5, 1)),
            lambda: torch.zeros(3, 5),
            lambda: torch.full((3, 5), 2.0),
            lambda: torch.ones(5, 3).t().contiguous(),
            lambda: torch.ones(3, 5).clone(),
            lambda: torch.cat([torch.ones(2, 5), torch.ones(1, 5)]),
            lambda: torch.ones(3, 5).double(),
            lambda: torch.ones(3, 5).to(torch.float16),
        ],
        ids=[
            "empty", "empty_like", "new_empty", "empty_strided", "zeros", "full", "contiguous", "clone", "cat",
            "double", "to",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize(
        ("offset", "place"), [(-1, "1 before its start"), (15, "1 past its end"), (300, "286 past its end")]
    )
    def test_a_write_outside_is_found(self, allocate, offset, place):
        message = rf"shape \[3, 5\] \(.*{Path(__file__).name}:.*\) were written, the first {place}"
        with pytest.raises(MemoryGuardError, match=message):
            overrun(allocate, offset)

    def test_a_write_of_nan_is_found_too(self):
        with pytest.raises(MemoryGuardError):
            overrun(lambda: torch.empty(4), 4, value=math.nan)

    def test_values_are_as_asked(self):
        with GuardedAllocations():
            assert torch.zeros(3).tolist() == [0, 0, 0]
            assert torch.full((2,), 7).tolist() == [7, 7]
            source = torch.arange(6.0).view(2, 3)
            assert torch.equal(source.t().contiguous(), source.t())
            assert torch.cat([source, source]).shape == (4, 3)

    def test_alignment_stays(self):
        with GuardedAllocations() as guards:
            assert torch.empty(3, dtype=torch.float16).data_ptr() % 64 == 0
            inputs = [torch.ones(8)[1:], torch.ones(8, 8).t(), torch.ones(2, 8)[:, ::2], torch.ones(3, 1).expand(3, 4)]
            for x in inputs:
                placed = guards.guard(x)
                assert (placed.data_ptr() % 64, placed.stride()) == (x.data_ptr() % 64, x.stride())
                assert torch.equal(placed, x)

    def test_views_are_left_alone(self):
        with GuardedAllocations() as guards:
            x = torch.ones(2, 3)
            count = len(guards._guards)
            assert x.contiguous().data_ptr() == x.data_ptr()
            assert x.to(torch.float32).data_ptr() == x.data_ptr()
            assert len(guards._guards) == count

    def test_the_first_element_of_a_gap(self):
        guards = GuardedAllocations()
        x = guards.guard(torch.ones(3, 8)[:, :5])
        x.as_strided((1,), (1,), x.storage_offset() + 5).fill_(1.0)
        with pytest.raises(MemoryGuardError, match="the first in a gap between its rows"):
            guards.check()

    def test_a_changed_input_is_found(self):
        guards = GuardedAllocations()
        x = guards.guard(torch.ones(3))
        x[1] = 2.0
        with pytest.raises(MemoryGuardError, match=r"1 elements of the input float32 tensor of shape \[3\]"):
            guards.check()

    def test_an_exception_inside_is_not_hidden(self):
        with pytest.raises(KeyError):
            overrun(lambda: torch.empty(4), 4, error=KeyError)

    def test_guarded_output(self):
        x, check = guarded(torch.zeros(4))
        x.fill_(5.0)
        check()
        x.as_strided((1,), (1,), x.storage_offset() + 4).fill_(1.0)
        with pytest.raises(MemoryGuardError):
            check()

    @pytest.mark.parametrize("context", [poisoned_memory, GuardedAllocations])
    def test_fresh_memory_is_poisoned(self, context):
        with context():
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                assert torch.empty(3, 4, dtype=dtype).isnan().all()
                assert torch.ones(1, dtype=dtype).new_empty(5).isnan().all()
            for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
                assert (torch.empty(9, dtype=dtype) > 50).all()
            assert torch.empty(0).numel() == 0
        assert torch.zeros(3).sum() == 0
