"""L-BFGS: torch's code of the iterations and of the line search, which computes with minidl's Tensors."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from minidl import ops
from minidl.autograd import no_grad
from minidl.kernels import check
from minidl.optim.base import Optimizer
from minidl.optim.groups import Group, Params, check_params, filled, read_groups
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor


class LBFGS(torch.optim.LBFGS):
    """Limited-memory BFGS, as torch.optim.LBFGS; `step` evaluates the loss and its gradients several times.

        def closure():
            optimizer.zero_grad()
            loss = ops.cross_entropy(model(x), y)
            loss.backward()
            return loss
        optimizer = optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
        optimizer.step(closure)

    A step makes up to max_iter iterations with up to max_eval evaluations (None: 1.25 max_iter), and ends when no
    gradient is above tolerance_grad, or when loss or parameters change by less than tolerance_change. The last
    history_size changes of parameters and gradients give the direction. Its length is lr (less in the first iteration),
    or what line_search_fn "strong_wolfe" finds. All parameters form one group and have one dtype and device. Iterations
    read numbers from the device, so a CUDA graph cannot contain a step.

    Raises ValueError and TypeError for parameters as `Optimizer` does, ValueError for settings and several groups.
    Source: Liu and Nocedal, Mathematical Programming 45, 1989; line search: Nocedal and Wright, Numerical Optimization.
    """

    lr, zero_grad, __repr__ = Optimizer.lr, Optimizer.zero_grad, Optimizer.__repr__
    register_step_pre_hook = register_step_post_hook = Optimizer._no_hooks
    register_state_dict_pre_hook = register_state_dict_post_hook = Optimizer._no_hooks
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = Optimizer._no_hooks

    def __init__(
        self, params: Params, lr: float = 1.0, max_iter: int = 20, max_eval: int | None = None,
        tolerance_grad: float = 1e-7, tolerance_change: float = 1e-9, history_size: int = 100,
        line_search_fn: str | None = None,
    ) -> None:  # fmt: skip
        self.defaults = {key: value for key, value in locals().items() if key not in ("self", "params", "__class__")}
        self.defaults["max_eval"] = max_iter * 5 // 4 if max_eval is None else max_eval
        groups = read_groups("LBFGS", params)
        if len(groups) != 1:
            raise ValueError(f"LBFGS: got {len(groups)} groups, expected one")
        check_params("LBFGS", groups[0]["params"])
        self.param_groups: list[dict[str, Any]] = [Group("LBFGS", _checked(filled("LBFGS", groups[0], self.defaults)))]
        self._params: list[Tensor] = self.param_groups[0]["params"]
        check.same("LBFGS", **{f"parameter {i}": param for i, param in enumerate(self._params)})
        self.state: defaultdict[Any, Any] = defaultdict(dict)  # the history is that of the first parameter

    def _set_rates(self, rates: list[float]) -> None:
        self.param_groups[0]["lr"] = rates[0]

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Raise ValueError: all parameters form one group."""
        raise ValueError("LBFGS: add_param_group adds a second group, expected one; create another optimizer")

    def state_dict(self) -> dict[str, Any]:
        """Return settings and history in the form of torch.optim.LBFGS; the tensors are not copies."""
        groups = [{**self.param_groups[0], "params": list(range(len(self._params)))}]
        state = tree_map(lambda x: x.data if isinstance(x, Tensor) else x, list(self.state.values()))
        return {"state": dict(enumerate(state)), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a copy of what `state_dict` returned, here or in torch. Raises ValueError if it does not fit."""
        state, groups = state_dict["state"], state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(self._params)]:
            raise ValueError(f"LBFGS: the state has other groups, expected one of {len(self._params)} parameters")
        settings = {key: value for key, value in groups[0].items() if key != "params"}
        settings = _checked(filled("LBFGS", {"params": self._params, **settings}, self.defaults))
        first, size = self._params[0], sum(param.numel() for param in self._params)
        memory = state.get(0, {})
        for name in ("d", "prev_flat_grad", "old_dirs", "old_stps"):
            for vector in memory.get(name) if isinstance(memory.get(name), list) else [memory.get(name)]:
                if vector is not None and tuple(vector.shape) != (size,):
                    raise ValueError(f"LBFGS: state {name} has shape {list(vector.shape)}, expected [{size}]")
        self.param_groups[0].update(settings)
        kind: Any = {"device": first.device, "dtype": first.dtype, "copy": True}
        history = tree_map(lambda x: Tensor(x.to(**kind)) if isinstance(x, torch.Tensor) else x, dict(memory))
        self.state = defaultdict(dict, {first: history} if history else {})

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "param_groups": self.param_groups, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.defaults, self.param_groups = state["defaults"], state["param_groups"]
        self._params = self.param_groups[0]["params"]
        self.load_state_dict(state["state"])

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Iterate. `closure` computes the loss and its gradients; returns its first result."""
        with no_grad():
            return inspect.unwrap(torch.optim.LBFGS.step)(self, closure)  # without hooks

    def _gather_flat_grad(self) -> Tensor:
        grads = [torch.zeros_like(p.data) if p.raw_grad is None else p.raw_grad for p in self._params]
        return _Vector(torch.cat([(g.dense() if isinstance(g, RowGrad) else g).reshape(-1) for g in grads]))

    def _add_grad(self, step_size: Any, update: Tensor) -> None:
        parts = update.split([param.numel() for param in self._params])
        for param, part in zip(self._params, parts, strict=True):
            param.add_(part.reshape(param.shape), alpha=float(step_size))


class _Vector(Tensor):
    """All gradients as one vector. torch's code calls methods of it and of the results, and torch.mul of -gradient."""

    __slots__ = ()

    def neg(self) -> Tensor:
        return _Vector(ops.neg(self).data)

    def clone(self, **named: Any) -> Tensor:
        return _Vector(self.data.clone(**named))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ops.mul(*args) if function is torch.mul else super().__torch_function__(function, types, args, kwargs)


def _checked(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group. Raises ValueError or TypeError for one out of its range."""
    for name in ("max_iter", "max_eval", "history_size"):
        check.integer("LBFGS", name, group[name], 1)
    for name in ("tolerance_grad", "tolerance_change"):
        check.real("LBFGS", name, group[name])
    if group["line_search_fn"] not in (None, "strong_wolfe"):
        raise ValueError(f"LBFGS: line_search_fn is {group['line_search_fn']!r}, expected 'strong_wolfe' or None")
    return group
