"""What is computed of a gradient, from the output or the input, in how many bands of rows."""

import functools

import pytest
import torch

from minidl.kernels import activation, bias_act
from minidl.runtime import launch


def rows_and_bias(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((50, 33), (33,), (50, 33))]
    return [t.to(device, dtype) for t in parts]


def launched(function):
    """Names of the kernels that a call launches."""
    names = []
    with launch.record(lambda kernel, grid, args, meta: names.append(kernel.__name__), launch.target()):
        function()
    return names


def test_only_what_is_wanted_is_computed(device):
    x, b, dy = rows_and_bias(device)
    dx, db = bias_act.bias_act_grad(dy, x, b, "gelu")
    only_dx = bias_act.bias_act_grad(dy, x, b, "gelu", want_bias=False)
    only_db = bias_act.bias_act_grad(dy, x, b, "gelu", want_x=False)
    assert torch.equal(only_dx[0], dx)
    assert torch.equal(only_db[1], db)
    assert only_dx[1] is None
    assert only_db[0] is None
    assert launched(lambda: bias_act.bias_act_grad(dy, x, b, "gelu", want_bias=False)) == ["bias_act_grad_kernel"]
    assert launched(lambda: bias_act.bias_act_grad(dy, x, b, "gelu", want_x=False, want_bias=False)) == []


def test_without_an_activation_the_gradient_is_passed_on(device):
    x, b, dy = rows_and_bias(device)
    dx, db = bias_act.bias_act_grad(dy, x, b, None)
    assert dx is dy
    torch.testing.assert_close(db, dy.sum(0))


def test_rows_of_a_joined_tensor_are_copied_as_they_are_summed(device):
    x, _, dy = rows_and_bias(device)
    part = torch.cat([x, dy.round(), x], 1)[:, 33:66]
    dx, db = bias_act.bias_act_grad(part, part, None, None)
    assert dx.is_contiguous()
    assert torch.equal(dx, part)
    assert torch.equal(db, part.sum(0))
    assert "bias_act_grad_kernel" in launched(lambda: bias_act.bias_act_grad(part, part, None, None))
    assert bias_act.bias_act_grad(part, part, None, None, want_bias=False)[0] is part


@pytest.mark.parametrize("act", activation.FROM_OUTPUT)
def test_gradients_from_the_output(act, device):
    x, b, dy = rows_and_bias(device)
    y = bias_act.bias_act(x, b, act)
    for got, expected in zip(
        bias_act.bias_act_grad(dy, y, None, act, from_output=True), bias_act.bias_act_grad(dy, x, b, act), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", [("leaky_relu", 0.3), "silu"])
def test_the_preactivation_stands_for_input_and_bias(act, device):
    x, b, dy = rows_and_bias(device)
    z = bias_act.bias_act(x, b, None)
    for got, expected in zip(
        bias_act.bias_act_grad(dy, z, None, act), bias_act.bias_act_grad(dy, x, b, act), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_the_sum_over_rows_is_the_same_in_any_number_of_bands(device, monkeypatch):
    x, b, dy = (t.round() for t in rows_and_bias(device))
    results = []
    with launch.force(bias_act_grad=launch.Tile({"BLOCK_M": 4, "BLOCK_N": 16})):
        for processors in (1, 3, 132):
            monkeypatch.setattr(launch, "processors", functools.cache(lambda count=processors: count))
            results.append(bias_act.bias_act_grad(dy, x, b, "relu"))
    for dx, db in results:
        assert torch.equal(dx, results[0][0])
        assert torch.equal(db, torch.where(x + b > 0, dy, 0).sum(0))


@pytest.mark.parametrize("columns", [15, 16, 17])
def test_one_column_more_than_a_tile_has(columns, device):
    x = torch.arange(-30.0, 5 * columns - 30.0, device=device).view(5, columns)
    b = torch.arange(float(columns), device=device)
    with launch.force(bias_act=launch.Tile({"BLOCK_M": 2, "BLOCK_N": 16})):
        assert torch.equal(bias_act.bias_act(x, b, "relu"), (x + b).relu())


def test_the_bias_gradient_is_summed_before_it_is_rounded(device):
    rows = 4096
    x = torch.ones(rows, 3, dtype=torch.float16, device=device)
    dy = torch.full_like(x, 2.0**-11)
    dy[0] = 1
    _, db = bias_act.bias_act_grad(dy, x, torch.zeros(3, dtype=x.dtype, device=device), "relu")
    assert db.tolist() == [3.0] * 3  # in float16 every further 2^-11 would be lost beside 1


def test_rows_may_lie_apart(device):
    wide = torch.randn(50, 40, device=device)
    x, b = wide[:, :33], torch.randn(33, device=device)
    read = []
    with launch.record(lambda kernel, grid, args, meta: read.append(args[0]), launch.target()):
        bias_act.bias_act(x, b, "relu")
    assert read[0].data_ptr() == x.data_ptr()
    torch.testing.assert_close(bias_act.bias_act(x, b, "relu"), torch.relu(x + b))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"act": "gelu", "from_output": True},
            "the derivative of gelu does not follow from its output; give its input",
        ),
        ({"act": "relu", "from_output": True, "with_bias": True}, "the bias is already in the output; give b=None"),
        ({"act": "relu", "rows": 3}, r"dy has shape \[3, 4\], expected x's \[2, 4\]"),
    ],
)
def test_gradients_of_what_does_not_fit_are_refused(arguments, message, device):
    x, dy = torch.ones(2, 4, device=device), torch.ones(arguments.get("rows", 2), 4, device=device)
    b = torch.ones(4, device=device) if "with_bias" in arguments else None
    with pytest.raises(ValueError, match=message):
        bias_act.bias_act_grad(dy, x, b, arguments["act"], arguments.get("from_output", False))
