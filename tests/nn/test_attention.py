"""MultiheadAttention and the layers of transformers beside torch's, in float64: results, all gradients, names."""

import pytest
import torch

from minidl import nn
from minidl.tensors import Tensor, default_device

PADDING = torch.zeros(3, 7, dtype=torch.bool)
PADDING[1, 5:] = True
HIDDEN = torch.ones(5, 7, dtype=torch.bool).triu(3)


def drawn(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def compare(mine, theirs, inputs, **options):
    mine, theirs = mine.double(), theirs.double()
    assert list(mine.state_dict()) == list(theirs.state_dict())
    mine.load_state_dict(theirs.state_dict())
    leaves = [x.clone().requires_grad_() for x in inputs]
    tensors = [Tensor(x.to(default_device()), requires_grad=True) for x in inputs]
    ours = {name: Tensor(v.to(default_device())) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    expected, result = theirs(*leaves, **options), mine(*tensors, **ours)
    expected, result = (y if isinstance(y, tuple) else (y,) for y in (expected, result))
    for a, b in zip(result, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a.data.cpu(), b.detach())
    (dy,) = drawn(expected[0].shape)
    expected[0].backward(dy)
    result[0].backward(Tensor(dy.to(default_device())))
    gradients = zip([*tensors, *mine.parameters()], [*leaves, *theirs.parameters()], strict=True)
    for a, b in gradients:
        torch.testing.assert_close(a.grad.data.cpu(), b.grad)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"batch_first": True}, {"kdim": 6, "vdim": 10}, {"bias": False}, {"add_bias_kv": True},
        {"add_zero_attn": True, "add_bias_kv": True},
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "call",
    [
        {}, {"need_weights": False}, {"key_padding_mask": PADDING},
        {"key_padding_mask": PADDING, "need_weights": False},
        {"attn_mask": HIDDEN, "key_padding_mask": PADDING, "need_weights": False}, {"attn_mask": drawn((6, 5, 7))[0]},
        {"average_attn_weights": False},
    ],
)  # fmt: skip
def test_multihead_attention(options, call):
    sizes = [(5, 8), (7, options.get("kdim", 8)), (7, options.get("vdim", 8))]
    shapes = [(3, n, e) if options.get("batch_first") else (n, 3, e) for n, e in sizes]
    theirs = torch.nn.MultiheadAttention(8, 2, **options)
    compare(nn.MultiheadAttention(8, 2, **options), theirs, drawn(*shapes), **call)


def test_without_a_batch():
    compare(nn.MultiheadAttention(8, 2), torch.nn.MultiheadAttention(8, 2), drawn((5, 8), (7, 8), (7, 8)))


def test_causal_without_a_mask():
    """is_causal alone is what the causal mask gives, with and without weights."""
    layer = nn.MultiheadAttention(8, 2)
    (x,) = drawn((5, 3, 8))
    x = Tensor(x.float().to(default_device()))
    mask = nn.Transformer.generate_square_subsequent_mask(5, default_device())
    expected, _ = layer(x, x, x, attn_mask=mask)
    for need_weights in (True, False):
        y, _ = layer(x, x, x, is_causal=True, need_weights=need_weights)
        torch.testing.assert_close(y.data, expected.data)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_layers(norm_first, activation):
    arguments, options = (8, 2, 16, 0.0), {"norm_first": norm_first, "activation": activation}
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    compare(
        nn.TransformerEncoderLayer(*arguments, **options), torch.nn.TransformerEncoderLayer(*arguments, **options),
        drawn((5, 3, 8)), src_mask=mask, is_causal=True,
    )  # fmt: skip
    compare(
        nn.TransformerDecoderLayer(*arguments, **options), torch.nn.TransformerDecoderLayer(*arguments, **options),
        drawn((5, 3, 8), (7, 3, 8)), tgt_mask=mask, memory_key_padding_mask=PADDING,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_stacks():
    arguments = 8, 2, 16, 0.0
    encoders = [
        kit.TransformerEncoder(kit.TransformerEncoderLayer(*arguments, batch_first=True), 2, kit.LayerNorm(8))
        for kit in (nn, torch.nn)
    ]
    compare(*encoders, drawn((3, 7, 8)), src_key_padding_mask=PADDING)
    models = [kit.Transformer(8, 2, 2, 2, 16, 0.0) for kit in (nn, torch.nn)]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    compare(*models, drawn((6, 3, 8), (5, 3, 8)), tgt_mask=mask)
    assert len({id(p) for p in models[0].parameters()}) == len(list(models[1].parameters()))


def test_dropout_only_in_training():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.5)
    x = Tensor(torch.ones(5, 3, 8, device=default_device()))
    assert not torch.equal(layer(x).data, layer(x).data)
    layer.eval()
    assert torch.equal(layer(x).data, layer(x).data)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("embed_dim 8 is not divisible by 3 heads", lambda x: nn.MultiheadAttention(8, 3)),
        ("num_heads is 0", lambda x: nn.MultiheadAttention(8, 0)),
        ("expected two or three dimensions", lambda x: nn.MultiheadAttention(8, 2)(x[0], x, x)),
        (r"expected last sizes \(8, 6, 8\)", lambda x: nn.MultiheadAttention(8, 2, kdim=6)(x, x, x)),
        (r"attn_mask has shape \[2, 2\]", lambda x: nn.MultiheadAttention(8, 2)(x, x, x, attn_mask=HIDDEN[:2, :2])),
        (r"key_padding_mask has shape \[3, 7\]", lambda x: nn.MultiheadAttention(8, 2)(x, x, x, PADDING)),
        ("expected 'relu' or 'gelu'", lambda x: nn.TransformerEncoderLayer(8, 2, activation="tanh")),
    ],
)
def test_bad_arguments(message, call):
    with pytest.raises(ValueError, match=message):
        call(Tensor(torch.ones(5, 3, 8, device=default_device())))
