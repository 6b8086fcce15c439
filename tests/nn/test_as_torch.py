"""Layers and losses that torch has, too: constructed alike, they give the same values, gradients and state_dict."""

import inspect
import warnings
from functools import partial

import pytest
import torch

from minidl import fusion, nn, no_grad, ones, ops, zeros
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device

IMAGES = (2, 6, 5, 7)
VOLUMES = (2, 3, 4, 5, 6)
ROWS = (4, 6)
CHANNELS = {"in_channels": 6, "out_channels": 3, "kernel_size": 3}
# Name, arguments, shape of x.
LAYERS = [
    ("ELU", {"alpha": 0.5}, ROWS),
    ("Hardsigmoid", {}, ROWS),
    ("Hardswish", {}, ROWS),
    ("Hardtanh", {"min_val": -0.5, "max_val": 0.25}, ROWS),
    ("LogSoftmax", {"dim": 1}, IMAGES),
    ("Mish", {}, ROWS),
    ("PReLU", {"num_parameters": 6}, IMAGES),
    ("ReLU", {"inplace": True}, ROWS),
    ("Softmax", {"dim": -1}, IMAGES),
    ("Softplus", {"beta": 2.0}, ROWS),
    ("LayerNorm", {"normalized_shape": 6}, ROWS),
    ("LayerNorm", {"normalized_shape": (5, 7), "bias": False}, IMAGES),
    ("RMSNorm", {"normalized_shape": [6]}, ROWS),
    ("GroupNorm", {"num_groups": 3, "num_channels": 6}, IMAGES),
    ("InstanceNorm2d", {"num_features": 6, "affine": True}, IMAGES),
    ("InstanceNorm2d", {"num_features": 6, "affine": True, "track_running_stats": True}, IMAGES),
    ("InstanceNorm1d", {"num_features": 6, "track_running_stats": True}, (2, 6, 9)),
    ("BatchNorm3d", {"num_features": 3}, (2, 3, 4, 5, 6)),
    ("Upsample", {"scale_factor": 2}, IMAGES),
    ("Upsample", {"size": (9, 4), "mode": "bilinear", "align_corners": True}, IMAGES),
    ("PixelShuffle", {"upscale_factor": 2}, (2, 8, 3, 5)),
    ("ZeroPad2d", {"padding": (1, 2, 0, 3)}, IMAGES),
    ("ReflectionPad2d", {"padding": 2}, IMAGES),
    ("ReplicationPad2d", {"padding": (1, 0, 2, 1)}, IMAGES),
    ("ConstantPad2d", {"padding": 1, "value": 2.5}, IMAGES),
    ("AdaptiveMaxPool2d", {"output_size": 2}, (2, 3, 4, 6)),
    ("Dropout2d", {"p": 0.0}, IMAGES),
    ("Dropout1d", {"p": 0.0}, (2, 6, 9)),
    ("Dropout3d", {"p": 0.0}, VOLUMES),
    ("ZeroPad1d", {"padding": (1, 2)}, (2, 6, 9)),
    ("ZeroPad3d", {"padding": (1, 2, 0, 3, 2, 1)}, VOLUMES),
    ("ConstantPad1d", {"padding": 1, "value": 2.5}, (2, 6, 9)),
    ("ConstantPad3d", {"padding": 1, "value": 2.5}, VOLUMES),
    ("ReflectionPad1d", {"padding": 2}, (2, 6, 9)),
    ("ReflectionPad3d", {"padding": (1, 2, 0, 3, 2, 1)}, VOLUMES),
    ("ReplicationPad1d", {"padding": (2, 0)}, (2, 6, 9)),
    ("ReplicationPad3d", {"padding": 1}, VOLUMES),
    ("MaxPool3d", {"kernel_size": 2, "stride": 1, "ceil_mode": True}, VOLUMES),
    ("AvgPool3d", {"kernel_size": (2, 3, 2), "padding": 1, "count_include_pad": False}, VOLUMES),
    ("AdaptiveAvgPool3d", {"output_size": (2, None, 1)}, VOLUMES),
    ("AdaptiveMaxPool3d", {"output_size": 2}, VOLUMES),
    ("Upsample", {"scale_factor": 2, "mode": "trilinear"}, VOLUMES),
    (
        "Conv2d",
        {"in_channels": 6, "out_channels": 3, "kernel_size": 3, "padding": (1, 2), "padding_mode": "reflect"},
        IMAGES,
    ),
    (
        "Conv1d",
        {"in_channels": 6, "out_channels": 3, "kernel_size": 3, "padding": 2, "padding_mode": "circular"},
        (2, 6, 9),
    ),
]
LOSSES = [
    ("MSELoss", {}, None),
    ("L1Loss", {"reduction": "sum"}, None),
    ("SmoothL1Loss", {"beta": 0.3}, None),
    ("HuberLoss", {"delta": 0.3}, None),
    ("KLDivLoss", {"reduction": "batchmean"}, None),
    ("BCELoss", {"weight": (6,)}, None),
    ("BCEWithLogitsLoss", {"pos_weight": (6,)}, None),
    ("NLLLoss", {"weight": (6,), "ignore_index": 2}, 6),
    ("CrossEntropyLoss", {"weight": (6,), "label_smoothing": 0.1}, 6),
    ("CrossEntropyLoss", {"reduction": "none"}, None),
]


class Sixths(torch.nn.Module):
    """Hardsigmoid and Hardswish. torch's have a float32 for 1/6: on a GPU in values, too."""

    def __init__(self, swish):
        super().__init__()
        self.swish = swish

    def forward(self, x):
        sixths = torch.nn.functional.relu6(x + 3)
        return (x * sixths if self.swish else sixths) / 6


ON_A_GPU = {"Hardsigmoid": partial(Sixths, False), "Hardswish": partial(Sixths, True)}


def numbers(*shape):
    return torch.rand(shape, dtype=torch.float64).to(default_device())


def agree(ours, theirs, *inputs):
    """Values, gradients of floating inputs and of parameters, on the same numbers."""
    theirs = theirs.to(inputs[0].device, torch.float64)
    ours.to(dtype=torch.float64)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    given = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    mine = [Tensor(t.detach().clone(), t.is_floating_point()) for t in inputs]
    # inplace=True is for results of operations, not for leaves.
    with warnings.catch_warnings(action="ignore"):
        expected = theirs(given[0] * 1.0, *given[1:])
        value = ours(mine[0] * 1.0, *mine[1:])
    torch.testing.assert_close(value.data, expected.detach(), rtol=1e-12, atol=1e-12)
    dy = torch.rand_like(expected)
    expected.backward(dy)
    value.backward(Tensor(dy))
    pairs = [*zip(mine, given, strict=True), *zip(ours.parameters(), theirs.parameters(), strict=True)]
    for own, other in pairs:
        if other.grad is not None:  # torch's hardsigmoid has a float32 for 1/6
            torch.testing.assert_close(own.grad.data, other.grad, rtol=1e-7, atol=1e-11)
    for own, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "options", "shape"), LAYERS, ids=lambda v: v if isinstance(v, str) else "")
def test_layers(name, options, shape):
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name) if launch.INTERPRETED else ON_A_GPU.get(name, getattr(torch.nn, name))
    agree(getattr(nn, name)(**options), theirs(**options), numbers(*shape) * 4 - 2)


@pytest.mark.parametrize(("name", "options", "classes"), LOSSES, ids=lambda v: v if isinstance(v, str) else "")
def test_losses(name, options, classes):
    torch.manual_seed(0)
    options = {k: numbers(*v) + 0.5 if isinstance(v, tuple) else v for k, v in options.items()}
    target = numbers(*ROWS) if classes is None else torch.randint(classes, ROWS[:1]).to(default_device())
    agree(getattr(nn, name)(**options), getattr(torch.nn, name)(**options), numbers(*ROWS), target)


def test_embedding():
    torch.manual_seed(0)
    x = torch.randint(7, (3, 4)).to(default_device())
    theirs = torch.nn.Embedding(7, 5, padding_idx=2).to(x.device)
    ours = nn.Embedding(7, 5, padding_idx=2)
    ours.load_state_dict(theirs.state_dict())
    assert not ours.weight.data[2].any()
    theirs(x).square().sum().backward()
    (ours(Tensor(x)) ** 2).sum().backward()
    torch.testing.assert_close(ours.weight.grad.data, theirs.weight.grad)
    table = nn.Embedding.from_pretrained(theirs.weight.detach())
    assert not table.weight.requires_grad
    assert torch.equal(table(Tensor(x)).data, theirs.weight.detach()[x])


def test_arguments_have_torchs_names_and_order():
    other = {"Module", "Parameter", "Sequential"}  # a base, a wrapper, and one that takes modules
    for name in set(nn.__all__) - other:
        if not inspect.isclass(getattr(torch.nn, name, None)):
            continue
        ours, theirs = (inspect.signature(getattr(kit, name).__init__).parameters for kit in (nn, torch.nn))
        named, ours = set(ours), [n for n, p in ours.items() if p.kind != p.KEYWORD_ONLY]
        theirs = list(theirs)
        assert "kwargs" in theirs or ours == theirs[: len(ours)], f"{name}: {ours}, torch has {theirs}"
        # The older names of Hardtanh's limits; a newer torch lets norms go without a bias.
        assert "kwargs" in theirs or set(theirs) - named <= {"min_value", "max_value", "bias"}, name


def test_inplace_changes_the_input_as_torchs_does():
    torch.manual_seed(0)
    x, block = numbers(3, 4) - 0.5, nn.Linear(4, 4, dtype=torch.float64)
    theirs = torch.nn.Linear(4, 4).double().to(x.device)
    block.load_state_dict(theirs.state_dict())

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.act = block, nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.block(x)
            return self.act(y) + y  # 2 relu(y)

    for fused in (True, False):
        theirs.zero_grad()
        block.zero_grad()
        with fusion(fused):
            value = Residual()(Tensor(x))
            y = theirs(x)
            expected = torch.relu_(y) + y
            torch.testing.assert_close(value.data, expected.detach())
            value.sum().backward()
            expected.sum().backward()
        torch.testing.assert_close(block.weight.grad.data, theirs.weight.grad)
    leaf = Tensor(x, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradient is recorded cannot be changed in place"):
        ops.relu(leaf, inplace=True)
    with no_grad():
        assert ops.relu(leaf, inplace=True).data.min() >= 0


def test_lists_and_dictionaries_of_modules():
    layers = nn.ModuleList([nn.Linear(2, 3), nn.ReLU()])
    layers.append(nn.Linear(3, 4)).extend([nn.Tanh()])
    layers.insert(1, nn.Identity())
    assert [name for name, _ in layers.named_children()] == ["0", "1", "2", "3", "4"]
    assert [*layers.state_dict()] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert type(layers[1:3]) is nn.ModuleList
    assert layers[-1] is layers[4]
    del layers[1]
    layers[1] = nn.Sigmoid()
    assert [type(m).__name__ for m in layers] == ["Linear", "Sigmoid", "Linear", "Tanh"]
    named = nn.ModuleDict({"a": nn.Linear(2, 3)})
    named["b"] = nn.ReLU()
    assert list(named) == ["a", "b"]
    assert "a" in named
    assert [*named.state_dict()] == ["a.weight", "a.bias"]
    for bad in (lambda: nn.ModuleList([ops.relu]), lambda: named.update({"c": 1})):
        with pytest.raises(TypeError, match="expected a Module"):
            bad()
    chain = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    assert isinstance(chain[1:], nn.Sequential)
    assert [*chain[1:].state_dict()] == ["2.weight", "2.bias"]  # torch keeps the names, too
    chain[-1] = nn.Linear(3, 1)
    assert chain.append(nn.Tanh())(Tensor(torch.ones(5, 2).to(default_device()))).shape == (5, 1)
    assert [*chain.state_dict()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    with pytest.raises(TypeError, match="Sequential: '1' is"):
        chain[1] = ops.relu


@pytest.mark.parametrize("kind", ["Sequential", "ModuleList"])
def test_lists_of_modules_change_as_torchs(kind):
    def changed(home):
        def layer(size):
            return home.Linear(size, size)

        chain = home.Sequential(layer(1), layer(2)) if kind == "Sequential" else home.ModuleList([layer(1), layer(2)])
        chain.insert(1, layer(3))
        chain.insert(1, layer(4))
        chain.insert(len(chain), layer(5))
        chain.extend([layer(6), layer(7), layer(8)])
        del chain[0], chain[-3:-1]
        popped = chain.pop(1)
        assert chain.append(layer(9)) is chain
        return popped.in_features, [(name, m.in_features) for name, m in chain.named_children()]

    assert changed(nn) == changed(torch.nn)
    chain = getattr(nn, kind)()
    for change in (chain.append, lambda value: chain.extend([nn.ReLU(), value]), lambda value: chain.insert(0, value)):
        with pytest.raises(TypeError, match=f"{kind}: '?[01]'? is .*expected a Module"):
            change(ops.relu)
    assert len(chain) == 0


def test_modules_do_what_torchs_do():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
    assert [name for name, _ in model.named_children()] == ["0", "1"]
    assert model.get_submodule("1.0") is model[1][0]
    assert [*model.parameters(recurse=False)] == []
    seen = []
    model.apply(lambda m: seen.append(type(m).__name__))
    assert seen == ["Linear", "ReLU", "Linear", "Sequential", "Sequential"]
    assert model.double()[0].weight.dtype == torch.float64
    assert model.half()[0].weight.dtype == torch.float16
    assert model.float().cpu()[0].weight.dtype == torch.float32
    x = Tensor(numbers(4, 2).float())
    model.to(default_device())(x).sum().backward()
    model.zero_grad(set_to_none=False)
    assert not any(p.grad.data.any() for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    if not torch.cuda.is_available():
        for call in (model.cuda, lambda: nn.Linear(2, 3, device="cuda"), lambda: zeros(3, device="cuda")):
            with pytest.raises(RuntimeError, match="leave the device out, or use 'cpu'"):
                call()


def test_hooks_see_and_change_what_a_module_takes_and_gives():
    model, calls = nn.Sequential(nn.Identity()), []
    before = model.register_forward_pre_hook(lambda m, args: (args[0] * 2.0,))
    with model.register_forward_hook(lambda m, args, result: calls.append(args[0].item()) or result + 1.0):
        assert model(ones(1)).item() == 3
    before.remove()
    assert calls == [2.0]
    assert model(ones(1)).item() == 1


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_gradients_are_clipped_as_torch_clips_them(norm_type):
    torch.manual_seed(0)
    values = [numbers(3, 4), numbers(5)]
    for most in (0.5, 1e6):
        theirs = [torch.nn.Parameter(v.clone()) for v in values]
        ours = [nn.Parameter(v.clone()) for v in values]
        for own, other, value in zip(ours, theirs, values, strict=True):
            own.grad, other.grad = Tensor(value.clone()), value.clone()
        expected = torch.nn.utils.clip_grad_norm_(theirs, most, norm_type)
        torch.testing.assert_close(nn.utils.clip_grad_norm_(ours, most, norm_type).data, expected)
        torch.nn.utils.clip_grad_value_(theirs, 0.1)
        nn.utils.clip_grad_value_(ours, 0.1)
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own.grad.data, other.grad)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.Relu, AttributeError, "minidl.nn has no Relu; did you mean ReLU?"),
        (lambda: nn.Bilinear, AttributeError, r"minidl.nn has no Bilinear; write Linear\(in1 \* in2, out\)"),
        (lambda: nn.functional.cros_entropy, AttributeError, "did you mean cross_entropy?"),
        (lambda: nn.Linear(2, 3, baias=False), TypeError, "Linear: there is no argument 'baias'; did you mean bias?"),
        (lambda: ops.relu(Tensor(torch.ones(1)), inplase=True), TypeError, "'inplase'; did you mean inplace?"),
        (lambda: nn.Linear(2, 3).wieght, AttributeError, "Linear has no attribute 'wieght'; did you mean weight?"),
        (lambda: nn.Linear(2, 3)(Tensor(torch.ones(4, 5))), ValueError, r"^Linear: input has shape \[4, 5\]"),
        (lambda: nn.BatchNorm2d(3)(Tensor(torch.ones(4, 5))), ValueError, "^BatchNorm2d: input has shape"),
        (
            lambda: nn.Conv2d(2, 3, 3, padding_mode="mirror"),
            ValueError,
            "padding_mode is 'mirror', expected one of zeros",
        ),
    ],
)
def test_what_is_not_there_is_told_with_the_nearest_thing(call, error, message):
    with pytest.raises(error, match=message.replace("?", r"\?")):
        call()
