"""The norms of `minidl.nn.utils` with the names that torch.nn.utils.parametrizations has in the state."""

from functools import partial

from minidl.nn.utils import norms

_PART = "parametrizations.{0}."
weight_norm = partial(norms.weight_norm, parts=f"{_PART}original0 {_PART}original1")
spectral_norm = partial(norms.spectral_norm, parts=f"{_PART}original {_PART}0._u {_PART}0._v")
