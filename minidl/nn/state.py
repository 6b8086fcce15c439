"""Saving and loading the state of modules, by torch's protocol: each module handles its own part."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from minidl.autograd.deferred import settle_all
from minidl.nn.registry import Registry
from minidl.tensors import Tensor

_EXTRA = "_extra_state"


class Loaded(NamedTuple):
    """The names that did not match when a state was loaded, as torch returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]

    def __repr__(self) -> str:
        fits = not self.missing_keys and not self.unexpected_keys
        names = f"missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys}"
        return "<All keys matched successfully>" if fits else f"Loaded({names})"


class Stateful(Registry):
    """The state of a Module. A subclass changes its part by overriding torch's methods, called for every module."""

    _version = 1  # of the state's format, in `local_metadata`

    def get_extra_state(self) -> Any:
        """Return state other than tensors, for `set_extra_state`. Used only if a subclass defines both."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_extra_state()")

    def set_extra_state(self, state: Any) -> None:
        """Load what `get_extra_state` returned."""
        raise NotImplementedError(f"{type(self).__name__} does not define set_extra_state()")

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the torch tensors of parameters and buffers by name, without copying. A shared one has several names.

        With `keep_vars` they are the Parameters and Tensors themselves. Convolution weights are channels-last.
        """
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()  # type: ignore[attr-defined]
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]] = {"version": self._version}
        self._save_to_state_dict(destination, prefix, keep_vars)
        for name, module in self._modules.items():
            if module is not None:
                module.state_dict(destination=destination, prefix=f"{prefix}{name}.", keep_vars=keep_vars)
        return destination

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Put the state of this module, without submodules, into `destination`."""
        for name, tensor in self.saved_tensors().items():
            destination[prefix + name] = tensor if keep_vars else tensor.data.detach()
        if type(self).get_extra_state is not Stateful.get_extra_state:
            destination[prefix + _EXTRA] = self.get_extra_state()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Loaded:
        """Copy values into parameters and buffers by name, converting dtype and device.

        Returns the missing and the unexpected names. Raises RuntimeError for such names if `strict`, and for a value of
        another shape; then no parameter or buffer changes. As in torch, num_batches_tracked of a batch norm may be
        missing in a state without versions, and keeps its value.
        """
        state: Any = state_dict
        if not isinstance(state, Mapping) or any(not isinstance(name, str) for name in state):
            got = type(state).__name__
            raise TypeError(f"{type(self).__name__}.load_state_dict: got a {got}, expected a dict of tensors by name")
        settle_all()
        before = {id(tensor): (tensor.data, tensor.data.clone()) for _, tensor in self.named_tensors()}
        missing: list[str] = []
        unknown: list[str] = []
        errors: list[str] = []
        try:
            self._load(OrderedDict(state), "", getattr(state, "_metadata", {}), missing, unknown, errors)
            for title, names in (("Unexpected", unknown), ("Missing", missing)):
                if strict and names:
                    listed = ", ".join(f'"{name}"' for name in names)
                    errors.insert(0, f"{title} key(s) in state_dict: {listed}; strict=False loads the others")
            if errors:
                listed = "\n\t".join(errors)
                raise RuntimeError(f"Error(s) in loading state_dict for {type(self).__name__}:\n\t{listed}")
        except BaseException:
            for data, values in before.values():
                data.copy_(values)
            raise
        return Loaded(missing, unknown)

    def _load(
        self, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], missing: list[str], unknown: list[str],
        errors: list[str],
    ) -> None:  # fmt: skip
        """Load this module and its submodules from the part of a state with their prefix."""
        self._load_from_state_dict(state, prefix, dict(metadata.get(prefix[:-1], {})), True, missing, unknown, errors)
        for name, module in self._modules.items():
            if module is not None:
                inner = f"{prefix}{name}."
                part = OrderedDict((key, value) for key, value in state.items() if key.startswith(inner))
                module._load(part, inner, metadata, missing, unknown, errors)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load this module, without submodules, and add names and errors to the lists."""
        local: dict[str, Any] = self.saved_tensors()
        for name, tensor in local.items():
            if (key := prefix + name) in state_dict:
                error_msgs += _copied(key, tensor, state_dict[key])
            elif strict:
                missing_keys.append(key)
        if type(self).set_extra_state is not Stateful.set_extra_state:
            local[_EXTRA] = None
            if (key := prefix + _EXTRA) in state_dict:
                self.set_extra_state(state_dict[key])
            elif strict:
                missing_keys.append(key)
        for key in state_dict if strict else ():
            first, *rest = key.removeprefix(prefix).split(".", 1)
            if key.startswith(prefix) and first not in (self._modules if rest else local):
                unexpected_keys.append(key)


def _copied(key: str, tensor: Tensor, value: Any) -> list[str]:
    """Copy a value into a tensor; returns the error message if it does not fit."""
    value = value.data if isinstance(value, Tensor) else value
    if not isinstance(value, torch.Tensor):
        expected = "expected torch.Tensor or Tensor-like object from checkpoint but received"
        return [f'While copying the parameter named "{key}", {expected} {type(value)}']
    if tensor.ndim == 0 and value.shape == (1,):
        value = value[0]
    if value.shape != tensor.shape:
        sizes = f"with shape {value.shape} from checkpoint, the shape in current model is {tensor.shape}."
        return [f"size mismatch for {key}: copying a param {sizes}"]
    if tensor.data.is_meta and not value.is_meta:
        warnings.warn(f"for {key}: the module is on the device meta, which keeps no values", stacklevel=5)
    try:
        tensor.data.copy_(value.detach())
    except (RuntimeError, NotImplementedError) as error:
        return [f'While copying the parameter named "{key}", an exception occurred: {error}']
    return []
