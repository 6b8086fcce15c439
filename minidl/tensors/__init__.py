"""Tensor and how one is created. Read `tensor` first, then `gradients`.

`minidl.ops` attaches the operators and methods that compute; `attached` has their types.
"""

from minidl.tensors.conversions import _restored as _restored
from minidl.tensors.create import as_tensor as as_tensor
from minidl.tensors.create import from_torch as from_torch
from minidl.tensors.create import full as full
from minidl.tensors.create import is_tensor as is_tensor
from minidl.tensors.create import made_by as made_by
from minidl.tensors.create import ones as ones
from minidl.tensors.create import zeros as zeros
from minidl.tensors.devices import default_device as default_device
from minidl.tensors.devices import device_of as device_of
from minidl.tensors.tensor import OPERATIONS as OPERATIONS
from minidl.tensors.tensor import Scalar as Scalar
from minidl.tensors.tensor import Tensor as Tensor
