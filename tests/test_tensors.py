"""Tensor: construction, conversion, the methods that are not operations, and the operators."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch

import minidl
import minidl.ops
from minidl.autograd import enable_grad, no_grad
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor, as_tensor, default_device, from_torch, full, ones, zeros


def tensor(*values, requires_grad=False, dtype=torch.float32):
    return Tensor(torch.tensor(values, dtype=dtype, device=default_device()), requires_grad)


class TestConstruction:
    def test_wraps_without_a_copy(self):
        data = torch.ones(3)
        x = from_torch(data)
        data.zero_()
        assert x.tolist() == [0, 0, 0]
        assert x.to_torch().data_ptr() == data.data_ptr()

    def test_only_torch_tensors_are_wrapped(self):
        with pytest.raises(TypeError, match=r"with the other sign; pass t.resolve_neg\(\)"):
            Tensor(torch.ones(2, dtype=torch.complex64).conj().imag)
        with pytest.raises(TypeError, match=r"Tensor wraps a torch tensor, got list; use minidl.as_tensor\(...\)"):
            Tensor([1.0])

    @pytest.mark.parametrize("data", [3, [1, 2], [[True]]], ids=str)
    def test_integers_have_no_gradient(self, data):
        with pytest.raises(TypeError, match="only floating tensors can have a gradient, this one is torch"):
            as_tensor(data, requires_grad=True)

    @pytest.mark.parametrize(
        ("data", "dtype", "shape"),
        [
            (1.5, torch.float32, ()),
            ([1, 2], torch.int64, (2,)),
            ([[1.0], [2.0]], torch.float32, (2, 1)),
            (np.zeros((2, 3), np.float16), torch.float16, (2, 3)),
            (torch.zeros(2, dtype=torch.float64), torch.float64, (2,)),
            (True, torch.bool, ()),
        ],
        ids=str,
    )
    def test_as_tensor(self, data, dtype, shape):
        x = as_tensor(data)
        assert (x.dtype, tuple(x.shape), x.device) == (dtype, shape, default_device())
        assert as_tensor(x, dtype=torch.float64).dtype == torch.float64

    def test_as_tensor_of_a_ragged_list(self):
        with pytest.raises((TypeError, ValueError)):
            as_tensor([[1.0], [1.0, 2.0]])

    def test_filled(self):
        assert zeros(2, 2).tolist() == [[0, 0], [0, 0]]
        assert ones((2,), dtype=torch.float16).dtype == torch.float16
        assert full((2,), 2.5).tolist() == [2.5, 2.5]
        assert zeros().shape == ()
        x = ones(2, requires_grad=True)
        assert x.requires_grad
        assert x.is_leaf


class TestReading:
    def test_shape(self):
        x = zeros(2, 3)
        assert (x.shape, x.size(), x.size(1), x.ndim, x.dim(), x.numel(), len(x)) == ((2, 3), (2, 3), 3, 2, 2, 6, 2)

    def test_numbers(self):
        x = tensor(2.5).data[0]
        assert (Tensor(x).item(), float(Tensor(x)), int(Tensor(x)), bool(Tensor(x))) == (2.5, 2.5, 2, True)

    def test_several_elements_are_no_number(self):
        with pytest.raises(RuntimeError):
            tensor(1.0, 2.0).item()
        with pytest.raises(RuntimeError, match=r"shape \[2\] is neither true nor false; compare and reduce it"):
            bool(tensor(1.0, 2.0))

    def test_numpy(self):
        x = tensor(1.0, 2.0)
        assert x.numpy().tolist() == [1, 2]
        with pytest.raises(RuntimeError, match=r"call .detach\(\).numpy\(\)"):
            tensor(1.0, requires_grad=True).numpy()

    def test_dlpack(self):
        x = tensor(1.0, 2.0)
        assert torch.from_dlpack(x).data_ptr() == x.data.data_ptr()

    def test_a_scalar_has_no_length(self):
        with pytest.raises(TypeError):
            len(full((), 1.0))
        with pytest.raises(TypeError, match="0 dimensions cannot be iterated over"):
            iter(full((), 1.0))

    def test_repr(self):
        assert "requires_grad=True)" in repr(tensor(1.0, requires_grad=True))
        assert "grad_fn=<Add>" in repr(tensor(1.0, requires_grad=True) + 1)
        assert "grad" not in repr(tensor(1.0))

    def test_hash_is_identity(self):
        a, b = tensor(1.0), tensor(1.0)
        assert len({a, b, a}) == 2


class TestGradientFlags:
    def test_requires_grad(self):
        x = tensor(1.0)
        assert not x.requires_grad
        x.requires_grad = True
        assert (x + 1).requires_grad
        x.requires_grad_(False)
        assert not (x + 1).requires_grad

    def test_a_result_cannot_stop_requiring_a_gradient(self):
        y = tensor(1.0, requires_grad=True) + 1
        with pytest.raises(RuntimeError, match=r"is the result of an operation; use .detach\(\)"):
            y.requires_grad_(False)

    def test_detach_shares_memory(self):
        x = tensor(1.0, requires_grad=True)
        y = x.detach()
        assert not y.requires_grad
        y.fill_(3.0)
        assert x.tolist() == [3.0]

    def test_leaf(self):
        x = tensor(1.0, requires_grad=True)
        assert (x.is_leaf, (x + 1).is_leaf, (x + 1).detach().is_leaf) == (True, False, True)


class TestGrad:
    def test_grad_can_be_set_and_forgotten(self):
        x = tensor(1.0, requires_grad=True)
        x.grad = tensor(5.0)
        (x * 2).backward()
        assert x.grad.tolist() == [7.0]
        x.grad = None
        assert x.grad is None
        assert x.raw_grad is None

    @pytest.mark.parametrize("value", [tensor(1.0, 2.0), tensor(1.0, dtype=torch.float64)], ids=["shape", "dtype"])
    def test_grad_has_the_form_of_its_tensor(self, value):
        with pytest.raises(ValueError, match=r"grad has shape .* expected \[1\] and torch.float32"):
            tensor(1.0, requires_grad=True).grad = value

    @pytest.mark.gpu
    def test_grad_lies_where_its_tensor_does(self):
        with pytest.raises(ValueError, match="grad is on cpu, expected cuda"):
            tensor(1.0, requires_grad=True).grad = Tensor(torch.ones(1))

    def test_grad_shares_memory_with_what_is_stored(self):
        x = tensor(1.0, requires_grad=True)
        (x * 2).backward()
        x.grad.zero_()
        assert x.grad.tolist() == [0.0]

    def test_grad_of_rows_is_dense(self):
        w = Tensor(torch.zeros(3, 1, device=default_device()), True)
        rows = torch.tensor([2], dtype=torch.int32, device=w.device)
        w._grad = RowGrad(rows, torch.ones(1, 1, device=w.device), (3, 1))
        assert w.grad.tolist() == [[0], [0], [1]]
        assert isinstance(w.raw_grad, RowGrad)


class TestInPlace:
    def test_zero_fill_copy(self):
        x = tensor(1.0, 2.0)
        assert x.fill_(3.0) is x
        assert x.tolist() == [3, 3]
        assert x.copy_(tensor(4.0, 5.0, dtype=torch.float64)).tolist() == [4, 5]
        assert x.zero_().tolist() == [0, 0]

    def test_copy_wants_a_shape_that_broadcasts(self):
        assert tensor(1.0, 2.0).copy_(tensor(3.0)).tolist() == [3, 3]
        with pytest.raises(ValueError, match=r"copy_: src has shape \[2\], expected \[1\]"):
            tensor(1.0).copy_(tensor(1.0, 2.0))

    @pytest.mark.parametrize(
        "change",
        [lambda x: x.zero_(), lambda x: x.fill_(1.0), lambda x: x.normal_()],
        ids=["zero", "fill", "normal"],
    )
    def test_a_recorded_tensor_is_not_changed_in_place(self, change):
        for x in (tensor(1.0, requires_grad=True), tensor(1.0, requires_grad=True) + 1):
            with pytest.raises(RuntimeError, match=r"cannot be changed in place; do it under minidl.no_grad\(\)"):
                change(x)
            with no_grad():
                change(x)
            with no_grad(), enable_grad(), pytest.raises(RuntimeError, match="cannot be changed in place"):
                change(x)
            change(x.detach())

    def test_assignment_to_elements(self):
        x, ours = torch.arange(12.0).view(3, 4), Tensor(torch.arange(12.0, device=default_device()).view(3, 4))
        version = ours.data._version
        for index, value in ((1, 5), ((0, slice(1, 3)), -1.0), ([2, 0], 7.5), ((slice(None), torch.tensor([3])), 2)):
            x[index] = value
            ours[index] = value
        x[x > 5], ours[ours > 5] = 0, 0
        x[:, 1:], ours[:, 1:] = x[:, :-1].clone(), ours[:, :-1]
        assert ours.tolist() == x.tolist()
        assert ours.data._version > version


class TestOperators:
    """That each operator is the operation; the operations have tests of their own."""

    @pytest.mark.parametrize(
        "expression",
        [
            "a + b", "a - b", "a * b", "a / b", "a ** 2", "2 + a", "2 - a", "2 * a", "2 / a", "2 ** a", "a + 1", "-a",
            "abs(a)", "a @ b", "a == b", "a != b", "a < b", "a <= b", "a > b", "a >= b", "a < 2", "a.T", "a[0]",
            "a[:, 1]", "a.sum()", "a.sum(0)", "a.mean(1, keepdim=True)", "a.exp()", "a.log()", "a.sqrt()", "a.square()",
            "a.relu()", "a.sigmoid()", "a.tanh()", "a.softmax(-1)", "a.log_softmax(-1)", "a.reshape(4)", "a.view(4)",
            "a.view(-1, 1)", "a.flatten()", "a.transpose(0, 1)", "a.permute(1, 0)", "a.unsqueeze(0).squeeze(0)",
            "a.argmax(1)", "a.unsqueeze(0).expand(3, 2, 2)", "a.contiguous()", "a.matmul(b)", "a.norm()", "a.abs()",
            "a.half()", "a.double()", "a.float()", "a.clone()", "a.max()",
        ],
    )  # fmt: skip
    def test_like_torch(self, expression):
        values = {"a": [[1.0, 2.0], [3.0, 4.0]], "b": [[1.0, 3.0], [0.5, 4.0]]}
        ours = eval(expression, {name: as_tensor(value) for name, value in values.items()})
        theirs = eval(expression, {name: torch.tensor(value) for name, value in values.items()})
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours.data.cpu().double(), theirs.double(), atol=1e-6)

    def test_a_clone_is_part_of_the_graph(self):
        x = tensor(2.0, requires_grad=True)
        y = x.clone()
        assert y.data.data_ptr() != x.data.data_ptr()
        (y * y).backward()
        assert x.grad.tolist() == [4.0]

    def test_iteration_gives_rows(self):
        x = tensor(1.0, 2.0, requires_grad=True)
        first, second = x
        (first * second).backward()
        assert x.grad.tolist() == [2.0, 1.0]

    def test_unknown_operands_are_a_type_error(self):
        for other in ("text", None, [1.0]):
            with pytest.raises(TypeError):
                tensor(1.0) + other
            with pytest.raises(TypeError):
                other - tensor(1.0)

    def test_numpy_numbers_are_numbers(self):
        assert (tensor(1.0) * np.float64(2.0)).tolist() == [2.0]
        product = np.float64(2.0) * tensor(1.0)
        assert isinstance(product, Tensor)
        assert product.tolist() == [2.0]


@pytest.mark.gpu
class TestDevices:
    def test_moving(self):
        x = zeros(2)
        assert x.device.type == "cuda"
        assert x.cpu().device.type == "cpu"
        assert x.cpu().cuda().device == x.device

    def test_operands_on_two_devices(self):
        with pytest.raises(ValueError, match=r"got operands on cuda:0 and cpu; move one of them with .to\(\)"):
            zeros(2) + zeros(2, device="cpu")

    def test_a_gradient_from_another_device(self):
        y = tensor(1.0, requires_grad=True) * 2
        with pytest.raises(RuntimeError, match=r"gradient has shape \[1\], torch.float32 on cpu"):
            y.backward(Tensor(torch.ones(1)))

    def test_a_tensor_on_the_cpu_is_refused(self):
        with pytest.raises(TypeError, match="kernels are compiled for CUDA in this process"):
            zeros(2, device="cpu") + 1


def test_training_steps_leave_nothing_behind():
    """No object of the graph survives a step, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        w = tensor(1.0, 2.0, requires_grad=True)
        for _ in range(2):
            loss = (w * w).sum()
            loss.backward()
            watched = [weakref.ref(loss), weakref.ref(loss._node)]
            del loss
            assert [reference() for reference in watched] == [None, None]
    finally:
        gc.enable()


def test_a_loss_is_a_float():
    loss = (tensor(3.0, requires_grad=True) ** 2).mean()
    assert math.isclose(loss.item(), 9.0, rel_tol=1e-6)
    assert float(loss) == loss.item()


def test_the_names_of_the_package():
    assert minidl.Tensor is Tensor
    assert minidl.no_grad is no_grad
