"""Comparison of gradients with central differences, in float64, on the real kernels."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minidl import autograd
from minidl.tensors import Tensor
from minidl.testing.compare import as_tuple, index_at


class GradientError(AssertionError):
    """A gradient differs from the difference quotient."""


# The assumed depth of a function: the noise of a difference quotient is this many rounding units.
_DEPTH = 64
_UNIT = 2.0**-53


@dataclass
class _Checked:
    """A tensor whose gradient is checked: its name in messages and its value."""

    name: str
    tensor: Tensor
    value: torch.Tensor


def check_grads(
    function: Callable[..., Any],
    *inputs: Any,
    mode: str = "fast",
    eps: float = 1e-6,
    atol: float = 1e-6,
    rtol: float = 1e-5,
    projections: int = 2,
    seed: int = 0,
) -> None:
    """Compare the gradients of `function(*inputs)` with central differences, in float64.

    function  takes the inputs and returns one Tensor or several; for a Module, the gradients of its parameters are
              checked, too, which are float64 during the check and restored afterwards
    inputs    Tensors and plain values. Floating Tensors become float64; those with requires_grad are checked
    mode      "fast" compares directional derivatives along `projections` random directions per tensor, and names the
              worst element where they differ; "slow" compares every element of the Jacobian
    eps       half the step of the difference; atol and rtol are the allowed error of a derivative, on top of the
              rounding error of the difference

    Raises GradientError with the tensor, the index and both values; ValueError when nothing requires a gradient or the
    function gives different results for the same inputs; TypeError when it returns no floating Tensor.
    """
    if mode not in ("fast", "slow"):
        raise ValueError(f"check_grads: unknown mode {mode!r}; known: fast, slow")
    with _in_double(function):
        args, checked = _double_inputs(inputs)
        checked += _parameters(function)
        if not checked:
            raise ValueError(
                "check_grads: no input and no parameter requires a gradient; set requires_grad=True on one"
            )
        run = _Run(function, args, checked, eps, atol, rtol)
        run.check_repeatable()
        generator = torch.Generator().manual_seed(seed)
        if mode == "slow":
            for position in range(len(checked)):
                run.compare_elements(position)
        else:
            for _ in range(projections):
                run.compare_directions(generator)


@contextlib.contextmanager
def _in_double(function: Any) -> Iterator[None]:
    """Return a context in which parameters and buffers of a module are float64; they are restored afterwards."""
    originals = []
    for tensor in (*getattr(function, "parameters", tuple)(), *getattr(function, "buffers", tuple)()):
        if tensor.dtype.is_floating_point:
            originals.append((tensor, tensor.data, tensor._grad))
            tensor._grad = None
            tensor.data = tensor.data.to(torch.float64, copy=True)
    try:
        yield
    finally:
        for tensor, data, grad in originals:
            tensor.data, tensor._grad = data, grad


def _double_inputs(inputs: Sequence[Any]) -> tuple[list[Any], list[_Checked]]:
    args: list[Any] = []
    checked = []
    for position, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            value = Tensor(value.data.to(torch.float64, copy=True), value.requires_grad)
            if value.requires_grad:
                checked.append(_Checked(f"input {position}", value, value.data))
        args.append(value)
    return args, checked


def _parameters(function: Any) -> list[_Checked]:
    if hasattr(function, "named_parameters"):
        named = list(function.named_parameters())
    else:
        named = [(str(i), p) for i, p in enumerate(getattr(function, "parameters", tuple)())]
    return [_Checked(f"parameter {name!r}", p, p.data) for name, p in named if p.requires_grad]


@dataclass
class _Run:
    """A function at one point."""

    function: Callable[..., Any]
    args: list[Any]
    checked: list[_Checked]
    eps: float
    atol: float
    rtol: float

    def outputs(self) -> list[Tensor]:
        """Return the floating outputs."""
        result = as_tuple(self.function(*self.args))
        floating = [out for out in result if isinstance(out, Tensor) and out.dtype.is_floating_point]
        if not floating:
            raise TypeError(f"check_grads: the function returned {type(result[0]).__name__}, expected floating Tensors")
        return floating

    def values(self) -> list[torch.Tensor]:
        with autograd.no_grad():
            return [out.data for out in self.outputs()]

    def check_repeatable(self) -> None:
        for first, second in zip(self.values(), self.values(), strict=True):
            if not torch.equal(first.nan_to_num(), second.nan_to_num()):
                raise ValueError(
                    "check_grads: two calls with the same inputs gave different results; "
                    "seed what is random, or put the module in eval mode"
                )

    def gradients(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradient of sum(cotangent * output) for each checked tensor, by backward()."""
        for entry in self.checked:
            entry.tensor.grad = None
        pairs = [(o, c) for o, c in zip(self.outputs(), cotangents, strict=True) if o.requires_grad]
        if not pairs:
            raise ValueError("check_grads: no output depends on an input or a parameter that requires a gradient")
        for i, (out, cotangent) in enumerate(pairs):
            out.backward(Tensor(cotangent), retain_graph=i + 1 < len(pairs))
        gradients = []
        for entry in self.checked:
            grad = entry.tensor.grad
            gradients.append(torch.zeros_like(entry.value) if grad is None else grad.data.clone())
            entry.tensor.grad = None
        return gradients

    def difference(self, entry: _Checked, step: torch.Tensor) -> tuple[list[torch.Tensor], float]:
        """Return the difference quotient (f(x + step) - f(x - step)) / (2 eps) of each output, and the largest |f|."""
        shifted = []
        for sign in (1, -1):
            entry.tensor.data = entry.value + sign * step
            shifted.append(self.values())
        entry.tensor.data = entry.value
        largest = max((float(v.abs().max()) for v in shifted[0] if v.numel()), default=0.0)
        return [(plus - minus) / (2 * self.eps) for plus, minus in zip(*shifted, strict=True)], largest

    def differences(
        self, entry: _Checked, count: int, reduce: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `reduce` of the difference quotients by each of the first `count` elements, and each largest |f|."""
        columns, largest = [], []
        for i in range(count):
            step = torch.zeros_like(entry.value, memory_format=torch.contiguous_format)
            step.view(-1)[i] = self.eps
            change, size = self.difference(entry, step)
            columns.append(reduce(change).cpu())
            largest.append(size)
        return torch.stack(columns, -1), torch.tensor(largest, dtype=torch.float64)

    def allowed(self, analytic: Any, largest: Any, terms: int) -> Any:
        """Return the allowed error of a derivative: atol, rtol, and the rounding error of a difference quotient.

        The rounding error is for values up to `largest`, weighted and added over `terms`.
        """
        return self.atol + self.rtol * abs(analytic) + _DEPTH * _UNIT * largest * math.sqrt(max(terms, 1)) / self.eps

    def compare_directions(self, generator: torch.Generator) -> None:
        cotangents = [_direction(v, generator) for v in self.values()]
        gradients = self.gradients(cotangents)
        terms = sum(c.numel() for c in cotangents)

        def weighted(change: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([(c * d).sum() for c, d in zip(cotangents, change, strict=True)]).sum()

        for entry, gradient in zip(self.checked, gradients, strict=True):
            if entry.value.numel() == 0:
                continue
            direction = _direction(entry.value, generator)
            direction = direction / math.sqrt(direction.numel())
            change, largest = self.difference(entry, self.eps * direction)
            numeric, analytic = float(weighted(change)), float((gradient * direction).sum())
            allowed = self.allowed(float(gradient.norm()), largest, terms)
            if abs(numeric - analytic) <= allowed:
                continue
            # Find the element with the largest error (of the first 4096).
            flat = gradient.reshape(-1)[:4096].cpu()
            quotients, sizes = self.differences(entry, len(flat), weighted)
            off = (quotients - flat).abs()
            wrong = int((~(off <= self.allowed(flat, sizes, terms))).sum())
            worst = int(off.nan_to_num(nan=math.inf).argmax())
            raise GradientError(
                f"check_grads: the gradient of {entry.name} (shape {list(gradient.shape)}) is wrong: along a random "
                f"direction numeric {numeric:.8g}, analytic {analytic:.8g}, allowed difference {allowed:.2g}\n"
                f"  {wrong} of {len(flat)} elements are off; worst at {index_at(worst, gradient.shape)}: "
                f"numeric {float(quotients[worst]):.8g}, analytic {float(flat[worst]):.8g}\n"
                "  (derivatives of the outputs weighted at random; mode='slow' compares each output by itself)"
            )

    def compare_elements(self, position: int) -> None:
        """Compare every element of the Jacobian of one tensor."""
        entry, values = self.checked[position], self.values()
        if entry.value.numel() == 0:
            return
        jacobian, sizes = self.differences(
            entry, entry.value.numel(), lambda change: torch.cat([d.reshape(-1) for d in change])
        )
        for k, (value, numeric) in enumerate(zip(values, jacobian.split([v.numel() for v in values]), strict=True)):
            analytic = torch.zeros_like(numeric)
            for j in range(value.numel()):
                cotangents = [torch.zeros_like(v, memory_format=torch.contiguous_format) for v in values]
                cotangents[k].view(-1)[j] = 1.0
                analytic[j] = self.gradients(cotangents)[position].reshape(-1).cpu()
            off = (numeric - analytic).abs()
            allowed = self.allowed(analytic, sizes.max(), 1)
            wrong = ~(off <= allowed)
            if wrong.any():
                at = int(torch.where(wrong, off.nan_to_num(nan=math.inf), -1.0).argmax())
                row, column = divmod(at, analytic.shape[1])
                out, index = index_at(row, value.shape), index_at(column, entry.value.shape)
                raise GradientError(
                    f"check_grads: the gradient of {entry.name} (shape {list(entry.value.shape)}) is wrong in "
                    f"{int(wrong.sum())} of {wrong.numel()} places\n"
                    f"  worst: d output {k} {out} / d {entry.name} {index}: "
                    f"numeric {float(numeric[row, column]):.8g}, analytic {float(analytic[row, column]):.8g}, "
                    f"allowed difference {float(allowed[row, column]):.2g}"
                )


def _direction(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers of magnitude 0.5 to 1.5 and either sign: none is near 0, so none hides its element."""
    size = 0.5 + torch.rand(like.shape, generator=generator, dtype=torch.float64)
    sign = 1 - 2 * torch.randint(2, like.shape, generator=generator)
    return (size * sign).to(like.device)
