"""What backward refuses, by the operation's name and the line that called it."""

import re
from pathlib import Path

import pytest
import torch

import minidl
from minidl.autograd import no_grad
from minidl.tensors import Tensor, default_device, ones
from tests.autograd.functions import Add, Mul, Square, grad_of, leaf


def line_of(text, after=""):
    """Line number of the first line of this file with `text`, after a line with `after`."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if after in line), 0)
    return next(i for i, line in enumerate(lines, 1) if text in line and i > start)


def test_a_second_backward_names_operation_and_line():
    x = leaf(3.0)
    y = Square.apply(x)  # the line in the message
    line = line_of("# the line in the message")
    y.backward()
    with pytest.raises(RuntimeError, match=rf"Square \({re.escape(__file__)}:{line}\).*retain_graph=True"):
        y.backward()
    assert grad_of(x) == [6.0], "no gradient may change"


def test_a_second_backward_through_a_shared_part_changes_nothing():
    x, w = leaf(3.0), leaf(1.0)
    shared = Square.apply(x)
    Add.apply(shared, w).backward()
    other = Mul.apply(shared, w)
    with pytest.raises(RuntimeError, match=r"Square .*second time"):
        other.backward()
    assert (grad_of(x), grad_of(w)) == ([6.0], [1.0])


def test_an_in_place_change_of_a_saved_tensor():
    x = leaf(3.0)
    y = Square.apply(x)
    line = line_of("y = Square.apply(x)", after="def test_an_in_place_change")
    with no_grad():
        x.fill_(4.0)
    with pytest.raises(RuntimeError, match=rf"Square \(.*:{line}\).*saved tensor 0 of shape \[1\].*changed in place"):
        y.backward()


def test_an_in_place_change_through_a_view():
    x = Tensor(torch.ones(4, device=default_device()), True)
    y = Square.apply(x)
    with no_grad():
        Tensor(x.data[1:2]).zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward(ones(4))


def test_a_tensor_that_was_not_saved_may_change():
    x, y = leaf(1.0), leaf(2.0)
    z = Add.apply(x, y)
    with no_grad():
        x.fill_(5.0)
    z.backward()
    assert grad_of(x) == [1.0]


def test_a_wrong_number_of_gradients():
    class One(Mul):
        @staticmethod
        def backward(ctx, dy):
            return dy

    z = One.apply(leaf(1.0), leaf(2.0))
    with pytest.raises(RuntimeError, match=r"One \(.*\): backward returned 1 gradients for 2 inputs"):
        z.backward()


@pytest.mark.parametrize("change", [lambda g: g.view(1, -1), lambda g: g.double()])
def test_a_gradient_of_the_wrong_form(change):
    class Wrong(Square):
        @staticmethod
        def backward(ctx, dy):
            return change(dy)

    z = Wrong.apply(leaf(1.0))
    with pytest.raises(RuntimeError, match=r"Wrong \(.*\): backward returned a gradient of shape .* for an input of"):
        z.backward()


def test_backward_without_a_graph():
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        leaf(1.0, requires_grad=False).backward()
    with no_grad():
        y = Square.apply(leaf(1.0))
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        y.backward()


def test_backward_of_several_elements_needs_a_gradient():
    y = Square.apply(leaf(1.0, 2.0))
    with pytest.raises(RuntimeError, match=r"shape \[2\] needs `gradient`"):
        y.backward()


@pytest.mark.parametrize(
    "gradient", [ones(3), ones(2, dtype=torch.float64), ones(2, 1)], ids=["length", "dtype", "rank"]
)
def test_a_seed_of_the_wrong_form(gradient):
    y = Square.apply(leaf(1.0, 2.0))
    with pytest.raises(RuntimeError, match=r"gradient has shape .* expected \[2\], torch.float32"):
        y.backward(gradient)


def test_the_caller_is_named_also_beside_the_package():
    """A folder whose name begins like the package's is not the package."""
    code = compile("result = Square.apply(x)", str(Path(minidl.__file__).parent) + "_project/train.py", "exec")
    space = {"Square": Square, "x": leaf(1.0)}
    exec(code, space)
    assert "_project/train.py:1" in str(space["result"]._node)
