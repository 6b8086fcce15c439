"""Classes of modules whose forward, traced by torch.fx, calls `blocks.block` for what that computes at once.

A module that holds layers is traced alone: its layers, and modules of any class but `nn.Sequential`, are called as they
are, so that nothing of them is fixed. What a trace fixes of the module itself is looked for: a forward whose trace
depends on `training`, or whose code asks whether gradients are recorded or uses checkpoints, is left as it is, and the
numbers that it reads from the module are compared at each call. So are hooks of what it no longer calls: the forward
that the module had is called where they differ.
"""

from __future__ import annotations

import functools
import inspect
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn
from unittest import mock

import torch
from torch import fx, nn
from torch.nn.modules import module as all_modules
from torch.utils import checkpoint

from minidl import later
from minidl.torch import folds, shortcuts
from minidl.torch.chains import Block, has_hooks, rewrite
from minidl.torch.layers import Accelerated

NOTHING = "nothing in it to join"
# Code with these names does what a trace would fix.
_FIXED = frozenset(
    {"is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_tracing", "is_compiling"}
)


class Fused(Accelerated):
    """The base of classes made for modules with such a forward."""

    _minidl_blocks: ClassVar[tuple[Block, ...]]
    _minidl_sums: ClassVar[tuple[shortcuts.Sum, ...]]


class _Proxy(fx.Proxy):
    """One that records `+=` and the like as they are: torch's own has `+` for it."""


def _recorded(change: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy("call_function", change, (self, other), {})


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"):
    setattr(_Proxy, f"__{_name}__", _recorded(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """Raises RuntimeError for what a forward computes in another mode than that of its call, which a trace forgets."""

    proxy_buffer_attributes = True  # a forward may change them, or choose by their values

    def __init__(self) -> None:
        super().__init__()
        self._modes = _modes()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self._modes:
            raise RuntimeError("it changes whether gradients are recorded, which a trace would leave out")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not inlined(m)


def _modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def inlined(module: nn.Module) -> bool:
    """Whether a module is a sequence of others and nothing more."""
    return type(module).forward is nn.Sequential.forward and not has_hooks(module)


def fuse(module: nn.Module, ours: Callable[[nn.Module], bool]) -> tuple[type[Fused] | None, str]:
    """A class for a module whose forward calls blocks of layers that are to be `ours`, or None and the reason why there
    is none."""
    why = _unable(module)
    if why:
        return None, why
    before, state, drawn = dict(vars(module)), _state(module), _random_state()
    try:
        with torch.enable_grad():
            graph = _traced(module)
        training = module.training
        module.training = not training
        try:
            with torch.no_grad():
                other = _traced(module)
        finally:
            module.training = training
    except Exception as error:  # noqa: BLE001 (whatever forward does with what has no values)
        return None, f"torch.fx cannot trace it: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    finally:
        changed, draws = _state(module) != state, _drawn_since(drawn)
        for name in vars(module).keys() - before:
            del vars(module)[name]
        vars(module).update(before)
    if changed:
        return None, "its forward changes what the module holds"
    if draws:
        return None, "its forward draws random numbers, which a trace would fix"
    if str(graph) != str(other):
        return None, "its forward depends on training"
    found, called = rewrite(graph, module, ours)
    sums, dropped = shortcuts.rewrite(graph, module)
    if not (found or sums):
        return None, NOTHING
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, f"<minidl.torch: {type(module).__name__}>", "exec"), names)  # noqa: S102 (of torch.fx)
    return _class(module, names["forward"], called | dropped, _minidl_blocks=tuple(found), _minidl_sums=tuple(sums)), ""


def _random_state() -> tuple[Any, ...]:
    """That of Python, and torch's of the CPU and the GPU."""
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), torch.get_rng_state(), on_gpu


def _drawn_since(state: tuple[Any, ...]) -> bool:
    """Whether random numbers were drawn since; they are drawn again."""
    of_python, of_torch, on_gpu = state
    now = _random_state()
    same = now[0] == of_python and torch.equal(now[1], of_torch) and (on_gpu is None or torch.equal(now[2], on_gpu))
    if not same:
        random.setstate(of_python)
        torch.set_rng_state(of_torch)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
    return not same


def _state(module: nn.Module) -> Any:
    """What a module holds, how long its lists and the like are, and how often its tensors were changed."""

    def of(each: Any) -> int:
        if isinstance(each, torch.Tensor) and not each.is_inference():
            return each._version
        return len(each) if isinstance(each, list | dict | set) else 0

    return {name: (id(each), of(each)) for name, each in vars(module).items()}


def _unable(module: nn.Module) -> str:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if "forward" in vars(module):
        return "its forward is replaced"
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD or p.default is not p.empty for p in parameters):
        return "its forward has arguments that may be left out"
    names = _names(module)
    fixed = sorted(names & _FIXED)
    return f"its forward asks for {fixed[0]}" if fixed else ""


def _names(module: nn.Module) -> set[str]:
    """Names in the code of a module's forward, and of its own methods which that names."""
    names: set[str] = set()
    waiting = ["forward"]
    while waiting:
        method = getattr(type(module), waiting.pop(), None)
        code = getattr(method, "__code__", None)
        if code is not None:
            waiting += [name for name in code.co_names if name not in names]
            names.update(code.co_names)
    return names


def _traced(module: nn.Module) -> fx.Graph:
    with mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", _refused, create=True):
        return _Tracer().trace(module)


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("it uses checkpoints, which a trace would leave out")


def _class(module: nn.Module, forward: Callable[..., Any], called: set[str], **members: Any) -> type[Fused]:
    """A class of a module whose forward is the traced one where that is the same, else its own."""
    own: Any = type(module)
    names = _names(module)
    watched = [tuple(name.split(".")) for name in (*_sequences(module), *sorted(called))]
    kinds = (bool, int, float, str, type(None))
    read = [name for name in names - {"training"} if name in vars(module) and type(vars(module)[name]) in kinds]
    built = _built(module)
    numbers = tuple((name, vars(module)[name]) for name in sorted(read))
    listed = bool(names & {"isinstance", "is_tensor"})

    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or any(a is None for a in args) or all_modules._has_any_global_hook():
            return own.forward(self, *args, **kwargs)
        if listed and any(isinstance(a, torch.Tensor) for a in args):
            return own.forward(self, *args)
        for path in watched:
            each = self
            for part in path:
                each = each._modules.get(part, self)
            if has_hooks(each) and each is not self:
                return own.forward(self, *args)
        if _built(self) != built:
            return own.forward(self, *args)
        for name, value in numbers:
            if getattr(self, name) != value:
                return own.forward(self, *args)
        return forward(self, *args)

    return _made(Fused, own, fused, **members)


def pairs(module: nn.Module) -> tuple[folds.Pair, ...]:
    """The convolutions and batch norms of all blocks in a module, but for those that are in several."""
    found: list[tuple[str, str]] = []
    for name, each in module.named_modules():
        if isinstance(each, Fused):
            prefix = f"{name}." if name else ""
            found += [(prefix + b.layer, prefix + b.norm) for b in each._minidl_blocks if b.layer and b.norm]
    counts = Counter(module.get_submodule(path) for pair in set(found) for path in pair)
    alone = (pair for pair in dict.fromkeys(found) if all(counts[module.get_submodule(path)] == 1 for path in pair))
    return tuple(folds.Pair(*pair) for pair in alone)


def whole(module: nn.Module) -> type[Accelerated]:
    """A class of a module whose forward is its own, and within which all batch norms are folded at once."""
    own: Any = type(module)
    return _made(Accelerated, own, own.forward)


def _made(base: type[Accelerated], own: Any, forward: Callable[..., Any], **members: Any) -> Any:
    @functools.wraps(own.forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return folds.traced(self, kind._minidl_folds, lambda: forward(self, *args, **kwargs))
        with later.deferring(self):
            return forward(self, *args, **kwargs)

    members |= {"forward": call, "_minidl_torchs": own}
    members |= {"__module__": own.__module__, "__qualname__": own.__qualname__}
    kind: Any = type(own.__name__, (base, own), members)
    return kind


def _built(module: nn.Module) -> Any:
    """What a trace fixes of what a module holds: names in it and in its sequences and lists, and which are None."""
    held = (
        (name, None if each is None else _built(each) if _open(each) else True)
        for name, each in module._modules.items()
    )
    return tuple(held), tuple((name, each is None) for name, each in module._parameters.items())


def _open(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict) or inlined(module)


def _sequences(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the sequences that a trace of a module goes through."""
    for name, child in module.named_children():
        if inlined(child):
            yield prefix + name
            yield from _sequences(child, f"{prefix}{name}.")


def parts(module: nn.Module) -> Iterator[nn.Module]:
    """What a trace of a module calls as it is: its children, and those of its sequences."""
    for child in module.children():
        if inlined(child):
            yield from parts(child)
        else:
            yield child
