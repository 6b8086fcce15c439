"""Tensor: a torch buffer and its place in the graph of operations.

torch supplies memory, strides, devices and copies; the arithmetic of the operators comes from `minidl.ops`, which
attaches them here when it is imported.
"""

from __future__ import annotations

import copy
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch.utils._device import DeviceContext

from minidl import autograd
from minidl.autograd import Function, Grad
from minidl.autograd.deferred import Deferred, open_, settle_all
from minidl.autograd.graph import Variable
from minidl.common import suggestions
from minidl.kernels import check
from minidl.runtime import launch
from minidl.sparse.rows import RowGrad

Scalar = int | float | bool
OPERATIONS: set[str] = set()  # names of `minidl.ops`, which fills it
_NOTHING = torch.empty(0)  # the memory of a result that is not computed yet


def default_device() -> torch.device:
    """Where new tensors are made: the current CUDA device where kernels are compiled and run, else the CPU."""
    if launch.INTERPRETED or launch.recording():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


# Modules of torch that take torch's tensors alone, and fail on others without saying so; and what to write.
_CALLERS = {
    "torch.nn.utils.clip_grad": "minidl.nn.utils.clip_grad_norm_ or clip_grad_value_, or max_norm= of an optimiser",
    "torch.amp.grad_scaler": "loss.backward(optimizer.loss_scale), with loss_scale= of an optimiser of minidl",
    "torch.nn.utils.parametrize": "an expression of the parameters in forward()",
    "torch.nn.utils.weight_norm": "an expression of the parameters in forward()",
}


def _refuse_callers(depth: int = 1) -> None:
    """Raises TypeError where code of one of these asks, as far up as `depth` calls."""
    frame = sys._getframe(2)
    for _ in range(depth):
        module = frame.f_globals.get("__name__", "")
        if module in _CALLERS:
            raise TypeError(f"{module} got a minidl Tensor, which it cannot take; use {_CALLERS[module]}")
        if frame.f_back is None:
            return
        frame = frame.f_back


class Tensor(Variable):
    """An n-dimensional array that remembers how it was made.

    `data` is the torch tensor underneath. With `requires_grad`, operations on it are recorded and
    `backward()` fills `grad`. Raises TypeError for data that is not a torch tensor (see `minidl.as_tensor`) and for
    gradients of integers, or whose gradient torch records, or that is a view with the other sign.
    """

    __slots__ = ()

    def __init__(self, data: torch.Tensor, requires_grad: bool = False) -> None:
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"Tensor wraps a torch tensor, got {type(data).__name__}; use minidl.as_tensor(...)")
        if data.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{type(self).__name__}: torch records the gradient of this tensor, which would end here; pass "
                "t.detach(), and requires_grad=True for a gradient of minidl's"
            )
        if data.is_neg():
            raise TypeError(
                f"{type(self).__name__}: this tensor stands for its memory's numbers with the other sign; pass "
                "t.resolve_neg()"
            )
        super().__init__(data.detach())
        self.requires_grad_(requires_grad)

    @classmethod
    def _of_later(cls, later: Deferred) -> Tensor:
        """The tensor of a result that is computed when it is first needed."""
        tensor = cls.__new__(cls)
        Variable.__init__(tensor, _NOTHING)
        tensor._later, tensor._requires_grad = later, later.requires_grad
        open_(tensor)
        return tensor

    def _twin(self) -> Tensor:
        """A second tensor of the same value, at the same place in the graph."""
        twin = Tensor.__new__(Tensor)
        Variable.__init__(twin, self._held)
        twin._take_place(self)
        return twin

    def _take_place(self, made: Tensor) -> None:
        """Be the value of another tensor from now on, computed or not, at its place in the graph."""
        self._held, self._later, self._taken = made._held, made._later, False
        self._node, self._index, self._requires_grad = made._node, made._index, made._requires_grad
        if self._later is not None:
            open_(self)

    @property
    def _known(self) -> Any:
        """What knows shape, dtype and device: the value, or what it will be computed from."""
        later = self._later
        return self._held if later is None else later

    @property
    def shape(self) -> torch.Size:
        """Its sizes."""
        return self._known.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements, one of torch's."""
        return self._known.dtype

    @property
    def device(self) -> torch.device:
        """Where its memory is."""
        return self._known.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._known.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self._known.shape)

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a GPU."""
        return bool(self.device.type == "cuda")

    def is_floating_point(self) -> bool:
        """Whether it has a floating type."""
        return bool(self.dtype.is_floating_point)

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether its elements lie in this order, row by row unless another is named."""
        return self.data.is_contiguous(memory_format=memory_format)

    def stride(self, dim: int | None = None) -> tuple[int, ...] | int:
        """Elements of memory from one place to the next, of each dimension or of one."""
        return self.data.stride() if dim is None else self.data.stride(dim)

    @property
    def grad_fn(self) -> autograd.Node | None:
        """The operation that made this tensor, where its gradient is recorded."""
        return self._edge_node()

    def new_zeros(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """A Tensor of zeros, of this one's dtype and on its device unless named."""
        return zeros(*size, dtype=dtype or self.dtype, device=device or self.device)

    def new_ones(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """A Tensor of ones, of this one's dtype and on its device unless named."""
        return ones(*size, dtype=dtype or self.dtype, device=device or self.device)

    def type_as(self, other: Tensor) -> Tensor:
        """The tensor in the dtype of another, and on its device."""
        return self.to(other.device, other.dtype)

    def view_as(self, other: Tensor) -> Tensor:
        """The tensor in the shape of another."""
        return self.reshape(other.shape)

    reshape_as = view_as

    def expand_as(self, other: Tensor) -> Tensor:
        """The tensor broadcast to the shape of another."""
        return self.expand(other.shape)

    def t(self) -> Tensor:
        """The transposed matrix; a vector as it is. Raises ValueError for more dimensions."""
        if self.ndim > 2:
            raise ValueError(f"t: the tensor has shape {list(self.shape)}, expected a matrix; use transpose or .mT")
        return self.T

    @property
    def mT(self) -> Tensor:  # noqa: N802 (torch's name)
        """A view with the last two dimensions exchanged."""
        return self.transpose(-2, -1)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or the extent of one dimension."""
        return self._known.shape if dim is None else self._known.shape[dim]

    def numel(self) -> int:
        """Number of elements."""
        return self._known.shape.numel()

    def item(self) -> float | int | bool:
        """The value of a one-element tensor as a Python number. Raises RuntimeError for any other size."""
        return self.data.item()

    def tolist(self) -> Any:
        """The values as nested Python lists."""
        return self.data.tolist()

    def numpy(self) -> Any:
        """The values as a NumPy array (shares memory on the CPU). Raises RuntimeError where a gradient is recorded."""
        if self.requires_grad:
            raise RuntimeError("this tensor is part of a graph; call .detach().numpy()")
        return self.data.cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """What NumPy makes an array of: the memory itself where that is on the CPU. Raises as torch's."""
        if self.requires_grad:
            raise RuntimeError("can't call numpy() on a Tensor that requires grad; use .detach().numpy()")
        if self.device.type != "cpu":
            raise TypeError(f"can't convert a tensor on {self.device} to numpy; copy it to the host with .cpu() first")
        array = self.data.numpy()
        if dtype is not None and dtype != array.dtype:
            if copy is False:
                raise ValueError(f"an array of {dtype} cannot share the memory of {array.dtype}")
            return array.astype(dtype)
        return array.copy() if copy else array

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """torch asks this of a Tensor among the arguments of its functions: refuse, and name minidl's."""
        _refuse_callers(depth=4)
        name = getattr(function, "__name__", "").strip("_")
        known = next((n for n in (name, name[1:]) if n in OPERATIONS), None)
        ours = "" if known is None else f"minidl.ops.{known}, or "
        text = (
            f"{torch.overrides.resolve_name(function) or name} got a minidl Tensor; use {ours}torch's with "
            "x.to_torch(), whose gradient is torch's alone"
        )
        # Of a TypeError torch's operators make another try, x + t for t + x: what changes t must not.
        changes = getattr(function, "__name__", "") == f"{name}_"
        raise RuntimeError(text) if changes else TypeError(text)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As torch's: a copy is a leaf over the same memory, a pickle has the values, and neither has the gradient."""
        return _restored, (type(self), self.data, self._requires_grad, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A leaf with memory and a gradient of its own. Raises RuntimeError for what an operation made."""
        if not self.is_leaf:
            raise RuntimeError(
                f"deepcopy: this tensor was made by an operation, {self._node}, whose graph is not copied; copy "
                "x.detach(), and keep no results as attributes of a module"
            )
        copied = _restored(type(self), copy.deepcopy(self.data, memo), self._requires_grad, self.name)
        copied._grad = copy.deepcopy(self._grad, memo)
        memo[id(self)] = copied
        return copied

    def to_torch(self) -> torch.Tensor:
        """The torch tensor underneath, sharing memory; torch's own autograd does not see it."""
        return self.data

    def __dlpack__(self, **kwargs: Any) -> Any:
        data = self.data
        launch.settle()  # nobody here sees when it is read
        return data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Tensor]:
        _refuse_callers()
        if self.ndim == 0:
            raise TypeError("a tensor of 0 dimensions cannot be iterated over")
        return (self[i] for i in range(len(self)))

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.is_floating_point or self.numel() != 1:
            raise TypeError(f"a place in a list is one whole number, got {self.dtype} of shape {list(self.shape)}")
        return int(self.item())

    def __format__(self, spec: str) -> str:
        whole = self.ndim == 0 and type(self) is Tensor  # a parameter is printed as a tensor, as torch's
        return format(self.item(), spec) if whole else super().__format__(spec)

    if not TYPE_CHECKING:  # to a type checker every name would be there

        def __getattr__(self, name: str) -> NoReturn:
            if name.endswith("_") and name[:-1] in OPERATIONS:
                raise AttributeError(f"Tensor has no {name}; write x = minidl.ops.{name[:-1]}(x), or x.copy_() of that")
            if name in OPERATIONS:
                raise AttributeError(f"Tensor has no {name}; write minidl.ops.{name}(x)")
            raise suggestions.attribute("minidl.Tensor", name, [*dir(type(self)), *OPERATIONS])

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise RuntimeError(f"a tensor of shape {list(self.shape)} is neither true nor false; compare and reduce it")
        return bool(self.item())

    def __repr__(self) -> str:
        text = repr(self.data)
        note = ""
        if self._node is not None:
            note = f", grad_fn=<{self._node.name}>"
        elif self.requires_grad:
            note = ", requires_grad=True"
        return text[:-1] + note + ")"

    __hash__ = object.__hash__
    # A NumPy number on the left of an operator leaves the operator to Tensor.
    __array_ufunc__ = None

    @property
    def requires_grad(self) -> bool:
        """Whether operations on it are recorded."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set whether operations on this leaf are recorded.

        Raises TypeError for an integer tensor, RuntimeError for a tensor that an operation made.
        """
        if requires_grad and not self.data.is_floating_point():
            raise TypeError(f"only floating tensors can have a gradient, this one is {self.dtype}")
        if not requires_grad and self._edge_node() is not None:
            raise RuntimeError("this tensor was made by an operation; use .detach() for one without a graph")
        if requires_grad != self._requires_grad:
            settle_all()
        self._requires_grad = requires_grad
        return self

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded operation made it."""
        return self._edge_node() is None

    @property
    def grad(self) -> Tensor | None:
        """The gradient that backward() has added up here, as a dense tensor; None before."""
        _refuse_callers()
        if self._slope is not None and isinstance(recorded := self._graph_grad(), Tensor):
            return recorded
        if isinstance(self._grad, RowGrad):
            return Tensor(self._grad.dense())
        return None if self._grad is None else Tensor(self._grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and (value.shape != self.shape or value.dtype != self.dtype):
            raise ValueError(
                f"grad has shape {list(value.shape)} and dtype {value.dtype}, "
                f"expected {list(self.shape)} and {self.dtype}"
            )
        if value is not None and value.device != self.device:
            raise ValueError(f"grad is on {value.device}, expected {self.device}; move it with .to()")
        self._grad = None if value is None else value.data
        self._slope = value if value is not None and value.requires_grad else None

    @property
    def raw_grad(self) -> Grad | None:
        """The gradient as it is stored: a torch tensor, or a RowGrad when it touches few rows."""
        if isinstance(self._grad, RowGrad) and self._grad.changed():
            self._grad = self._grad.dense()
        return self._grad

    def backward(
        self, gradient: Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Add the gradient of this tensor (times `gradient`) to the `grad` of every leaf it depends on.

        `gradient` has this tensor's shape, and may be left out when there is one element.
        With `create_graph` the gradients are recorded, too, and the graph is kept.
        Raises RuntimeError when nothing was recorded, when a gradient is missing, when the graph was already used, and
        for `create_graph` of an operation without a second derivative.
        """
        if not self.requires_grad:
            raise RuntimeError(
                "backward(): nothing was recorded for this tensor; set requires_grad=True on its inputs, "
                "outside no_grad()"
            )
        if gradient is None:
            if self.numel() != 1:
                raise RuntimeError(
                    f"backward() of a tensor of shape {list(self.shape)} needs `gradient`, a tensor of that shape; "
                    "or reduce it to one value first, for example with .sum()"
                )
            seed = None
        else:
            if gradient.shape != self.shape or gradient.dtype != self.dtype or gradient.device != self.device:
                raise RuntimeError(
                    f"backward(): gradient has shape {list(gradient.shape)}, {gradient.dtype} on {gradient.device}, "
                    f"expected {list(self.shape)}, {self.dtype} on {self.device}"
                )
            seed = gradient.data
        if create_graph:
            autograd.double_backward.backward(self, gradient, retain_graph is not False)
        else:
            with autograd.no_grad():
                autograd.backward_pass.backward(self, seed, bool(retain_graph))

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> autograd.RemovableHandle:
        """Call `hook` with this tensor's gradient during backward; a tensor it returns replaces the gradient.

        Returns a handle whose `remove()` takes the hook away. Raises RuntimeError when no gradient is recorded here.
        """
        if not self.requires_grad:
            raise RuntimeError("register_hook(): this tensor has no gradient; set requires_grad=True")
        self._check_not_taken("register_hook")
        node = self._edge_node()
        hooks = self._hooks if node is None else node.hooks.setdefault(self._index, {})

        def on_data(grad: torch.Tensor) -> torch.Tensor | None:
            changed = hook(Tensor(grad))
            return None if changed is None else changed.data

        return autograd.RemovableHandle(hooks, on_data)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], object]) -> autograd.RemovableHandle:
        """Call `hook` with this leaf during backward, as soon as `grad` has all that this walk back adds to it.

        Returns a handle whose `remove()` takes the hook away. Raises RuntimeError for a tensor that an operation made,
        or that requires no gradient.
        """
        if not self.requires_grad or self._edge_node() is not None:
            raise RuntimeError("register_post_accumulate_grad_hook(): expected a leaf with requires_grad=True")
        return autograd.RemovableHandle(self._after, hook)

    def retain_grad(self) -> None:
        """Also fill `grad` of this tensor, made by an operation, during backward."""
        self._check_not_taken("retain_grad")
        node = self._edge_node()
        if node is not None:
            node.retained[self._index] = weakref.ref(self)

    def _check_not_taken(self, name: str) -> None:
        if self._taken:
            raise RuntimeError(
                f"{name}: this tensor was computed as a part of the operation after it, through which its gradient "
                "does not pass; call it before the tensor is used, or compute under minidl.fusion(False)"
            )

    def _edge_node(self) -> autograd.Node | None:
        """The operation that made this tensor."""
        self._settle()
        return self._node

    def detach(self) -> Tensor:
        """The same values without a graph, sharing memory."""
        return Tensor(self.data)

    def cpu(self) -> Tensor:
        """The tensor on the CPU."""
        return self.to("cpu")

    def cuda(self) -> Tensor:
        """The tensor on the current CUDA device."""
        return self.to("cuda")

    if TYPE_CHECKING:
        # Attached by minidl.ops. Names of one signature follow the first of them.
        T: Tensor

        def __add__(self, other: Tensor | Scalar) -> Tensor: ...

        __sub__ = __mul__ = __truediv__ = __pow__ = __floordiv__ = __mod__ = __and__ = __or__ = __xor__ = __add__
        __lt__ = __le__ = __gt__ = __ge__ = mul = maximum = minimum = eq = ne = lt = le = gt = ge = __add__
        floor_divide = remainder = fmod = logical_xor = __lshift__ = __rshift__ = __add__

        def __radd__(self, other: Scalar) -> Tensor: ...

        __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = __rfloordiv__ = __rmod__ = __rlshift__ = __rrshift__ = __radd__

        def __neg__(self) -> Tensor: ...

        __invert__ = __pos__ = __abs__ = abs = exp = log = sqrt = square = relu = sigmoid = tanh = neg = sign = __neg__
        reciprocal = isnan = isinf = isfinite = clone = contiguous = __neg__
        expm1 = log1p = log2 = log10 = sin = cos = erf = floor = ceil = trunc = trace = __neg__

        def round(self, *, decimals: Any = 0) -> Tensor: ...

        def __setitem__(self, index: Any, value: Tensor | torch.Tensor | Scalar) -> None: ...
        def __matmul__(self, other: Tensor) -> Tensor: ...

        matmul = __matmul__

        def __getitem__(self, index: Any) -> Tensor: ...
        def __contains__(self, element: Any) -> Any: ...
        def __eq__(self, other: object) -> Tensor: ...  # type: ignore[override]
        def __ne__(self, other: object) -> Tensor: ...  # type: ignore[override]
        def __iadd__(self, other: Tensor | Scalar) -> Self: ...

        __isub__ = __imul__ = __itruediv__ = __ipow__ = __ilshift__ = __irshift__ = mul_ = __iadd__

        def add_(self, other: Tensor | Scalar, alpha: Scalar = 1) -> Self: ...

        sub_ = add_

        def div_(self, other: Tensor | Scalar, *, rounding_mode: str | None = None) -> Self: ...
        def pow_(self, exponent: Tensor | Scalar) -> Self: ...
        def clamp_(self, min: Scalar | None = None, max: Scalar | None = None) -> Self: ...
        def copy_(self, source: Tensor | torch.Tensor, non_blocking: bool = False) -> Self: ...
        def masked_fill_(self, mask: Tensor, value: Tensor | Scalar) -> Self: ...
        def scatter_(
            self, dim: int, index: Tensor, src: Any = None, *, value: Any = None, reduce: Any = None
        ) -> Self: ...
        def scatter_add_(self, dim: int, index: Tensor, src: Tensor) -> Self: ...
        def zero_(self) -> Self: ...

        abs_ = ceil_ = cos_ = erf_ = exp_ = expm1_ = floor_ = log_ = log1p_ = log2_ = neg_ = reciprocal_ = zero_
        sign_ = sin_ = sqrt_ = square_ = trunc_ = zero_

        def round_(self, *, decimals: Any = 0) -> Self: ...

        floor_divide_ = fmod_ = remainder_ = mul_

        def fill_(self, value: Scalar) -> Self: ...
        def normal_(self, mean: Scalar = 0.0, std: Scalar = 1.0, seed: int | None = None) -> Self: ...
        def uniform_(self, low: Scalar = 0.0, high: Scalar = 1.0, seed: int | None = None) -> Self: ...
        def softmax(self, dim: int = -1) -> Tensor: ...

        log_softmax = softmax

        def sum(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor: ...

        mean = amax = amin = any = all = sum

        def max(self, dim: int | Tensor | None = None, keepdim: bool = False) -> Any: ...

        min = max

        def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any: ...
        def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor: ...

        argmin = argmax

        def norm(
            self, p: Scalar | str = "fro", dim: int | Sequence[int] | None = None, keepdim: bool = False
        ) -> Tensor: ...
        def add(self, other: Tensor | Scalar, *, alpha: Scalar = 1) -> Tensor: ...

        sub = add

        def div(self, other: Tensor | Scalar, *, rounding_mode: str | None = None) -> Tensor: ...
        def pow(self, exponent: Tensor | Scalar) -> Tensor: ...
        def clamp(self, min: Any = None, max: Any = None) -> Tensor: ...

        clip = clamp

        def var(
            self, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
        ) -> Tensor: ...

        std = var

        def cumsum(self, dim: int) -> Tensor: ...

        unsqueeze = cumsum

        def sort(self, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Any: ...
        def argsort(self, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Tensor: ...
        def split(self, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]: ...
        def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]: ...
        def flip(self, *dims: int | Sequence[int]) -> Tensor: ...

        permute = flip

        def repeat(self, *repeats: int | Sequence[int]) -> Tensor: ...
        def gather(self, dim: int, index: Tensor) -> Tensor: ...

        index_select = gather

        def masked_fill(self, mask: Tensor, value: Tensor | Scalar) -> Tensor: ...
        def outer(self, vec2: Tensor) -> Tensor: ...
        def equal(self, other: Tensor) -> Any: ...
        def allclose(self, other: Tensor, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any: ...
        def logsumexp(self, dim: int | Sequence[int], keepdim: bool = False) -> Tensor: ...
        def dot(self, tensor: Tensor) -> Tensor: ...
        def mv(self, vec: Tensor) -> Tensor: ...
        def tril(self, diagonal: int = 0) -> Tensor: ...

        triu = tril

        def unbind(self, dim: int = 0) -> tuple[Tensor, ...]: ...
        def select(self, dim: int, index: int) -> Tensor: ...
        def narrow(self, dim: int, start: int, length: int) -> Tensor: ...
        def movedim(self, source: int, destination: int) -> Tensor: ...
        def nonzero(self, *, as_tuple: bool = False) -> Any: ...
        def diagonal(self, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor: ...
        def prod(self, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor: ...
        def roll(self, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor: ...
        def unflatten(self, dim: int, sizes: Sequence[int]) -> Tensor: ...
        def lerp(self, end: Tensor, weight: Tensor | Scalar) -> Tensor: ...
        def addmm(self, mat1: Tensor, mat2: Tensor, *, beta: Scalar = 1, alpha: Scalar = 1) -> Tensor: ...
        def count_nonzero(self, dim: Any = None) -> Tensor: ...
        def isclose(self, other: Tensor, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Tensor: ...
        def scatter(self, dim: int, index: Tensor, src: Any = None, **how: Any) -> Tensor: ...
        def scatter_add(self, dim: int, index: Tensor, src: Tensor) -> Tensor: ...
        def index_add(self, dim: int, index: Tensor, source: Tensor, *, alpha: Scalar = 1) -> Tensor: ...
        def masked_select(self, mask: Tensor) -> Tensor: ...
        def mm(self, mat2: Tensor) -> Tensor: ...

        bmm = mm

        def reshape(self, *shape: int | Sequence[int]) -> Tensor: ...

        view = expand = tile = reshape

        def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor: ...
        def transpose(self, dim0: int, dim1: int) -> Tensor: ...
        def swapaxes(self, axis0: int, axis1: int) -> Tensor: ...
        def squeeze(self, *dim: int | Sequence[int] | None) -> Tensor: ...
        def to(self, *args: Any, **kwargs: Any) -> Tensor: ...
        # The last of all: above, these names are types.
        def half(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor: ...

        float = double = bfloat16 = long = int = bool = half


def _restored(kind: type[Tensor], data: torch.Tensor, requires_grad: bool, name: str) -> Tensor:
    """A leaf of a class, as it was before it was copied or pickled."""
    tensor = kind(data, requires_grad)
    tensor.name = name
    return tensor


Function.result_class = Tensor


def _of_context() -> torch.device | None:
    """The device of `with torch.device(...):` or torch.set_default_device, if any."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(torch.overrides._get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def device_of(device: torch.device | str | None) -> torch.device:
    """A device by name; None for torch's default device where one is set, else where kernels run.

    Raises RuntimeError for CUDA where torch sees no GPU.
    """
    if device is None:
        chosen = _of_context()
        return default_device() if chosen is None else device_of(chosen)
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        raise RuntimeError(f"{device}: {why}; leave the device out, or use 'cpu', where kernels are interpreted")
    return found


def _converting(name: str) -> Callable[..., Tensor]:
    """The method that converts to torch's dtype of a name."""

    def method(self: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return self.to(getattr(torch, name), memory_format=memory_format)

    method.__name__, method.__doc__ = name, f"The tensor as {getattr(torch, name)}. Raises TypeError as `to`."
    return method


for _name in ("float", "half", "double", "bfloat16", "long", "int", "bool"):
    setattr(Tensor, _name, _converting(_name))


def is_tensor(obj: Any) -> bool:
    """Whether an object is a Tensor."""
    return isinstance(obj, Tensor)


def from_torch(data: torch.Tensor, requires_grad: bool = False) -> Tensor:
    """A Tensor over a torch tensor's memory, without a copy. Raises TypeError where torch records its gradient."""
    return Tensor(data, requires_grad)


def as_tensor(
    data: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A Tensor over `data`: numbers, nested lists, a NumPy array, a torch tensor or a Tensor, sharing memory if it can.

    Python floats become float32. The device is where kernels run unless named; a Tensor is returned as it is, or
    converted as by `to`, so that gradients flow through. Raises TypeError or ValueError for data without a regular
    shape.
    """
    if isinstance(data, Tensor):
        same = dtype in (None, data.dtype) and (device is None or torch.device(device) == data.device)
        data = data if same else data.to(device or data.device, dtype or data.dtype)
        return data if data.requires_grad or not requires_grad else Tensor(data.data, True)
    return made_by(torch.as_tensor, data, dtype, device, requires_grad)


def made_by(
    make: Callable[..., torch.Tensor], data: Any, dtype: torch.dtype | None, device: torch.device | str | None,
    requires_grad: bool,
) -> Tensor:  # fmt: skip
    """What torch.tensor or torch.as_tensor makes of `data`, in whose lists Tensors may be. Raises as these."""
    try:
        made = make(data, dtype=dtype, device=device_of(device))
    except (TypeError, ValueError):
        if (plain := _without_tensors(data)) is data:
            raise
        made = make(plain, dtype=dtype, device=device_of(device))
    return Tensor(made, requires_grad)


def _without_tensors(data: Any) -> Any:
    """Lists in lists with torch's tensors in place of Tensors; what holds none as it is."""
    if isinstance(data, Tensor):
        return data.data
    if not isinstance(data, list | tuple):
        return data
    parts = [_without_tensors(part) for part in data]
    return data if all(map(operator.is_, parts, data)) else parts


def zeros(
    *shape: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A Tensor of zeros. Raises ValueError for a size below 0, TypeError for what is no whole number."""
    return Tensor(torch.zeros(check.sizes("zeros", shape), dtype=dtype, device=device_of(device)), requires_grad)


def ones(
    *shape: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A Tensor of ones. Raises as `zeros`."""
    return full(check.sizes("ones", shape), 1.0, dtype=dtype, device=device, requires_grad=requires_grad)


def full(
    size: Sequence[int],
    fill_value: Scalar,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """A Tensor of one value: of torch's default dtype unless named, or int64 of a whole number and bool of a truth."""
    shape = check.sizes("full", (size,))
    return Tensor(torch.full(shape, fill_value, dtype=dtype, device=device_of(device)), requires_grad)
