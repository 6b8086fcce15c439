"""`x[i] = y` where gradients are recorded, against torch."""

import pytest
import torch

import minidl
from minidl import Tensor, ops
from minidl.autograd import grad
from minidl.tensors import default_device, zeros


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(values):
    return Tensor(values.to(default_device(), copy=True), True)


def filled(t, x, y, index):
    """Into a tensor of the graph and into a plain one, twice, with a number between."""
    made, plain = x * 2, x.detach() * 0
    made[index] = y * y
    made[0, 0] = 7
    plain[index] = y
    plain[2] = plain[1] * 3
    return (made**2).sum() + (plain * made.exp()).sum()


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        (0, (4,)), ((slice(None), 1), (3,)), ((slice(1, 3), slice(0, 4, 2)), (2, 2)), ((1, 2), ()), (..., (1, 3, 4)),
        (slice(0, 2), (4,)), ([2, 0], (2, 4)), ([0, 0], (2, 4)), ((slice(None), torch.tensor([3, 1])), (3, 1)),
        (torch.tensor([True, False, True]), (1, 4)), (torch.eye(3, 4) > 0, (3,)),
    ],
)  # fmt: skip
def test_gradients_are_torchs(index, shape, device):
    if index == [0, 0] and device.type == "cuda":
        pytest.skip("which of two values stays torch leaves open on a GPU")
    values = drawn(3, 4), drawn(*shape, seed=1)
    x, y = map(leaf, values)
    a, b = (v.clone().requires_grad_() for v in values)
    ours, theirs = filled(minidl, x, y, index), filled(torch, a, b, index)
    first = grad(ours, [x, y], create_graph=True), torch.autograd.grad(theirs, [a, b], create_graph=True)
    for i in range(2):
        torch.testing.assert_close(first[0][i].data.cpu(), first[1][i].detach())
    second = grad(sum((g * g).sum() for g in first[0]), [x, y])
    expected = torch.autograd.grad(sum((g * g).sum() for g in first[1]), [a, b])
    for found, wanted in zip(second, expected, strict=True):
        torch.testing.assert_close(found.data.cpu(), wanted)


def test_a_result_filled_step_by_step_keeps_its_memory():
    steps, out = leaf(drawn(5, 3)), zeros(5, 3, dtype=torch.float64)
    place, version = out.data.data_ptr(), out.data._version
    for i in range(5):
        out[i] = steps[i] * (i + 1)
    assert out.data.data_ptr() == place
    assert out.data._version > version
    out.sum().backward()
    assert steps.grad[:, 0].tolist() == [1, 2, 3, 4, 5]


def test_what_the_operation_before_saved_of_its_result_is_refused_as_in_torch():
    x = leaf(drawn(3))
    y = ops.exp(x)
    y[0] = 0
    with pytest.raises(RuntimeError, match=r"Exp .* was changed in place"):
        y.sum().backward()
    z = ops.leaky_relu(x)  # whose operand torch saves
    z[0] = 0
    z.sum().backward()
    torch.testing.assert_close(
        x.grad.data.cpu(), torch.where(x.data.cpu() > 0, 1.0, 0.01).double() * torch.tensor([0, 1, 1])
    )


def test_whoever_holds_the_tensor_sees_it_and_the_dtype_is_its_own():
    x, y = leaf(drawn(3)), Tensor(torch.ones(2, device=default_device()), True)
    held = [x * 1]
    held[0][1:] = y * 2
    assert held[0].dtype == torch.float64
    held[0].sum().backward()
    assert (y.grad.dtype, y.grad.tolist(), x.grad.tolist()) == (torch.float32, [2, 2], [1, 0, 0])


def test_refuses_what_torch_refuses():
    x = leaf(drawn(3))
    with pytest.raises(RuntimeError, match="a tensor whose gradient is recorded cannot be changed in place"):
        x[0] = 1
    y = x * 2
    squared = y * y
    y[0] = 1
    with pytest.raises(RuntimeError, match=r"saved tensor 0 .* was changed in place"):
        squared.sum().backward()
    y = x * 2
    view = y[1:]
    with pytest.raises(RuntimeError, match="shares memory with a view of it, or with a value saved for backward"):
        y[0] = view[1]
    with pytest.raises(TypeError, match=r"a tensor with a gradient cannot become torch.int64"):
        zeros(3, dtype=torch.int64)[0] = (x * 1)[0]
    for made in (zeros, torch.zeros):
        whole, floats = made(3, dtype=torch.int64), made(2)
        with pytest.raises(
            (TypeError, RuntimeError), match=r"dtypes match|expected torch.int64 at an index of tensors"
        ):
            whole[[0, 1]] = floats + 0.5
        with pytest.raises((TypeError, RuntimeError), match=r"dtypes match|y is torch.int64, expected torch.float32"):
            floats[whole[:2] > -1] = whole[:2]
        whole[0:2] = floats + 1.5
        whole[whole == 0] = floats[0] + 7.5
        whole[[1]] = 2.5
        floats[[0]] = 3
        assert (whole.tolist(), floats.tolist()) == ([1, 2, 7], [3, 0])
    out = zeros(3)
    with pytest.raises(RuntimeError, match="expanded size"):
        out[:] = Tensor(torch.ones(2, device=default_device()), True) * 1
    assert not out.requires_grad
