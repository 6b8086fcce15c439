"""Recurrent layers and cells, and packed sequences, against torch's in float64."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minidl
from minidl import autograd, nn
from minidl.nn.utils import rnn
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replaying
from minidl.tensors import Tensor, default_device
from minidl.testing.specs import bounds

LAYERS = [("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("LSTM", {}), ("GRU", {})]
SIZES = st.sampled_from([1, 2, 3, 5, 7, 13, 17])
DTYPES = [torch.float64, torch.float32, torch.float16, *([] if launch.INTERPRETED else [torch.bfloat16])]


def numbers(*shape, seed=0, dtype=torch.float64):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(default_device(), dtype)


def as_pair(hx):
    return hx if isinstance(hx, tuple) else (hx,)


def as_hx(states):
    return None if not states else states[0] if len(states) == 1 else tuple(states)


def built(name, options, dtype=torch.float64):
    """minidl's layer and torch's in float64, with the same weights, which dtype holds.

    Of ReLU each unit's weights have one sign: with x and states >= 0 rounding moves no sum to the other side of 0.
    """
    minidl.manual_seed(0)
    ours = getattr(nn, name)(**options, dtype=dtype).to(default_device())
    if options.get("nonlinearity") == "relu":
        for parameter in ours.parameters():
            parameter.data.abs_()[::2].neg_()
    theirs = getattr(torch.nn, name)(**options).to(default_device(), torch.float64)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def near(value, exact, steps, terms, dtype):
    """Each step rounds a sum of `terms` products in the accumulation type, and at most 4 values to dtype; a state of
    magnitude up to the largest result carries the error on."""
    unit = 4 * bounds.UNIT[dtype] + (terms + 32) * bounds.acc_unit(dtype)
    largest = exact.abs().amax().item() if exact.numel() else 0.0
    assert value.dtype == dtype
    torch.testing.assert_close(value.double(), exact.detach(), rtol=0.0, atol=2 * steps * unit * (1.0 + largest))


def _flat(result):
    """The tensors of a result in a list; of a packed sequence its data."""
    if isinstance(result, rnn.PackedSequence | torch.nn.utils.rnn.PackedSequence):
        return [result.data]
    return [t for part in result for t in _flat(part)] if isinstance(result, tuple) else [result]


def agree(ours, theirs, x, states, dtype, steps):
    """Results and all gradients; x is a tensor, or a list of lengths after it: a packed sequence."""
    data, lengths = x if isinstance(x, tuple) else (x, None)
    if getattr(ours, "nonlinearity", "") == "relu":
        data, states = data.abs(), [each.abs() for each in states]
    mine, other = Tensor(data.clone(), requires_grad=True), data.double().requires_grad_()
    my_states = [Tensor(s.clone(), requires_grad=True) for s in states]
    other_states = [s.double().requires_grad_() for s in states]
    inputs = [mine, other]
    if lengths is not None:
        first = getattr(ours, "batch_first", False)
        inputs = [
            rnn.pack_padded_sequence(mine, lengths, first, enforce_sorted=False),
            torch.nn.utils.rnn.pack_padded_sequence(other, lengths, first, enforce_sorted=False),
        ]
    results = [
        layer(value, as_hx(hx))
        for layer, value, hx in zip((ours, theirs), inputs, (my_states, other_states), strict=True)
    ]
    flat = [_flat(result) for result in results]
    grads = [numbers(*t.shape, seed=7 + i, dtype=dtype) for i, t in enumerate(flat[0])]
    terms = ours.input_size + ours.hidden_size * 2
    for value, exact in zip(*flat, strict=True):
        near(value.data, exact, steps, terms, dtype)
    autograd.backward(flat[0], [Tensor(dy) for dy in grads])
    torch.autograd.backward(flat[1], [dy.double() for dy in grads])
    rows = data.numel() // max(1, data.shape[-1])
    pairs = [(mine, other), *zip(my_states, other_states, strict=True)]
    pairs += zip(ours.parameters(), theirs.parameters(), strict=True)
    for own, exact in pairs:
        near(own.grad.data, exact.grad, steps, terms + rows, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), LAYERS, ids=str)
def test_layers(name, options, dtype):
    @given(T=SIZES, B=SIZES, inputs=SIZES, hidden=SIZES, flags=st.lists(st.booleans(), min_size=5, max_size=5))
    def run(T, B, inputs, hidden, flags):
        bias, first, both, two, with_states = flags
        settings = {"num_layers": 1 + two, "bias": bias, "batch_first": first, "bidirectional": both}
        ours, theirs = built(name, {"input_size": inputs, "hidden_size": hidden, **options, **settings}, dtype)
        x = numbers(*((B, T) if first else (T, B)), inputs, dtype=dtype)
        count = (1 + two) * (1 + both)
        states = [numbers(count, B, hidden, seed=i + 1, dtype=dtype) for i in range(1 + (name == "LSTM"))]
        agree(ours, theirs, x, states * with_states, dtype, T * (1 + two) * (1 + both))

    run()


@pytest.mark.parametrize(("name", "options"), LAYERS, ids=str)
def test_packed_sequences(name, options):
    @given(
        lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
        flags=st.lists(st.booleans(), min_size=4, max_size=4),
    )
    def run(lengths, flags):
        first, both, two, with_states = flags
        settings = {"num_layers": 1 + two, "batch_first": first, "bidirectional": both}
        ours, theirs = built(name, {"input_size": 3, "hidden_size": 5, **options, **settings}, torch.float32)
        T, B, count = max(lengths), len(lengths), (1 + two) * (1 + both)
        x = numbers(*((B, T) if first else (T, B)), 3, dtype=torch.float32)
        states = [numbers(count, B, 5, seed=i + 1, dtype=torch.float32) for i in range(1 + (name == "LSTM"))]
        agree(ours, theirs, (x, lengths), states * with_states, torch.float32, 2 * T * count)

    run()


@pytest.mark.parametrize(("name", "options"), [(f"{n}Cell", o) for n, o in LAYERS], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [(), (1,), (5,)])
def test_cells(name, options, bias, batch):
    ours, theirs = built(name, {"input_size": 3, "hidden_size": 7, "bias": bias, **options}, torch.float32)
    x = numbers(*batch, 3, dtype=torch.float32)
    states = [numbers(*batch, 7, seed=i + 1, dtype=torch.float32) for i in range(1 + (name == "LSTMCell"))]
    for hx in (states, []):
        for layer in (ours, theirs):
            layer.zero_grad()
        agree(ours, theirs, x, hx, torch.float32, 2)


@pytest.mark.parametrize(("name", "options"), LAYERS, ids=str)
def test_one_example_without_a_batch(name, options):
    ours, theirs = built(name, {"input_size": 3, "hidden_size": 5, "bidirectional": True, **options})
    states = [numbers(2, 5, seed=i) for i in range(1 + (name == "LSTM"))]
    agree(ours, theirs, numbers(4, 3), states, torch.float64, 8)
    y, last = ours(Tensor(numbers(4, 3)))
    assert y.shape == (4, 10)
    assert all(state.shape == (2, 5) for state in as_pair(last))


def test_a_batch_of_none():
    y, (h, c) = nn.LSTM(3, 5).to(default_device())(Tensor(numbers(4, 0, 3, dtype=torch.float32)))
    assert (y.shape, h.shape, c.shape) == ((4, 0, 5), (1, 0, 5), (1, 0, 5))


def test_what_is_not_finite_stays_in_its_sequence():
    layer = nn.GRU(3, 5).to(default_device())
    x = numbers(4, 3, 3, dtype=torch.float32)
    x[1, 1, 0] = float("nan")
    y, h = layer(Tensor(x))
    assert y.data[:, [0, 2]].isfinite().all()
    assert y.data[0].isfinite().all()
    assert y.data[1:, 1].isnan().all()
    assert h.data[0, 1].isnan().all()


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_large_inputs_saturate(name):
    ours, theirs = built(name, {"input_size": 3, "hidden_size": 5}, torch.float32)
    x = numbers(3, 2, 3, dtype=torch.float32) * 1e30
    near(ours(Tensor(x))[0].data, theirs(x.double())[0], 3, 16, torch.float32)


def test_dropout_is_between_layers_and_in_training():
    torch.manual_seed(0)
    layer = nn.LSTM(3, 64, num_layers=2, dropout=1.0).to(default_device())
    x = Tensor(numbers(4, 2, 3, dtype=torch.float32))
    zeroed = copy.deepcopy(layer)
    zeroed.dropout = 0.0
    zeroed.weight_ih_l1.data.zero_()
    assert torch.equal(layer(x)[0].data, zeroed(x)[0].data)
    layer.eval()
    assert not torch.equal(layer(x)[0].data, zeroed(x)[0].data)
    with pytest.warns(UserWarning, match="no effect on one layer"):
        nn.GRU(3, 4, dropout=0.5)


def test_first_weights_are_within_their_bound():
    layer = nn.LSTM(100, 25)
    for parameter in layer.parameters():
        assert 0.15 < parameter.data.abs().max() <= 0.2


@pytest.mark.parametrize(("name", "options"), LAYERS, ids=str)
def test_bits_are_the_same_in_every_run(name, options):
    """Also if launches are replayed."""
    layer = getattr(nn, name)(5, 33, bidirectional=True, **options).to(default_device())
    x = numbers(6, 17, 5, dtype=torch.float32)

    def step():
        layer.zero_grad()
        leaf = Tensor(x, requires_grad=True)
        y, _ = layer(leaf)
        y.backward(Tensor(torch.ones_like(y.data)))
        return [y.data, leaf.grad.data, *(p.grad.data.clone() for p in layer.parameters())]

    first = step()
    for at_once in (False, True):
        with replaying(at_once, at_once):
            assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


def test_a_second_derivative_is_refused_by_name():
    x = Tensor(numbers(2, 2, 3, dtype=torch.float32), requires_grad=True)
    y, _ = nn.GRU(3, 4).to(default_device())(x)
    with pytest.raises(RuntimeError, match="Recurrence"):
        autograd.grad(y.sum(), [x], create_graph=True)


@pytest.mark.parametrize("first", [True, False])
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6), more=st.integers(0, 2), width=st.integers(0, 3))
def test_packing_and_padding(first, lengths, more, width):
    T, B = max(lengths) + more, len(lengths)
    x = numbers(*((B, T) if first else (T, B)), *[3] * min(width, 2), seed=width)
    for in_order in (True, False):
        sizes = sorted(lengths, reverse=True) if in_order else lengths
        mine, other = Tensor(x.clone(), requires_grad=True), x.clone().requires_grad_()
        packed = rnn.pack_padded_sequence(mine, sizes, first, in_order)
        expected = torch.nn.utils.rnn.pack_padded_sequence(other, sizes, first, in_order)
        assert torch.equal(packed.data.data, expected.data)
        assert torch.equal(packed.batch_sizes.data, expected.batch_sizes)
        for own, index in zip(packed[2:], expected[2:], strict=True):
            assert (own is None) == (index is None)
        padded, back = rnn.pad_packed_sequence(packed, first, -1.5, T)
        exact, lengths_back = torch.nn.utils.rnn.pad_packed_sequence(expected, first, -1.5, T)
        assert torch.equal(padded.data, exact)
        assert torch.equal(back.data, lengths_back)
        dy = torch.rand_like(exact)
        padded.backward(Tensor(dy))
        exact.backward(dy)
        assert torch.equal(mine.grad.data, other.grad)
    for side in ("left", "right"):
        parts = [numbers(length, 2, seed=length) for length in lengths]
        leaves = [Tensor(part, requires_grad=True) for part in parts]
        joined = rnn.pad_sequence(leaves, first, 0.5, side)
        assert torch.equal(joined.data, torch.nn.utils.rnn.pad_sequence(parts, first, 0.5, side))
        joined.sum().backward()
        assert all((leaf.grad.data == 1).all() for leaf in leaves)


@pytest.mark.parametrize("lengths", [(4, 2, 2), (1, 3, 2), (5,)])
def test_lists_of_sequences_are_packed_and_unpacked(lengths):
    is_sorted = list(lengths) == sorted(lengths, reverse=True)
    parts = [numbers(length, 2, seed=length) for length in lengths]
    leaves = [Tensor(part, requires_grad=True) for part in parts]
    packed = rnn.pack_sequence(leaves, enforce_sorted=is_sorted)
    expected = torch.nn.utils.rnn.pack_sequence(parts, enforce_sorted=is_sorted)
    for ours, theirs in zip(packed, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours.data, theirs)
    unpacked = rnn.unpack_sequence(packed)
    assert all(torch.equal(ours.data, part) for ours, part in zip(unpacked, parts, strict=True))
    sum((part * part).sum() for part in unpacked).backward()
    assert all(torch.equal(leaf.grad.data, 2 * part) for leaf, part in zip(leaves, parts, strict=True))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("lengths", [[3, 1], [2, 0], Tensor(torch.tensor([1, 3])), torch.tensor([3, 3])])
def test_padded_sequences_are_separated(first, lengths):
    x = numbers(2, 3, 4) if first else numbers(3, 2, 4)
    raw = lengths.data if isinstance(lengths, Tensor) else torch.as_tensor(lengths)
    expected = torch.nn.utils.rnn.unpad_sequence(x.clone(), raw, first)
    for ours, theirs in zip(rnn.unpad_sequence(Tensor(x), lengths, first), expected, strict=True):
        assert torch.equal(ours.data, theirs)


def test_a_packed_sequence_finds_its_inverse_and_moves():
    order = torch.tensor([2, 0, 1], device=default_device())
    packed = rnn.PackedSequence(Tensor(numbers(3, 2)), Tensor(torch.tensor([3])), Tensor(order))
    assert packed.unsorted_indices.data.tolist() == [1, 2, 0]
    assert packed.to(torch.float32).data.dtype == torch.float32


def test_representation():
    for name, options in LAYERS:
        settings = {"num_layers": 2, "bias": False, "dropout": 0.5, "bidirectional": True}
        for more in ({}, settings):
            ours, theirs = (getattr(kit, name)(3, 4, **options, **more) for kit in (nn, torch.nn))
            assert repr(ours) == repr(theirs)
        assert repr(getattr(nn, f"{name}Cell")(3, 4, **options)) == repr(
            getattr(torch.nn, f"{name}Cell")(3, 4, **options)
        )


X = numbers(4, 2, 3, dtype=torch.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.LSTM(3, 4, proj_size=2), ValueError, "LSTM: proj_size is 2, expected 0: apply Linear"),
        (lambda: nn.RNN(3, 4, nonlinearity="gelu"), ValueError, "RNN: nonlinearity is 'gelu', expected tanh or relu"),
        (lambda: nn.GRU(3, 0), ValueError, "GRU: hidden_size is 0, expected 1 or more"),
        (lambda: nn.GRU(3, 4, num_layers=0), ValueError, "GRU: num_layers is 0"),
        (lambda: nn.GRU(3, 4, dropout=1.5), ValueError, "GRU: dropout is 1.5"),
        (lambda: nn.GRU(3, 4, proj_size=2), ValueError, "GRU: proj_size is 2, expected 0: apply Linear"),
        (lambda: nn.GRU(5, 4)(Tensor(X)), ValueError, "GRU: input has shape .* expected a last size of 5"),
        (lambda: nn.GRU(3, 4)(Tensor(X[0, 0])), ValueError, "GRU: input has shape .* expected 2 or 3 dimensions"),
        (lambda: nn.GRU(3, 4)(Tensor(X[:0])), ValueError, "expected one step or more"),
        (lambda: nn.GRU(3, 4)(X), TypeError, "GRU: input is of type Tensor, expected a minidl Tensor"),
        (lambda: nn.GRU(3, 4)(Tensor(X), Tensor(X)), ValueError, r"GRU: h of hx has shape .* expected \[1, 2, 4\]"),
        (lambda: nn.LSTM(3, 4)(Tensor(X), Tensor(X)), TypeError, r"LSTM: hx is Tensor, expected a pair \(h, c\)"),
        (lambda: nn.LSTMCell(3, 4)(Tensor(X)), ValueError, "LSTMCell: input has shape .* expected 1 or 2 dimensions"),
        (lambda: nn.GRU(3, 4, dtype=torch.float16)(Tensor(X)), TypeError, "convert one of them"),
        (lambda: rnn.pack_padded_sequence(Tensor(X), [3, 4]), ValueError, "do not rise; or set enforce_sorted=False"),
        (lambda: rnn.pack_padded_sequence(Tensor(X), [3, 0]), ValueError, "expected numbers from 1 to 4"),
        (lambda: rnn.pack_padded_sequence(Tensor(X), [5, 3]), ValueError, "expected numbers from 1 to 4"),
        (lambda: rnn.pack_padded_sequence(Tensor(X), [3]), ValueError, "one whole number for each of 2 sequences"),
        (lambda: rnn.pack_padded_sequence(Tensor(X[0, 0]), [3]), ValueError, "expected two dimensions or more"),
        (
            lambda: rnn.pad_packed_sequence(rnn.pack_padded_sequence(Tensor(X), [3, 2]), total_length=2),
            ValueError,
            "total_length is 2, expected 3 or more",
        ),
        (lambda: rnn.pad_sequence([]), ValueError, "expected one or more Tensors"),
        (lambda: rnn.pad_sequence([Tensor(X)], padding_side="top"), ValueError, "padding_side is 'top'"),
        (lambda: rnn.pack_sequences, AttributeError, "minidl.nn.utils.rnn has no pack_sequences"),
        (lambda: rnn.pack_sequence([]), ValueError, "expected one or more Tensors"),
        (lambda: rnn.pack_sequence([Tensor(X[:2]), Tensor(X)]), ValueError, "set enforce_sorted=False"),
        (lambda: rnn.unpad_sequence(Tensor(X), [1, 5]), ValueError, "expected 2 numbers from 0 to 4"),
        (lambda: rnn.unpad_sequence(Tensor(X), [1]), ValueError, "expected 2 numbers from 0 to 4"),
        (lambda: rnn.unpad_sequence(Tensor(X[0, 0]), [1]), ValueError, "expected two dimensions or more"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message), torch.device(default_device()):
        call()
