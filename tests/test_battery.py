"""The battery itself: one that passes wrong kernels would be worse than none, so kernels are broken here.

One operation, the rows of a matrix weighted and added, has a switch for each kind of mistake; the check that is there
for that mistake must find it, and the right kernel must pass every check.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, settings

from minidl.autograd import Function
from minidl.kernels import gemm
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing import GradientError, assert_not_vacuous
from minidl.testing.specs import Bad, Case, OpSpec, bounds
from minidl.testing.specs.make import KINDS, LAYOUTS, SeededMake
from tests import battery
from tests.battery import pose
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
        tl.store(p_x, b_y, mask=(K > 0) & (i_m == 0))


class Weigh(Function):
    calls = 0

    @staticmethod
    def forward(ctx, x, w, bug, mistake):
        ctx.save(x, w)
        ctx.mistake = mistake
        y = torch.empty(x.shape[:1], dtype=x.dtype, device=x.device)
        tile = launch.tile("conv_taps", x.dtype, total=x.shape[1])
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
        families=("conv_taps",),
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
        with launch.force(conv_taps=large):
            battery.check_forward(problem)
        with launch.force(conv_taps=launch.Tile({"BLOCK": 1024})), pytest.raises(AssertionError, match="outside"):
            battery.check_forward(problem)

    def test_the_tables_of_a_gpu_have_such_a_tile(self):
        assert any(tile["BLOCK"] < 1500 for name in ("sm_80", "sm_90") for tile in launch.tiles("conv_taps", name))

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
