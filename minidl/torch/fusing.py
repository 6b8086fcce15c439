"""Finds, in the forward of a module that torch.fx can trace, what `blocks.block` computes at once.

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
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, NoReturn
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules import module as all_modules
from torch.utils import checkpoint

from minidl import later
from minidl.torch import blocks
from minidl.torch.layers import Accelerated

NOTHING = "nothing in it to join"
# Code with these names does what a trace would fix.
_FIXED = frozenset(
    {"is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_tracing", "is_compiling"}
)
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_ACTS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", F.relu6: "relu6", torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid",
    torch.tanh: "tanh", F.tanh: "tanh", F.silu: "silu", F.mish: "mish", F.hardswish: "hardswish",
    F.hardsigmoid: "hardsigmoid",
}  # fmt: skip
_METHODS = {
    "relu": "relu",
    "relu_": "relu",
    "sigmoid": "sigmoid",
    "sigmoid_": "sigmoid",
    "tanh": "tanh",
    "tanh_": "tanh",
}


class Fused(Accelerated):
    """The base of classes made for modules with such a forward."""

    _minidl_blocks: ClassVar[tuple[Block, ...]]


class Block(NamedTuple):
    """Names of the modules that a block is made of, None for those it has not, and whether it has a sum."""

    layer: str | None
    norm: str | None
    act: str | None
    slope: float
    sum: bool

    def __str__(self) -> str:
        parts = (self.layer, self.norm, "sum" if self.sum else None, self.act)
        return " + ".join(part for part in parts if part)


class _Chain(NamedTuple):
    layer: fx.Node | None
    norm: fx.Node | None
    added: fx.Node | None
    act: tuple[str | None, float]
    nodes: tuple[fx.Node, ...]


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not inlined(m)


def inlined(module: nn.Module) -> bool:
    """Whether a module is a sequence of others and nothing more."""
    return type(module).forward is nn.Sequential.forward and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module does more than its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def fuse(module: nn.Module, ours: Callable[[nn.Module], bool]) -> tuple[type[Fused] | None, str]:
    """A class for a module whose forward calls blocks of layers that are to be `ours`, or None and the reason why there
    is none."""
    why = _unable(module)
    if why:
        return None, why
    before, state = dict(vars(module)), _state(module)
    try:
        graph = _traced(module)
        training = module.training
        module.training = not training
        try:
            other = _traced(module)
        finally:
            module.training = training
    except Exception as error:  # noqa: BLE001 (whatever forward does with what has no values)
        return None, f"torch.fx cannot trace it: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    finally:
        changed = _state(module) != state
        for name in vars(module).keys() - before:
            del vars(module)[name]
        vars(module).update(before)
    if changed:
        return None, "its forward changes what the module holds"
    if str(graph) != str(other):
        return None, "its forward depends on training"
    found, called = _rewrite(graph, module, ours)
    if not found:
        return None, NOTHING
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, f"<minidl.torch: {type(module).__name__}>", "exec"), names)  # noqa: S102 (of torch.fx)
    return _class(module, names["forward"], found, called), ""


def _state(module: nn.Module) -> Any:
    """What a module holds, and how long its lists and the like are."""
    held = vars(module).items()
    return {name: (id(each), len(each) if isinstance(each, list | dict | set) else 0) for name, each in held}


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


def _rewrite(graph: fx.Graph, root: nn.Module, ours: Callable[[nn.Module], bool]) -> tuple[list[Block], set[str]]:
    """Put blocks in place of what they compute; these, and the names of modules that are no longer called."""
    modules = dict(root.named_modules(remove_duplicate=False))
    taken: set[fx.Node] = set()
    found, called = [], set()
    for node in list(graph.nodes):
        chain = None if node in taken else _chain(node, modules, taken)
        if chain is None or not all(each is None or ours(modules[str(each.target)]) for each in chain[:2]):
            continue
        taken.update(chain.nodes)
        first, final = chain.nodes[0], chain.nodes[-1]
        with graph.inserting_before(final):
            parts = [None if each is None else graph.get_attr(str(each.target)) for each in (chain.layer, chain.norm)]
            made = graph.call_function(blocks.block, (*parts, *chain.act, first.args[0], chain.added))
        final.replace_all_uses_with(made)
        for each in reversed(chain.nodes):
            graph.erase_node(each)
            called.update([str(each.target)] if each.op == "call_module" else [])
        layer, norm = (None if each is None else str(each.target) for each in (chain.layer, chain.norm))
        found.append(Block(layer, norm, *chain.act, chain.added is not None))
    return found, called


def _chain(node: fx.Node, modules: dict[str, nn.Module], taken: set[fx.Node]) -> _Chain | None:
    """What begins with a node and follows it alone; None where that is not two operations at least."""
    layer, norm = (node if _is(node, kinds, modules) else None for kinds in (blocks.LAYERS, blocks.NORMS))
    if layer is None and norm is None:
        return None
    nodes = [node]
    after = _only_user(node)
    if layer is not None and _is(after, blocks.NORMS, modules) and not _is(layer, (nn.Linear,), modules):
        norm, after = _take(nodes, after)
    added: fx.Node | None = None
    act: tuple[str | None, float] = (None, 0.0)
    sums = norm is not None or _is(layer, (nn.Conv2d,), modules)
    other = _other(after, nodes[-1]) if sums and after not in taken else None
    if other is not None:
        added = other
        _, after = _take(nodes, after)
    known = None if after is None or after in taken else _act(after, modules)
    if known is not None:
        act = known
        _take(nodes, after)
    made = _Chain(layer, norm, added, act, tuple(nodes))
    return made if len(nodes) > 1 and not _changes_between(made, modules) else None


def _take(nodes: list[fx.Node], node: Any) -> tuple[fx.Node, fx.Node | None]:
    nodes.append(node)
    return node, _only_user(node)


def _is(node: fx.Node | None, kinds: tuple[type, ...], modules: dict[str, nn.Module]) -> bool:
    """Whether a node calls a module of one of torch's classes, of one tensor and without hooks."""
    if node is None or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    module = modules[str(node.target)]
    return type(module) in kinds and not has_hooks(module) and isinstance(node.args[0], fx.Node)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(node: fx.Node | None, one: fx.Node) -> fx.Node | None:
    """What a node adds to another one, as an operation or in place."""
    if node is None or node.kwargs or len(node.args) != 2:
        return None
    adds = node.op == "call_function" and node.target in _ADDITIONS
    method = node.op == "call_method" and node.target in ("add", "add_")
    first, second = node.args
    if not (adds or method) or not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return None
    if first is one:
        return second
    return None if node.target in (operator.iadd, "add_") else first


def _act(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[str | None, float] | None:
    if node.op == "call_module":
        module = modules[str(node.target)]
        return None if has_hooks(module) or len(node.args) != 1 or node.kwargs else blocks.of_module(module)
    plain = len(node.args) == 1 and not set(node.kwargs) - {"inplace"}
    if node.op == "call_method" and plain and node.target in _METHODS:
        return _METHODS[str(node.target)], 0.0
    if node.op == "call_function" and plain and node.target in _ACTS:
        return _ACTS[node.target], 0.0
    return None


def _changes_between(chain: _Chain, modules: dict[str, nn.Module]) -> bool:
    """Whether something else is changed in place between the first and the last node: what the block reads later."""
    node = chain.nodes[0].next
    while node is not chain.nodes[-1]:
        if node not in chain.nodes and _in_place(node, modules):
            return True
        node = node.next
    return False


def _in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        module = modules[str(node.target)]
        known = type(module).__module__.startswith(("torch.nn.", "minidl."))  # others may change what they are given
        return not known or bool(getattr(module, "inplace", False))
    name = getattr(node.target, "__name__", str(node.target))
    changes = name.endswith("_") or (name.startswith("i") and getattr(operator, name, None) is node.target)
    changes = changes or node.kwargs.get("out") is not None or node.target is operator.setitem
    return changes or bool(node.kwargs.get("inplace", False))


def _class(module: nn.Module, forward: Callable[..., Any], found: list[Block], called: set[str]) -> type[Fused]:
    """A class of a module whose forward is the traced one where that is the same, else its own."""
    own: Any = type(module)
    names = _names(module)
    watched = [tuple(name.split(".")) for name in (*_sequences(module), *sorted(called))]
    kinds = (bool, int, float, str, type(None))
    read = [name for name in names - {"training"} if name in vars(module) and type(vars(module)[name]) in kinds]
    built = _built(module)
    numbers = tuple((name, vars(module)[name]) for name in sorted(read))
    listed = "isinstance" in names

    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or all_modules._has_any_global_hook() or (listed and any(isinstance(a, torch.Tensor) for a in args)):
            return own.forward(self, *args, **kwargs)
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

    return _made(Fused, own, fused, _minidl_blocks=tuple(found))


def whole(module: nn.Module) -> type[Accelerated]:
    """A class of a module whose forward is its own, and within which all batch norms are folded at once."""
    own: Any = type(module)
    return _made(Accelerated, own, own.forward)


def _made(base: type[Accelerated], own: Any, forward: Callable[..., Any], **members: Any) -> Any:
    @functools.wraps(own.forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        with later.deferring(self):
            return forward(self, *args, **kwargs)

    members |= {"forward": call, "_minidl_torchs": own}
    members |= {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (base, own), members)


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
