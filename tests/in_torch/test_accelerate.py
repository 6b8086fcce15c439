"""An accelerated model of torch is torch's model: its results, gradients, and all that is done with modules."""

import copy
import io
import logging
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import minidl.torch as mt
from minidl.runtime import launch
from minidl.runtime.launch_cache import replay
from minidl.testing import error_bound
from minidl.torch import layers, measuring
from tests.pages import blocks

ROOT = Path(__file__).parents[2]


class Residual(nn.Module):
    """As torchvision's BasicBlock."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Residual(4, 4, 1), Residual(4, 6, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.0), nn.Linear(5, 3))

    def forward(self, x):
        return self.head(self.pool(self.blocks(self.stem(x))))


def _pair(model, device):
    torch.manual_seed(0)
    theirs = model().double().to(device)
    ours = mt.accelerate(copy.deepcopy(theirs))
    return ours, theirs, torch.randn(3, 3, 9, 8, dtype=torch.float64, device=device)


@pytest.fixture
def pair(device):
    """The same model twice, the first one accelerated; in float64, in training, on an image."""
    return _pair(Net, device)


@pytest.fixture
def small(device):
    """The same of a smaller model, which does not take as long to trace."""
    return _pair(lambda: nn.Sequential(Residual(3, 4, 2), nn.AvgPool2d(2), nn.Flatten(1), nn.Linear(16, 3)), device)


def _close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def _same(ours, theirs, x, call=lambda model, x: model(x)):
    """Results, gradients and buffers of a call are the same."""
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    results = [call(model, each) for model, each in zip((ours, theirs), inputs, strict=True)]
    _close(*results)
    for y in results:
        y.square().sum().backward()
    _close(inputs[0].grad, inputs[1].grad)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        _close(one.grad, other.grad)
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert one.shape == other.shape, name
        _close(one, other)


def test_training_evaluation_and_channels_last(pair):
    ours, theirs, x = pair
    _same(ours, theirs, x)
    _same(ours, theirs, x.contiguous(memory_format=torch.channels_last))
    _same(ours.eval(), theirs.eval(), x)
    with torch.no_grad():
        _close(ours(x), theirs(x))
    with torch.inference_mode():
        _close(ours(x), theirs(x))
        _close(ours.train()(x), theirs.train()(x))
    _same(ours, theirs, x)


def test_volumes_and_sequences(device):
    ours, theirs, _ = _pair(
        lambda: nn.Sequential(
            nn.ConvTranspose3d(2, 3, 3, 2, 1, 1), nn.MaxPool3d(3, 2, 1), nn.Upsample(None, 1.5, "trilinear"),
            nn.AvgPool3d((2, 1, 3), 1, ceil_mode=True), nn.AdaptiveAvgPool3d((2, None, 1)), nn.Flatten(3),
            nn.Upsample((5, 3), mode="bicubic"),
        ),
        device,
    )  # fmt: skip
    assert {line.how for line in mt.report(ours) if line.module and line.kind != "Flatten"} == {"operator"}
    x = torch.randn(2, 2, 3, 4, 3, dtype=torch.float64, device=device)
    _same(ours, theirs, x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}])
def test_recurrent_layers(device, kind, options):
    """Padded and packed sequences, one sequence, states that are passed, evaluation, and what torch computes."""
    ours, theirs, _ = _pair(lambda: kind(3, 4, **options), device)
    x = torch.randn(5, 2, 3, dtype=torch.float64, device=device)
    ragged = [torch.randn(n, 3, dtype=torch.float64, device=device) for n in (2, 5, 3)]
    packed = nn.utils.rnn.pack_sequence(ragged, enforce_sorted=False)
    shape = (1, 5, 4) if "batch_first" in options else (4, 2, 4)
    states = torch.randn(*shape, dtype=torch.float64, device=device)
    states = (states, states) if kind is nn.LSTM else states
    launched = []
    for arguments in ((x,), (packed,), (x[0],), (x, states)):
        gradients = []
        for model in (ours, theirs):
            with launch.watch(lambda kernel, grid, args, meta, go: (launched.append(kernel), go())):
                y, last = model(*arguments)
            results = [y.data if isinstance(y, tuple) else y, *(last if isinstance(last, tuple) else [last])]
            assert type(y) is type(arguments[0])
            loss = sum(each.square().sum() for each in results)
            gradients.append([*results, *torch.autograd.grad(loss, list(model.parameters()))])
        for one, other in zip(*gradients, strict=True):
            _close(one, other)
        assert launched
        launched.clear()
        with torch.no_grad():
            _close(ours(*arguments)[0][0], theirs(*arguments)[0][0])
    _close(ours(x, hx=states)[0], theirs(x, hx=states)[0])
    stored = io.BytesIO()
    torch.save(ours, stored)  # noqa: TID251 (as users do)
    stored.seek(0)
    for twin in (mt.restore(copy.deepcopy(ours)), torch.load(stored, weights_only=False)):  # noqa: TID251
        _close(twin(x)[0], theirs(x)[0])
    _close(torch.compile(ours, backend="aot_eager")(x)[0], theirs(x)[0])
    (gradient,) = torch.autograd.grad(ours(x.requires_grad_())[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    projected = mt.accelerate(nn.LSTM(3, 4, proj_size=2).to(device))
    assert mt.report(projected)[0].note == "proj_size"


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Conv2d(3, 4, 3), {"input": (2, 3, 5, 5)}),
        (lambda: nn.Linear(3, 4), {"input": (2, 3)}),
        (lambda: nn.GRU(3, 4), {"hx": (1, 2, 4), "input": (5, 2, 3)}),
    ],
)
def test_inputs_by_name_take_the_operator(device, make, inputs):
    ours, theirs, _ = _pair(make, device)
    tensors = {name: torch.randn(shape, dtype=torch.float64, device=device) for name, shape in inputs.items()}
    launched = []
    with launch.watch(lambda kernel, grid, args, meta, go: (launched.append(kernel), go())):
        y = ours(**tensors)
    assert launched
    y, expected = (each[0] if isinstance(each, tuple) else each for each in (y, theirs(**tensors)))
    _close(y, expected)
    with pytest.raises(TypeError, match="unexpected keyword argument 'images'"):
        ours(images=tensors["input"])


def test_a_missing_target_by_name_is_torchs_error(device):
    x = torch.randn(2, 3, device=device)
    errors = []
    for loss in (mt.accelerate(nn.CrossEntropyLoss()), nn.CrossEntropyLoss()):
        with pytest.raises(TypeError) as error:
            loss(input=x, target=None)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_results_do_not_depend_on_the_batch(device):
    torch.manual_seed(0)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3, 2),
        nn.GroupNorm(2, 6), nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10),
    ).eval()  # fmt: skip
    linears = nn.Sequential(nn.Linear(37, 300), nn.Tanh(), nn.Linear(300, 300), nn.LayerNorm(300), nn.Linear(300, 7))
    for model, shape in ((convolutions, (3, 11, 10)), (linears, (37,))):
        mt.accelerate(model.to(device))
        x = torch.randn(17, *shape, device=device)
        with mt.batch_invariant():
            every = model(x)
            for count in (1, 3, 8):
                assert torch.equal(model(x[-count:]), every[-count:])
            assert model(x[:0]).shape == (0, every.shape[1])
        torch.testing.assert_close(every, mt.restore(model)(x), rtol=1e-4, atol=1e-5)
        every.sum().backward()
        with mt.batch_invariant(), pytest.raises(ValueError, match="may depend on the batch"):
            model(x)  # torch's
    with mt.batch_invariant(), pytest.raises(ValueError, match="minidl::batch_norm may depend"):
        mt.accelerate(convolutions).train()(torch.randn(2, 3, 11, 10, device=device))


def test_the_report_names_each_layer_and_why_others_stay(device):
    class Odd(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(),
        Odd(5, 5),
    ).to(device)  # fmt: skip
    lines = {line.module: line for line in mt.report(mt.accelerate(model))}
    assert lines["0"].how == "torch"
    assert "circular" in lines["0"].note
    assert lines["1"].how == lines["2"].how == "operator"
    assert "subclass of Linear" in lines["4"].note
    assert "operator: 2" in str(mt.report(model))


def test_the_report_of_attention_says_what_torch_computes(device):
    model = nn.TransformerEncoderLayer(8, 2, 16).to(device)
    lines = {line.module: line for line in mt.report(mt.accelerate(model))}
    assert (lines["self_attn"].kind, lines["self_attn"].how) == ("MultiheadAttention", "torch")
    assert lines["self_attn"].note == "no operator: torch projects its inputs and computes the attention"
    assert lines["self_attn.out_proj"].how == "torch"
    assert lines["linear1"].how == "operator"


def test_the_report_of_a_model_that_is_not_accelerated_says_so(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    for _ in range(2):
        (line,) = mt.report(model)
        assert (line.how, line.note) == ("torch", "not accelerated: call minidl.torch.accelerate first")
        assert "not accelerated" in str(mt.report(model))
        assert [line.how for line in mt.report(mt.accelerate(model)[0])][:1] == ["operator"]
        mt.restore(model)


def test_layers_of_which_torch_is_known_to_be_faster_stay_torchs_unless_they_are_timed(device):
    model = nn.Sequential(nn.Conv3d(64, 32, 2), nn.Conv3d(32, 8, 2), nn.Flatten(), nn.Linear(256, 256)).to(device)
    assert [line.how for line in mt.report(mt.accelerate(model))][:2] == ["torch", "operator"]
    assert "0.74" in str(mt.report(model))
    if device.type == "cpu":  # where no time says anything
        x = torch.randn(1, 64, 4, 6, 6, device=device)
        assert mt.report(mt.accelerate(model, x))[0].how != "torch"
    few, many = (torch.randn(rows, 256, device=device, requires_grad=True) for rows in (3, 32))
    assert "Addmm" in str(model[3](few).grad_fn)
    assert "linear" in str(model[3](many).grad_fn)


def test_sums_after_blocks_and_changes_in_place_keep_their_order(device):
    class Tricky(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.b(self.a(x))
            x = x.clone()
            z = y * 1
            x.mul_(2)
            return F.relu(y + x) + z

    class Changed(Tricky):
        def forward(self, x):
            x = x * 1
            y = self.b(self.a(x))
            x.mul_(2)
            return F.relu(y + x)

    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, device=device)
    theirs = Tricky().double().to(device)
    _same(mt.accelerate(copy.deepcopy(theirs)), theirs, x)
    theirs = Changed().double().to(device)
    with torch.no_grad():
        _close(mt.accelerate(copy.deepcopy(theirs))(x), theirs(x))


def test_transposed_convolutions_sequences_and_volumes(device):
    for theirs, shape in (
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 2, 3)),
        (nn.Sequential(nn.ConvTranspose1d(4, 2, 2), nn.SiLU()), (2, 4, 3)),
        (nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.LeakyReLU(0.2)), (2, 3, 5)),
        (nn.Sequential(nn.Conv3d(2, 2, 2), nn.BatchNorm3d(2), nn.Tanh(), nn.AvgPool3d(1)), (2, 2, 3, 3, 2)),
        (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3), nn.GELU(), nn.Softmax(-1)), (2, 4)),
        (nn.Sequential(nn.GroupNorm(2, 4), nn.AvgPool2d(2), nn.InstanceNorm2d(4)), (2, 4, 4, 4)),
    ):  # fmt: skip
        theirs = theirs.double().to(device)
        ours = mt.accelerate(copy.deepcopy(theirs))
        assert any(isinstance(m, layers.Layer) for m in ours.modules())
        x = torch.randn(shape, dtype=torch.float64, device=device)
        _same(ours, theirs, x)
        with torch.no_grad():
            _close(ours.eval()(x), theirs.eval()(x))


ACTIVATIONS = {
    "relu": nn.ReLU(), "relu6": nn.ReLU6(), "leaky_relu": nn.LeakyReLU(0.2), "elu": nn.ELU(0.5), "silu": nn.SiLU(),
    "mish": nn.Mish(), "hardswish": nn.Hardswish(), "hardsigmoid": nn.Hardsigmoid(), "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"),
}  # fmt: skip


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_fused_layer_computes_the_activation(name, inplace, device, caplog):
    act = copy.deepcopy(ACTIVATIONS[name])
    if inplace and not hasattr(act, "inplace"):
        pytest.skip("torch's has no such setting")
    act.inplace = inplace
    theirs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), act).double().to(device)
    ours, x = copy.deepcopy(theirs), torch.randn(2, 3, 6, 6, dtype=torch.float64, device=device)
    for training in (True, False):
        torch._dynamo.reset()
        with caplog.at_level(logging.INFO, "minidl.torch.fusion"), torch.set_grad_enabled(training):
            results = torch.compile(ours.train(training), backend=mt.backend)(x), theirs.train(training)(x)
        # On a GPU torch takes 1 / 6 in float32.
        torch.testing.assert_close(*results, rtol=1e-7 if name in ("hardswish", "hardsigmoid") else 1e-9, atol=1e-10)
    assert [f"1 convolution + batch norm + {name};" in line for line in caplog.messages] == [True, True]


def test_replayed_batch_norms_read_statistics_and_weights_at_each_call(device):
    theirs = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).double().to(device).eval()
    ours = mt.accelerate(copy.deepcopy(theirs))
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, device=device)
    with torch.no_grad(), replay.replaying(True, at_once=True):
        for _ in range(4):
            _close(ours(x), theirs(x))
            for model in (ours, theirs):
                model[1].running_mean += 1
                model[1].running_var.data.mul_(2)
                model[1].weight.data.add_(0.5)


def test_state_dicts_copies_pickles_and_restore(pair):
    ours, theirs, x = pair
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    twin = copy.deepcopy(ours)
    assert isinstance(twin.stem[0], layers.CLASSES[nn.Conv2d])
    assert twin.stem[0].weight is not ours.stem[0].weight
    _same(twin, copy.deepcopy(theirs), x)
    file = io.BytesIO()
    torch.save(ours, file)  # noqa: TID251 (a user's)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)  # noqa: TID251
    assert type(loaded) is Net
    assert type(loaded.stem[0]) is nn.Conv2d
    assert mt.restore(ours) is ours
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(ours.modules(), theirs.modules(), strict=True))
    assert all(p.is_contiguous() for p in ours.parameters())
    _same(ours, theirs, x)


def test_hooks_are_called_also_those_within_a_block(pair):
    ours, theirs, x = pair
    seen = []
    for model in (ours, theirs):
        model.blocks[0].bn1.register_forward_hook(lambda m, args, y: seen.append(y.detach()))
        model.blocks[0].relu.register_forward_hook(lambda m, args, y: y * 2)
        model.stem[2].register_full_backward_hook(lambda m, dx, dy: (dx[0] * 2,))
    _same(ours, theirs, x)
    _close(seen[0], seen[1])
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(m))
    ours(x)
    handle.remove()
    assert ours.blocks[1].bn2 in seen


def test_modules_that_are_replaced_later(pair):
    ours, theirs, x = pair
    for model in (ours, theirs):
        torch.manual_seed(1)
        model.blocks[0].bn1 = nn.Identity()
        model.head[4] = nn.Linear(5, 2).double().to(x.device)
        model.blocks[1].conv2 = nn.Conv2d(6, 6, 3, padding=1).double().to(x.device)
    _same(ours, theirs, x)


def test_a_call_that_a_trace_does_not_know_goes_to_the_modules_own_forward(device):
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.times = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), 2.0

        def forward(self, x):
            if isinstance(x, torch.Tensor):
                x = [x, x]
            y = F.relu(self.norm(self.conv(torch.cat(x))))
            return y * self.times if self.times > 1 else y

    class Training(Asking):
        def forward(self, x):
            y = self.norm(self.conv(x))
            return F.relu(y) if self.training else y

    class Optional(Asking):
        def forward(self, x, mask=None):
            y = F.relu(self.norm(self.conv(x)))
            return y if mask is None else y * mask

    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, device=device)
    for kind, argument in ((Asking, x), (Asking, [x, x]), (Training, x), (Optional, x)):
        theirs = kind().double().to(device)
        ours = mt.accelerate(copy.deepcopy(theirs))
        for change in (lambda m: None, lambda m: m.eval(), lambda m: setattr(m, "times", 0.5)):
            for model in (ours, theirs):
                change(model)
            _close(ours(argument), theirs(argument))


def test_functional_call_gradients_of_functions_and_checkpoints(pair):
    ours, theirs, x = pair
    values = {name: p.detach() * 1.5 for name, p in theirs.named_parameters()}
    _close(torch.func.functional_call(ours, values, x), torch.func.functional_call(theirs, values, x))

    def loss(model, values):
        return torch.func.functional_call(model, values, x).square().sum()

    ours.eval(), theirs.eval()
    gradients = [torch.func.grad(lambda v, m=model: loss(m, v))(values) for model in (ours, theirs)]
    for name in values:
        _close(gradients[0][name], gradients[1][name])
    _same(
        ours,
        theirs,
        x,
        lambda model, x: model.head(model.pool(checkpoint(model.blocks, model.stem(x), use_reentrant=False))),
    )


def test_autocast_and_a_gradient_scaler(device):
    """float16 and bfloat16: dtypes of results and gradients are torch's; on a CPU torch computes bfloat16."""
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        theirs = Net().to(device)
        ours = mt.accelerate(copy.deepcopy(theirs))
        x = torch.randn(4, 3, 8, 8, device=device)
        seen = []
        for model in (ours, theirs):
            model.stem[3].register_forward_hook(lambda m, args, y, to=seen: to.append((y.dtype, y.shape)))
            with torch.autocast(device.type, dtype):
                y = model(x)
                loss = F.cross_entropy(y, torch.zeros(4, dtype=torch.int64, device=device))
            scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
            scaler.scale(loss).backward()
            seen.append((y.dtype, loss.dtype, {p.grad.dtype for p in model.parameters()}))
        assert seen[:2] == seen[2:]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_within_the_bounds_of_its_dtype(device, dtype):
    """Results within the bounds of specs, gradients within those of their additions, for values cast by autocast."""
    torch.manual_seed(0)
    x, image = torch.randn(6, 9, device=device), torch.randn(2, 3, 5, 4, device=device)
    linear, conv = nn.Linear(9, 4).to(device), nn.Conv2d(3, 4, 3, padding=1).to(device)
    calls = (linear, x, "linear", F.linear, {}), (conv, image, "conv2d", F.conv2d, {"padding": 1})
    for layer, input, name, exact, options in calls:
        mt.accelerate(layer)
        with torch.autocast(device.type, dtype):
            y = layer(input)
        low = [t.detach().to(dtype) for t in (input, layer.weight, layer.bias)]
        bound = error_bound(name, *low, **options)
        assert y.dtype == dtype
        assert bool(((y - exact(*(t.double() for t in low), **options)).abs() <= bound).all())
        dy = torch.randn(y.shape, device=device).to(dtype)
        y.backward(dy)
        places = dy.numel() // dy.shape[1]

        def gradient(x, dy, kind=layer, options=options, exact=exact):
            weight = torch.zeros_like(kind.weight, dtype=x.dtype).requires_grad_()
            return torch.autograd.grad(exact(x, weight, **options), weight, dy, create_graph=True)[0]

        bound = error_bound(gradient, (low[0], dy), reference=gradient, depth=places + 1)
        expected = gradient(low[0].double(), dy.double())
        assert bool(((layer.weight.grad - expected).abs() <= bound).all())


def test_compiled_in_one_graph(small):
    ours, theirs, x = small
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    _same(ours, theirs, x, lambda model, x: (compiled if model is ours else model)(x))


def test_compiled_for_any_batch(small):
    ours, theirs, x = small
    compiled = torch.compile(ours.eval(), fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for each in (x, x[:2]):
            _close(compiled(each), theirs.eval()(each))


def test_exported(small):
    ours, theirs, x = small
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(ours.eval(), (x,), dynamic_shapes=({0: batch},))
    assert any("minidl.convolution" in str(node.target) for node in program.graph.nodes)
    with torch.no_grad():
        _close(program.module()(x[:2]), theirs.eval()(x[:2]))


def _critic_step(critic, real, generated):
    """A step of a critic with gradient penalty (Gulrajani et al., arXiv 1704.00028); returns loss and penalty."""
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    between = (0.3 * real + 0.7 * generated).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).square().sum(1).sqrt() - 1).square().mean()
    loss = critic(generated).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach(), penalty.detach()


@pytest.mark.parametrize("training", [True, False])
def test_critics_with_a_gradient_penalty_train_as_torchs(device, training):
    ours, theirs, real = _pair(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.ConvTranspose2d(4, 3, 2, groups=1),
            nn.Tanh(), nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Flatten(), nn.Linear(72, 5),
            nn.SiLU(), nn.Linear(5, 1),
        ).train(training),
        device,
    )  # fmt: skip
    generated = torch.randn_like(real)
    for _ in range(3):
        results = [_critic_step(model, real, generated) for model in (ours, theirs)]
        _close(*map(torch.stack, results))
    for one, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        _close(one, other)


def test_second_derivatives_are_refused_and_wrong_use_is_told(pair):
    ours, _, x = pair
    x.requires_grad_()
    (dx,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="restore"):
        dx.sum().backward()
    weight = x.new_ones(x.shape[-1], requires_grad=True)
    y = mt.layer_norm(x, x.shape[-1], weight)
    _, dw = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
    with pytest.raises(NotImplementedError, match="restore"):  # of the second result alone
        dw.sum().backward()
    with pytest.raises(TypeError, match=r"torch.nn.Module"):
        mt.accelerate(object())


def test_wrapped_by_ddp_and_fsdp(pair):
    """DDP wraps an accelerated model, and accelerate follows or precedes FSDP."""
    ours, theirs, x = pair
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(ours)
        _same(ours, copy.deepcopy(theirs), x, lambda model, x: (wrapped if model is ours else model)(x))
        sharded, mesh = copy.deepcopy(theirs), init_device_mesh(x.device.type, (1,))
        fully_shard(sharded.blocks[0], mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        assert any(line.how == "operator" for line in mt.report(mt.accelerate(sharded)))
        results = [model(x) for model in (sharded, theirs)]
        _close(*results)
        for y in results:
            y.square().sum().backward()
        for one, other in zip(sharded.parameters(), theirs.parameters(), strict=True):
            _close(one.grad.full_tensor(), other.grad)
    finally:
        dist.destroy_process_group()


def test_equal_bits_from_run_to_run(pair):
    ours, _, x = pair
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in "ab":
            model = copy.deepcopy(ours)
            y = model(x)
            y.square().sum().backward()
            z = model.eval()(x)
            z.square().sum().backward()
            results.append([y, z, *(p.grad for p in model.parameters()), *model.buffers()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_a_cuda_graph_of_a_training_step_is_the_step(pair):
    ours, _, x = pair
    twin = copy.deepcopy(ours)

    def step(model):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return y

    for _ in range(4):  # three before the capture, and the step that is captured, which runs when it is replayed
        y = step(twin)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(ours)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = step(ours)
    graph.replay()
    assert torch.equal(captured, y)
    for a, b in zip((*ours.parameters(), *ours.buffers()), (*twin.parameters(), *twin.buffers()), strict=True):
        assert torch.equal(a, b)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_with_an_example_what_is_slower_stays_torchs(monkeypatch, pair):
    """Times are artificial, because those of the interpreter have no meaning."""
    _, theirs, x = pair
    timed = []

    def times(unit, input):
        timed.append(tuple(input.shape))
        return (3.0, 2.0) if input.shape[1] == 6 else (2.1, 2.0) if input.shape[1] == 3 else (1.0, 2.0)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "INTERPRETED", False)
        patch.setattr(measuring, "_times", times)
        ours = mt.accelerate(copy.deepcopy(theirs), x)
    assert (3, 3, 9, 8) in timed
    left = {line.module: line.note for line in mt.report(ours) if line.how == "torch"}
    assert left["blocks.1.conv2"] == left["blocks.1.bn2"] == "torch takes 2.0 us, these 3.0"
    assert left["stem.0"] == "torch takes 2.0 us, these 2.1"
    assert not left.keys() & {"blocks.0.conv1", "blocks.1.conv1", "stem.3"}
    _same(ours, theirs, x)  # also of statistics, which the call with the example has not moved


CHANGES = {
    "longer": lambda m: m.append(nn.Linear(5, 2)),
    "another head": lambda m: setattr(m, "4", nn.Sequential(nn.Linear(2, 2), nn.Tanh())),
    "shorter": lambda m: m.__delitem__(5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_built_otherwise_afterwards(change, device):
    """A trace has fixed what its sequences hold."""
    parts = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2), nn.Linear(2, 5)
    theirs = nn.Sequential(*parts).to(device).eval()
    if change == "another head":
        del theirs[5]
    ours, x = mt.accelerate(copy.deepcopy(theirs)), torch.randn(3, 2, 1, 1, device=device)
    ours(x)
    for model in (ours, theirs):
        torch.manual_seed(0)
        CHANGES[change](model)
        model.to(device).eval()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_what_forward_keeps_is_of_its_own_values(device):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.seen, self.feat = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), [], None

        def forward(self, x):
            self.feat = self.b(self.a(x))
            return self.feat.relu()

    model = mt.accelerate(Keeps().to(device).eval())
    assert model.feat is None
    y = model(torch.randn(1, 2, 2, 2, device=device))
    assert torch.equal(model.feat.relu(), y)


def test_results_written_into_an_input_are_changes(device):
    class Out(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

        def forward(self, x):
            h = x * 1
            y = self.a(h)
            torch.add(h, 1, out=h)
            return self.b(y) + h

    theirs = Out().to(device).double()
    ours, x = mt.accelerate(copy.deepcopy(theirs)), torch.randn(2, 2, 2, 2, device=device, dtype=torch.float64)
    with torch.no_grad():
        _close(ours(x), theirs(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_derivatives_forwards_are_refused(device):
    model = mt.accelerate(nn.Sequential(nn.Linear(4, 3)).to(device))
    x = torch.randn(2, 4, device=device)
    with pytest.raises(NotImplementedError, match=r"forward-mode .* minidl\.torch\.restore"):
        torch.func.jvp(model, (x,), (x,))


def test_the_script_of_the_page_runs(monkeypatch, capsys):
    """With a model of two blocks for ResNet-18, and without a GPU."""
    (script,) = [block.text for block in blocks(ROOT / "docs" / "in-torch.md", "py")]
    assert len(script.strip().splitlines()) <= 20
    vision = types.ModuleType("torchvision")
    vision.models = types.SimpleNamespace(resnet18=lambda num_classes: Net())
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    for old, new in {
        ".cuda()": "", '"cuda"': '"cpu"', "bfloat16": "float16", "224, 224": "8, 8", "(64": "(4", "(100": "(3",
        ', mode="reduce-overhead"': "",
    }.items():  # fmt: skip
        assert old in script
        script = script.replace(old, new)
    exec(script, {})
    assert float(capsys.readouterr().out) < 2
