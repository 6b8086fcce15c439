"""Recurrent layers and cells, with torch's parameters and states. `ops.recurrent` computes a layer."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from minidl import ops
from minidl.kernels import check
from minidl.kernels.recurrent import GATES
from minidl.nn import init
from minidl.nn.layers import Device, _empty
from minidl.nn.module import Module
from minidl.nn.utils.rnn import PackedSequence
from minidl.ops.recurrent import recurrence
from minidl.tensors import Tensor

Hidden = Tensor | tuple[Tensor, Tensor]
PLAIN = {"tanh": "RNN_TANH", "relu": "RNN_RELU"}


def _plain_mode(name: str, nonlinearity: str) -> str:
    if nonlinearity not in PLAIN:
        raise ValueError(f"{name}: nonlinearity is {nonlinearity!r}, expected tanh or relu")
    return PLAIN[nonlinearity]


class _Recurrent(Module):
    """What layers and cells share: sizes, parameters of one product pair, and the check of states."""

    mode: str
    # `minidl.torch.layers` has other values of these, for torch's tensors.
    _ops: Any = ops
    _linear, _recurrence, _tensor_class = staticmethod(ops.linear), staticmethod(recurrence), Tensor

    def _set_sizes(self, input_size: int, hidden_size: int, bias: bool) -> None:
        name = type(self).__name__
        self.input_size = check.integer(name, "input_size", input_size, 0)
        self.hidden_size = check.integer(name, "hidden_size", hidden_size, 1)
        self.bias = bias

    def _add_parameters(self, suffix: str, inputs: int, device: Device, dtype: torch.dtype | None) -> None:
        rows = GATES[self.mode] * self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, inputs), "weight_hh": (rows, self.hidden_size)}
        if self.bias:
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
        for name, shape in shapes.items():
            setattr(self, name + suffix, _empty(*shape, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly from -1/sqrt(hidden_size) to 1/sqrt(hidden_size)."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            init.uniform_(parameter, -bound, bound)

    def _layer(self, rows: Tensor, state: list[Tensor], suffixes: list[str], sizes: list[int]) -> tuple[Tensor, ...]:
        """Return y [N, D H] and the last states [D, B, H] of a layer of D directions, for inputs [N, I]."""
        names = ("weight_ih", "weight_hh", *["bias_ih", "bias_hh"] * bool(self.bias))
        weights, hidden, *biases = ([getattr(self, name + suffix) for suffix in suffixes] for name in names)
        inputs = [part[0] if len(part) == 1 else self._ops.cat(part) for part in (weights, *biases[:1])]
        x = self._linear(rows, *inputs)
        return self._recurrence(x, state, hidden, biases[1] if biases else [None] * len(suffixes), self.mode, sizes)

    def _states(self, hx: Hidden | None, shape: list[int], like: Tensor) -> list[Tensor]:
        """Return h, and c of lstm, zeros if hx is None. Raises ValueError for another shape, TypeError for no pair."""
        name, pair = type(self).__name__, self.mode == "LSTM"
        if hx is None:
            return [like.new_zeros(*shape)] * (1 + pair)
        states = list(hx) if isinstance(hx, tuple | list) else [hx]
        if len(states) != 1 + pair or not all(isinstance(state, self._tensor_class) for state in states):
            raise TypeError(f"{name}: hx is {type(hx).__name__}, expected {'a pair (h, c)' if pair else 'a Tensor'}")
        for label, state in zip(("h", "c"), states, strict=False):
            if list(state.shape) != shape:
                raise ValueError(f"{name}: {label} of hx has shape {list(state.shape)}, expected {shape}")
        return states

    def _check_input(self, input: Tensor, ranks: tuple[int, int]) -> None:
        name = type(self).__name__
        if not isinstance(input, self._tensor_class):
            raise TypeError(f"{name}: input is of type {type(input).__name__}, expected a minidl Tensor")
        if input.ndim not in ranks:
            expected = f"{ranks[0]} or {ranks[1]} dimensions (the first for one example without a batch)"
            raise ValueError(f"{name}: input has shape {list(input.shape)}, expected {expected}")
        if input.shape[-1] != self.input_size:
            raise ValueError(f"{name}: input has shape {list(input.shape)}, expected a last size of {self.input_size}")


class RNNBase(_Recurrent):
    """The base of RNN, LSTM and GRU: layers and directions over a sequence.

    Shapes: input [T, B, input_size], [B, T, input_size] with batch_first, [T, input_size] for one example, or a
    PackedSequence; output like input with D hidden_size values, D = 2 if bidirectional, else 1. States hx and h_n
    [num_layers D, B, hidden_size], without B for one example; hx None is zeros. dropout applies to the outputs of all
    layers but the last, in training.

    There is no second derivative. Raises ValueError for shapes and options, TypeError for dtypes that differ.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        self._set_sizes(input_size, hidden_size, bias)
        self.num_layers = check.integer(name, "num_layers", num_layers, 1)
        if isinstance(dropout, bool) or not 0.0 <= dropout <= 1.0:
            raise ValueError(f"{name}: dropout is {dropout}, expected a probability between 0 and 1")
        if proj_size:
            raise ValueError(f"{name}: proj_size is {proj_size}, expected 0: apply Linear to the output")
        if dropout and num_layers == 1:
            warnings.warn(f"{name}: dropout={dropout} has no effect on one layer", stacklevel=3)
        self.batch_first, self.dropout, self.bidirectional, self.proj_size = batch_first, dropout, bidirectional, 0
        for layer, suffixes in enumerate(self._suffixes):
            for suffix in suffixes:
                self._add_parameters(suffix, len(suffixes) * hidden_size if layer else input_size, device, dtype)
        self.reset_parameters()

    @property
    def _suffixes(self) -> list[list[str]]:
        """Return the suffixes of the parameters of each layer's directions."""
        directions = ("", "_reverse")[: 1 + bool(self.bidirectional)]
        return [[f"_l{layer}{direction}" for direction in directions] for layer in range(self.num_layers)]

    def forward(self, input: Tensor | PackedSequence, hx: Hidden | None = None) -> tuple[Any, Any]:
        if isinstance(input, tuple):
            return self._forward_packed(input, hx)
        self._check_input(input, (2, 3))
        one = input.ndim == 2
        x = input.unsqueeze(1) if one else input.transpose(0, 1) if self.batch_first else input
        T, B, _ = x.shape
        if T == 0:
            raise ValueError(f"{type(self).__name__}: input has shape {list(input.shape)}, expected one step or more")
        count = self.num_layers * len(self._suffixes[0])
        states = self._states(hx, [count, self.hidden_size] if one else [count, B, self.hidden_size], input)
        if one:
            states = [state.reshape(count, 1, self.hidden_size) for state in states]
        y, states = self._layers(x.reshape(T * B, self.input_size), states, [B] * T)
        y = y.reshape(T, B, y.shape[1])
        if one:
            y, states = y.squeeze(1), [state.squeeze(1) for state in states]
        elif self.batch_first:
            y = y.transpose(0, 1)
        return y, states[0] if len(states) == 1 else tuple(states)

    def _forward_packed(self, packed: PackedSequence, hx: Hidden | None) -> tuple[Any, Any]:
        sizes = packed.batch_sizes.tolist()
        self._check_input(packed.data, (2, 2))
        count = self.num_layers * len(self._suffixes[0])
        states = self._states(hx, [count, sizes[0], self.hidden_size], packed.data)
        if hx is not None and packed.sorted_indices is not None:
            states = [self._ops.index_select(state, 1, packed.sorted_indices) for state in states]
        y, states = self._layers(packed.data, states, sizes)
        if packed.unsorted_indices is not None:
            states = [self._ops.index_select(state, 1, packed.unsorted_indices) for state in states]
        return packed._replace(data=y), states[0] if len(states) == 1 else tuple(states)

    def _layers(self, y: Tensor, states: list[Tensor], sizes: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Return the rows of the last layer, and the last states of all."""
        last, D = [], len(self._suffixes[0])
        for layer, suffixes in enumerate(self._suffixes):
            if layer and self.dropout:
                y = self._ops.dropout(y, self.dropout, self.training)
            y, *state = self._layer(y, [s[layer * D : (layer + 1) * D] for s in states], suffixes, sizes)
            last.append(state)
        return y, [self._ops.cat(state) for state in zip(*last, strict=True)]

    def flatten_parameters(self) -> None:
        """Do nothing: parameters are read where they are."""

    def extra_repr(self) -> str:
        usual = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0, "bidirectional": False}
        shown = [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *shown])


class RNN(RNNBase):
    """h' = act(W_ih x + b_ih + W_hh h + b_hh) with tanh or relu; arguments and shapes: `RNNBase`, also in `help`.

    forward(input, hx=None) returns output and h_n. Raises ValueError for another nonlinearity.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.__dict__.update(nonlinearity=nonlinearity, mode=_plain_mode(type(self).__name__, nonlinearity))
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device, dtype=dtype
        )


class LSTM(RNNBase):
    """Long short-term memory: gates i, f, g, o; c' = f c + i g and h' = o tanh(c'); shapes: `RNNBase`.

    forward(input, hx=None) returns output and (h_n, c_n); hx is (h, c). proj_size is not supported: ValueError says to
    apply Linear to the output. Source: Hochreiter and Schmidhuber, Neural Computation 9(8), 1997.
    """

    mode = "LSTM"


class GRU(RNNBase):
    """Gated recurrent unit: r, z, n = tanh(x_n + r (W_hn h + b_hn)) and h' = (1 - z) n + z h; shapes: `RNNBase`.

    forward(input, hx=None) returns output and h_n. Source: Cho et al., arXiv 1406.1078, in torch's variant.
    """

    mode = "GRU"


class _Cell(_Recurrent):
    """One step: input [B, input_size] and states [B, hidden_size], or without B."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._set_sizes(input_size, hidden_size, bias)
        for name in () if bias else ("bias_ih", "bias_hh"):
            self.register_parameter(name, None)
        self._add_parameters("", input_size, device, dtype)
        self.reset_parameters()

    def forward(self, input: Tensor, hx: Hidden | None = None) -> Any:
        self._check_input(input, (1, 2))
        lead = list(input.shape[:-1])
        B, H = lead[0] if lead else 1, self.hidden_size
        states = [state.reshape(1, B, H) for state in self._states(hx, [*lead, H], input)]
        _, *states = self._layer(input.reshape(B, self.input_size), states, [""], [B])
        states = [state.reshape(*lead, H) for state in states]
        return states[0] if len(states) == 1 else tuple(states)

    def extra_repr(self) -> str:
        shown = "" if self.bias else ", bias=False"
        if self.mode == "RNN_RELU":
            shown += ", nonlinearity=relu"
        return f"{self.input_size}, {self.hidden_size}{shown}"


class RNNCell(_Cell):
    """One step of `RNN`: forward(input, hx=None) returns h'. Raises ValueError for another nonlinearity."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh", device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.__dict__.update(nonlinearity=nonlinearity, mode=_plain_mode(type(self).__name__, nonlinearity))
        super().__init__(input_size, hidden_size, bias, device, dtype)


class LSTMCell(_Cell):
    """One step of `LSTM`: forward(input, hx=None) returns (h', c'); hx is (h, c)."""

    mode = "LSTM"


class GRUCell(_Cell):
    """One step of `GRU`: forward(input, hx=None) returns h'."""

    mode = "GRU"
