"""Weight norm and spectral norm of a layer: a parameter becomes a property, computed at each access from its parts.

Weight norm: Salimans and Kingma, arXiv 1602.07868. Spectral norm: Miyato et al., arXiv 1802.05957.
"""

from functools import partial
from operator import attrgetter
from typing import Any

from minidl import ops
from minidl.autograd import no_grad
from minidl.nn.conv import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from minidl.nn.module import Module, Parameter
from minidl.tensors import Tensor


def weight_norm(module: Any, name: str = "weight", dim: int | None = 0, parts: str = "{0}_g {0}_v") -> Module:
    """Compute a parameter as g v / |v| with a norm for each index of `dim`, or one for None, and return the module.

    g and v have the names `parts` in the state. Raises ValueError without the parameter.
    """

    def norm(v: Tensor) -> Tensor:
        return v.norm() if dim in (None, -1) else v.norm(2, [i for i in range(v.ndim) if i != dim % v.ndim], True)

    v = _parameter(module, name)
    return _compute(module, name, parts, (Parameter(norm(v.detach())), v), lambda g, v, _: v * (g / norm(v)))


def spectral_norm(
    module: Any, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None,
    parts: str = "{0}_orig {0}_u {0}_v",
) -> Module:  # fmt: skip
    """Divide a parameter W by u W v, an estimate of its largest singular value, and return the module.

    The rows of W are along `dim`, by default 0, of transposed convolutions 1. In training each access first takes
    n_power_iterations, which change u and v. W, u and v have the names `parts` in the state.
    Raises ValueError without the parameter, and for n_power_iterations below 1.
    """
    weight, newer = _parameter(module, name), parts.startswith("parametrizations")
    if n_power_iterations < 1:
        raise ValueError(f"spectral_norm: n_power_iterations is {n_power_iterations}, expected 1 or more")
    axis = int(isinstance(module, ConvTranspose1d | ConvTranspose2d | ConvTranspose3d)) if dim is None else dim
    unit = partial(ops.normalize, dim=0, eps=eps)

    def divided(weight: Tensor, u: Tensor, v: Tensor, training: bool, steps: int = n_power_iterations) -> Tensor:
        rows = weight.movedim(axis, 0).reshape(len(u), -1)
        with no_grad():
            for i in range(2 * steps * training):
                if newer == (i % 2 == 0):  # the older function begins with v
                    u.copy_(unit(rows.mv(v)))
                else:
                    v.copy_(unit(rows.T.mv(u)))
        return weight / u.clone().dot(rows.mv(v.clone()))  # clones: the next call changes u and v before backward

    sizes = weight.shape[axis], weight.numel() // weight.shape[axis]
    u, v = (unit(Tensor(weight.data.new_empty(size)).normal_()) for size in sizes)
    divided(weight.detach(), u, v, newer, 15)
    return _compute(module, name, parts, (weight, u, v), divided)


def remove_weight_norm(module: Any, name: str = "weight") -> Module:
    """Make the parameter of a norm one of its present value, and return the module. Raises ValueError without one."""
    computed = dict(vars(type(module)).get("_computed", {}))
    if name not in computed:
        raise ValueError(f"{type(module).__name__} has no weight_norm or spectral_norm of {name!r}")
    paths, function = computed.pop(name)
    value = _value(paths, function, module, False).detach()  # without power iterations
    for path in paths:
        within, _, last = path.rpartition(".")
        delattr(module.get_submodule(within), last)
    _set_class(module, computed)
    module.register_parameter(name, Parameter(value))
    return module


remove_spectral_norm = remove_weight_norm


def _parameter(module: Module, name: str) -> Parameter:
    parameter = module._parameters.get(name)
    if parameter is None:
        raise ValueError(f"{type(module).__name__} has no parameter {name!r}, or it has a norm already")
    return parameter


def _compute(module: Any, name: str, parts: str, values: tuple[Tensor, ...], function: Any) -> Module:
    """Replace a parameter by function(*values, training)."""
    del module._parameters[name]
    paths = parts.format(name).split()
    for path, value in zip(paths, values, strict=True):
        *within, last = path.split(".")
        owner = module
        for each in within:
            owner = owner._modules.setdefault(each, Module())
        (owner.register_parameter if isinstance(value, Parameter) else owner.register_buffer)(last, value)
    _set_class(module, {**vars(type(module)).get("_computed", {}), name: (paths, function)})
    return module


def _set_class(module: Any, computed: dict[str, Any]) -> None:
    """Give a module a class of its own with these properties, or without any its former class."""
    kind = type(module)
    base: Any = kind.__base__ if "_computed" in vars(kind) else kind
    attributes = {"_computed": computed, "__module__": base.__module__}
    attributes |= {name: property(partial(_value, *parts)) for name, parts in computed.items()}
    module.__class__ = type(f"Parametrized{base.__name__}", (base,), attributes) if computed else base
    if not computed:
        module._modules.pop("parametrizations", None)


def _value(paths: list[str], function: Any, module: Any, training: bool | None = None) -> Any:
    return function(*attrgetter(*paths)(module), module.training if training is None else training)
