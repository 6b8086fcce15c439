"""Export of modules to ONNX by torch's exporter: `forward` runs on torch's tensors, and torch's functions replace
those of `minidl.ops` with the same name."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

from minidl.autograd import no_grad
from minidl.autograd.function import rerouted
from minidl.common import write_files
from minidl.kernels import activation, check
from minidl.nn import recurrent
from minidl.nn.module import Module
from minidl.ops import binary
from minidl.tensors import Tensor

# Arguments that torch's functions do not have; the second ones choose a kernel, not a result.
_MORE = ("act", "pool", "scale", "window", "lengths")
_OF_BOTH = {"scaled_dot_product_attention": {"scale"}}
_IGNORED = ("form", "num_batches_tracked", "seed")
# Torch's functions with another name, or without a position for an argument.
_OTHERS = {
    "gelu": lambda input, approximate="none": F.gelu(input, approximate=approximate),
    "divfloor": partial(torch.div, rounding_mode="floor"), "divtrunc": partial(torch.div, rounding_mode="trunc"),
}  # fmt: skip
_OF_RECURRENT = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "nonlinearity",
)  # fmt: skip


def export_onnx(
    model: Module, example: Tensor | tuple[Tensor, ...], path: str | os.PathLike[str], *,
    dynamic_dims: Sequence[int] = (0,),
) -> None:  # fmt: skip
    """Write a module in evaluation mode as an ONNX file, which is replaced atomically.

    example: the inputs of `forward`, by which it is traced: an `if` that depends on values is not in the file. Their
    sizes are fixed except along dynamic_dims, the batch by default. Inputs have the names of `forward`'s arguments, and
    weights those of `state_dict`, except products that torch's exporter transposes.

    Needs the packages onnx and onnxscript, else raises ImportError. Raises TypeError for an operation that torch does
    not have, such as `sparse_linear`, ValueError for a `forward` that torch cannot trace, and OSError.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"export_onnx needs {error.name}: pip install 'minidl[onnx]'") from None
    if not isinstance(model, Module):
        raise TypeError(f"export_onnx: model is of type {type(model).__name__}, expected a minidl Module")
    dynamic_dims = check.integers("export_onnx", "dynamic_dims", dynamic_dims)
    if min(dynamic_dims, default=0) < 0:
        raise ValueError(f"export_onnx: dynamic_dims is {list(dynamic_dims)}, expected numbers of 0 or more")
    examples = tuple(_input(x, dynamic_dims) for x in (example if isinstance(example, tuple) else (example,)))
    sizes: Any = tuple({i: torch.export.Dim.DYNAMIC for i in dynamic_dims if i < x.dim()} for x in examples)
    names = list(inspect.signature(model.forward).parameters)[: len(examples)]
    pairs: list[tuple[Module, torch.nn.Module]] = []
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        twin = _twin(model, pairs, {}).eval()
        twin.__dict__["pairs"] = pairs  # hidden from torch
        with torch.no_grad(), no_grad(), warnings.catch_warnings(action="ignore"):  # by torch's own code
            results = tree_leaves(twin(*examples))  # its errors are shorter
            outputs = [f"output_{i}" for i in range(len(results))] if len(results) > 1 else ["output"]
            sizes = (sizes,) if isinstance(twin, _Twin) else sizes  # of the arguments of forward, one for *inputs
            program: Any = torch.onnx.export(
                twin, examples, input_names=names, output_names=outputs, dynamic_shapes=sizes, dynamo=True,
                verbose=False,
            )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        cause = str(error.__cause__).strip().partition("\n")[0]
        raise ValueError(f"export_onnx: torch cannot trace {type(model).__name__}: {cause}") from error
    finally:
        for module in training:
            module.training = True
    write_files.write_bytes(Path(path), program.model_proto.SerializeToString())


def _input(x: Any, dynamic_dims: Sequence[int]) -> torch.Tensor:
    """Return an example for torch, which takes a size of 1 as fixed."""
    if not isinstance(x, Tensor | torch.Tensor):
        raise TypeError(f"export_onnx: example is of type {type(x).__name__}, expected a Tensor or a tuple of Tensors")
    x = x.data.detach().cpu()
    for dim in dynamic_dims:
        if dim < x.dim() and x.shape[dim] == 1:
            x = x.repeat_interleave(2, dim)
    return x


class _Twin(torch.nn.Module):
    """The tensors of a module, and twins of its submodules, by the same names; forward runs the module on them."""

    pairs: list[tuple[Module, torch.nn.Module]]  # of the twin that torch exports

    def forward(self, *inputs: torch.Tensor) -> Any:
        names = "_parameters", "_buffers", "forward"
        pairs = self.__dict__["pairs"]
        before = [{name: module.__dict__[name] for name in names if name in module.__dict__} for module, _ in pairs]
        rerouted.append(_by_torch)
        try:
            for module, twin in pairs:
                for registry in names[:2]:
                    module.__dict__[registry] = {name: getattr(twin, name) for name in module.__dict__[registry]}
                if not isinstance(twin, _Twin):
                    module.__dict__["forward"] = twin
            return tree_map(_value, pairs[0][0](*inputs))
        finally:
            rerouted.pop()
            for (module, _), attributes in zip(pairs, before, strict=True):
                module.__dict__.pop("forward", None)
                module.__dict__.update(attributes)


def _twin(module: Module, pairs: list[Any], memo: dict[int, Any]) -> Any:
    """Return the twin of a module; of a recurrent one, which is one function in torch, torch's. `pairs` gets both."""
    if id(module) in memo:
        return memo[id(module)]
    kind = next((c for c in type(module).__mro__ if c.__module__ == recurrent.__name__), None)
    settings = {name: module.__dict__[name] for name in _OF_RECURRENT if name in module.__dict__}
    twin = memo[id(module)] = _Twin() if kind is None else getattr(torch.nn, kind.__name__)(**settings)
    pairs.append((module, twin))
    for name, tensor in module._parameters.items():
        if tensor is not None and id(tensor) not in memo:
            memo[id(tensor)] = torch.nn.Parameter(tensor.data.cpu(), requires_grad=False)
        twin.register_parameter(name, memo.get(id(tensor)))
    for name, tensor in module._buffers.items():
        twin.register_buffer(name, None if tensor is None else tensor.data.cpu())
    for name, child in module._modules.items():
        twin.add_module(name, None if child is None else _twin(child, pairs, memo))
    return twin


def _value(x: Any) -> Any:
    return x.data if isinstance(x, Tensor) else x


def _by_torch(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the result of torch's function of the same name, NotImplemented if no argument is one of torch's tensors.

    Functions of two operands arrive as their class. Raises TypeError for a name or an argument that torch lacks.
    """
    if not any(isinstance(x, torch.Tensor) for x in tree_leaves((args, options))):
        return NotImplemented
    name, settings = function.__name__, {}
    if function.__module__ == binary.__name__:
        name = name.lower()
    spaces = (space for space in (F, torch, torch.Tensor) if hasattr(space, name))
    theirs: Any = _OTHERS[name] if name in _OTHERS else next((getattr(space, name) for space in spaces), None)
    if theirs is None:
        raise TypeError(f"{name}: torch has no such operation, so it cannot be exported")
    args, options = tree_map(_value, (args, options))
    signature = inspect.signature(function)
    more = {*_MORE, *_IGNORED}.intersection(signature.parameters) - _OF_BOTH.get(name, set())
    if more:
        bound = signature.bind(*args, **options)
        settings = {key: bound.arguments.pop(key, None) for key in more}
        settings = {key: value for key, value in settings.items() if value is not None and key not in _IGNORED}
        args, options = bound.args, bound.kwargs
    y = theirs(*args, **options)
    act, slope = activation.parse(settings.pop("act", None))
    if act == "gelu_tanh":
        y = F.gelu(y, approximate="tanh")
    elif act is not None:
        y = getattr(F, act)(y, *[slope] * (act in activation.SLOPES))
    if pool := settings.pop("pool", None):
        y = getattr(F, f"{pool}_pool2d")(y, 2)
    if settings:
        raise TypeError(f"{function.__name__}: torch has no argument {min(settings)}, so it cannot be exported")
    return y
