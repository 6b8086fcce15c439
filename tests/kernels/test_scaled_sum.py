"""A scaled sum and its gradients: against the formulas in float64, in every mix of dtypes and with every tile."""

import functools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import scaled_sum
from minidl.kernels.bias_act import depth
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing.memory import GuardedAllocations

DTYPES = [torch.float32, torch.float16, torch.float64] + ([] if launch.INTERPRETED else [torch.bfloat16])


def _tensors(F, R, N, dtypes, seed=0):
    """x, scale, factor, added and dy; R rows for each of F factors."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (F, R, N), (N,), (F,), (F, R, N), (F, R, N)
    made = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return [t.to(default_device(), dtype) for t, dtype in zip(made, dtypes, strict=True)]


def _check(x, scale, factor, added, dy):
    """Results are within what their roundings can add up to: u for each operation, then the result's own."""
    exact = [None if t is None else t.double() for t in (x, scale, factor, added, dy)]
    each = 1.0 if factor is None else exact[2].view(-1, *[1] * (x.dim() - 1))
    product = exact[0] * exact[1] * each
    guards = GuardedAllocations()
    placed = [None if t is None else guards.guard(t) for t in (x, scale, factor)]
    others = guards.guard(added), guards.guard(dy)
    with guards:
        y = scaled_sum.scaled_sum(*placed, others[0])
        dx, dscale = scaled_sum.scaled_sum_grad(others[1], *placed)

    def near(found, wanted, error, dtype):
        assert (found.dtype, found.shape) == (dtype, wanted.shape)
        # Halfway between neighbours, of what is already off; the smallest of a dtype are not relative.
        own = (wanted.abs() + error) * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
        assert bool(((found.double() - wanted).abs() <= error + own).all())

    def unit(*tensors):
        # float64's own error is also the reference's.
        double = any(t is not None and t.dtype == torch.float64 for t in tensors)
        return 2 * 2.0**-53 if double else 2.0**-24

    u = unit(x, scale, factor, added)
    near(
        y, exact[3] + product, 3.1 * u * (product.abs() + exact[3].abs()), scaled_sum.promoted(x, scale, factor, added)
    )
    u = unit(x, scale, factor, dy)
    wanted = exact[4] * each * exact[1]
    near(dx, wanted, 2.1 * u * wanted.abs(), x.dtype)
    terms = (exact[4] * each * exact[0]).flatten(0, -2)
    # A term goes through two products and the additions of its chain; the reference through those of all rows.
    chain = depth(len(terms), x.shape[-1], x.dtype) + 3 + (len(terms) if u < 2.0**-50 else 0)
    near(dscale, terms.sum(0), 1.1 * chain * u * terms.abs().sum(0), scale.dtype)


@given(
    st.integers(0, 4), st.integers(0, 9), st.integers(0, 20), st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
    st.booleans(), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_results_and_gradients(F, R, N, dtypes, divided, apart, seed):
    x, scale, factor, added, dy = _tensors(F, R, N, dtypes, seed)
    if apart:
        x, added, dy = (torch.cat([t, t], -1)[..., :N] for t in (x, added, dy))
    _check(x, scale, factor if divided else None, added, dy)


def test_every_tile():
    families = "bias_act", "bias_act_grad"
    given = _tensors(5, 13, 77, [torch.float32] * 5)
    for family in families:
        targets = list(launch.table(family)) if launch.INTERPRETED else [launch.target()]
        for tile in {str(t.sizes): t for name in targets for t in launch.tiles(family, name)}.values():
            with launch.force(**{family: tile}):
                _check(*given)


def test_bits_are_torchs_and_the_same_in_any_number_of_bands(monkeypatch):
    x, scale, factor, added, dy = _tensors(6, 7, 33, [torch.float32] * 5)
    each = factor[:, None, None]
    assert torch.equal(scaled_sum.scaled_sum(x, scale, factor, added), added + x * scale * each)
    whole = [t.round() for t in (dy, x)]
    wanted = (whole[0] * whole[1]).sum((0, 1))
    for processors in (1, 3, 132):
        monkeypatch.setattr(launch, "processors", functools.cache(lambda count=processors: count))
        with launch.force(bias_act_grad=launch.Tile({"BLOCK_M": 4, "BLOCK_N": 16})):
            assert torch.equal(scaled_sum.scaled_sum_grad(*whole, scale, None)[1], wanted)
            assert torch.equal(scaled_sum.scaled_sum_grad(dy, x, scale, factor)[0], dy * each * scale)


@pytest.mark.parametrize("N", [16, 17])
def test_rows_of_whole_tiles_and_of_one_value_more(N):
    x, scale, factor, added, _ = _tensors(3, 3, N, [torch.float32] * 5)
    with launch.force(bias_act=launch.Tile({"BLOCK_M": 4, "BLOCK_N": 8})), GuardedAllocations():
        y = scaled_sum.scaled_sum(x, scale, factor, added)
    assert torch.equal(y, added + x * scale * factor[:, None, None])


def test_only_what_is_wanted_is_computed():
    x, scale, factor, _, dy = _tensors(2, 3, 5, random.Random(0).choices(DTYPES, k=5))
    dx, dscale = scaled_sum.scaled_sum_grad(dy, x, scale, factor)
    only = [scaled_sum.scaled_sum_grad(dy, x, scale, factor, want_x=not of, want_scale=of) for of in (False, True)]
    assert torch.equal(only[0][0], dx)
    assert torch.equal(only[1][1], dscale)
    assert only[0][1] is only[1][0] is None
    assert scaled_sum.scaled_sum_grad(dy, x, scale, factor, want_x=False, want_scale=False) == (None, None)


def test_bad_arguments():
    x, scale, factor, added, _ = _tensors(2, 3, 4, [torch.float32] * 5)
    for args, message in (
        ((x, scale[:3], factor, added), r"scale \[3\]; expected \[\.\.\., N\] of both and \[N\]"),
        ((x, scale, factor, added[:1]), r"added \[1, 3, 4\]"),
        ((x, scale, factor.repeat(2), added), r"factor has shape \[4\], expected \[F\] with F a divisor of 6 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            scaled_sum.scaled_sum(*args)
    with pytest.raises(TypeError, match=r"scale has dtype torch\.int64"):
        scaled_sum.scaled_sum(x, scale.long(), None, added)
