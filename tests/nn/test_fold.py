"""Batch norms folded into the layers before them, wherever these are called."""

import pytest
import torch

import minidl
from minidl import nn, no_grad, ops, random
from minidl.models import Generator
from minidl.models.resnet import BasicBlock
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device

KIT = {"dtype": torch.float64}


def images(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(default_device())


def drawn(model):
    """A model whose batch norms do something, in evaluation mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for i, name in enumerate(("running_mean", "running_var", "weight", "bias")):
                getattr(module, name).data.copy_(images(module.num_features, seed=i).abs() + 0.5)
    return model.eval()


def conv(channels=3, width=3, **how):
    return nn.Conv2d(channels, width, 3, padding=1, **how, **KIT)


def norm(channels=3, **how):
    return nn.BatchNorm2d(channels, **how, **KIT)


def norms(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]


def folded(model, *inputs, example=False):
    """The norms that stay in a model, whose results stay the same to 12 digits."""
    with no_grad():
        before = model(*inputs)
        assert nn.fold_batch_norms(model, *(inputs if example else ())) is model
        after = model(*inputs)
    for a, b in zip(*((y if isinstance(y, tuple) else (y,)) for y in (after, before)), strict=True):
        torch.testing.assert_close(a.data, b.data, rtol=1e-12, atol=1e-12)
    left = norms(model)
    assert {name.rpartition(".")[0] for name in model.state_dict() if ".running" in name} <= {*left}
    return left


def test_a_folded_batch_norm_of_float16_may_have_a_shift_beyond_float16():
    conv, norm = nn.Conv2d(3, 1, 1, bias=False, dtype=torch.float16), nn.BatchNorm2d(1)
    conv.weight.data.fill_(100.0)
    norm.running_mean.data.fill_(300.0)
    norm.running_var.data.zero_()
    model = nn.Sequential(conv, norm).eval()
    x = Tensor(torch.ones(2, 3, 4, 4, dtype=torch.float16, device=default_device()))
    with no_grad():
        # scale * 300 - shift, both some 94868: what is left is a rounding of them to float32.
        assert nn.fold_batch_norms(model)(x).data.abs().max() <= 94868 * 2.0**-23


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_batch_norms_are_folded_into_the_convolutions_before_them(kind):
    def normed(channels, act=None):
        return drawn(kind(channels, act=act, dtype=torch.float64))

    kit = {"dtype": torch.float64}
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, **kit), normed(8, "relu"), nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(8, 4, 1, bias=False, **kit), normed(4)),
        nn.Conv2d(4, 4, 1, act="relu", **kit), normed(4),
    )  # fmt: skip
    model.eval()
    x = Tensor(images(2, 3, 6, 6))
    with no_grad():
        before = model(x)
        folded = nn.fold_batch_norms(model)
        assert folded is model
        after = folded(x)
    assert [type(layer).__name__ for layer in model] == [
        "FoldedConv2d", "MaxPool2d", "Sequential", "Conv2d", kind.__name__,
    ]  # fmt: skip
    torch.testing.assert_close(after.data, before.data, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="a scale is for inference"):
        model(x)


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norms_are_folded_into_transposed_convolutions(groups):
    norm = drawn(nn.BatchNorm2d(6, act="relu", dtype=torch.float64))
    first = nn.ConvTranspose2d(4, 6, 4, 2, 1, groups=groups, dtype=torch.float64)
    model = nn.Sequential(first, norm, nn.ConvTranspose2d(6, 1, 3, dtype=torch.float64)).eval()
    x = Tensor(images(2, 4, 3, 5))
    with no_grad():
        before = model(x)
        after = nn.fold_batch_norms(model)(x)
    assert [type(layer).__name__ for layer in model] == ["FoldedConvTranspose2d", "ConvTranspose2d"]
    torch.testing.assert_close(after.data, before.data, rtol=1e-12, atol=1e-12)


def block(forward, **layers):
    """A module with these layers and this `forward`."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            for name, layer in layers.items():
                setattr(self, name, layer)

    Block.forward = forward
    return drawn(Block())


def kept_as_attribute(self, x):
    self.seen = self.a(x)
    return self.norm(self.seen)


def through_a_list(self, x):
    for layer, follower in zip(self.layers, self.norms, strict=True):
        x = follower(layer(x)).relu()
    return x


class Halved(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 0.5


class OfAnyShape(nn.Module):
    """Its `forward` cannot be traced without an input."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if x.shape[0] > 1 else x


FOLDED = {
    "attributes": lambda: block(lambda self, x: self.norm(self.a(x)).relu() + x, a=conv(), norm=norm()),
    "other order of names": lambda: block(lambda self, x: self.first(self.z(x)), first=norm(), z=conv()),
    "a residual block": lambda: drawn(
        BasicBlock(3, 6, 2, nn.Sequential(nn.Conv2d(3, 6, 1, 2, **KIT), nn.BatchNorm2d(6)), **KIT).to(**KIT)
    ),
    "blocks in a Sequential": lambda: nn.Sequential(
        FOLDED["attributes"](), FOLDED["a residual block"]()
    ).eval(),
    "a product with a parameter": lambda: block(
        lambda self, x: self.gamma * self.norm(self.a(x)), a=conv(), norm=norm(), gamma=nn.Parameter(images(1, 3, 1, 1))
    ),
    "the batch's size": lambda: block(
        lambda self, x: self.norm(self.a(x)).reshape(x.shape[0], -1).sum(1) / x.size(2), a=conv(), norm=norm()
    ),
    "both called twice": lambda: block(
        lambda self, x: self.norm(self.a(self.norm(self.a(x)).relu())), a=conv(), norm=norm()
    ),
    "two names": lambda: block(lambda self, x: self.norm(self.b(x)), **dict.fromkeys("ab", conv()), norm=norm()),
    "layers in a list": lambda: block(
        through_a_list, layers=nn.Sequential(conv(), conv()), norms=nn.Sequential(norm(), norm(act="relu"))
    ),
    "a list beside attributes": lambda: block(
        lambda self, x: self.norm(next(self.children())(x)), a=conv(), norm=norm()
    ),
    "a module that cannot be traced before": lambda: drawn(nn.Sequential(OfAnyShape(nn.ReLU()), conv(), norm())),
    "a transposed convolution": lambda: block(
        lambda self, x: self.norm(self.a(x)), a=nn.ConvTranspose2d(3, 4, 4, 2, 1, **KIT), norm=norm(4, act="tanh")
    ),
}  # fmt: skip


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("kind", FOLDED)
def test_a_norm_is_folded_wherever_it_follows(kind, example):
    model = FOLDED[kind]()
    assert folded(model, Tensor(images(2, 3, 6, 6)), example=example) == []
    assert not any("forward" in module.__dict__ or module.training for module in model.modules())


LEFT = {
    "used elsewhere": lambda: block(lambda self, x: self.norm(y := self.a(x)) + y, a=conv(), norm=norm()),
    "used elsewhere afterwards": lambda: block(
        lambda self, x: ops.mul(*reversed([y := self.a(x), self.norm(y)])), a=conv(), norm=norm()
    ),
    "used by another layer": lambda: block(
        lambda self, x: self.norm(y := self.a(x)) + self.b(y), a=conv(), b=conv(), norm=norm()
    ),
    "returned": lambda: block(lambda self, x: (self.norm(y := self.a(x)), y), a=conv(), norm=norm()),
    "kept": lambda: block(kept_as_attribute, a=conv(), norm=norm()),
    "two norms": lambda: block(
        lambda self, x: self.norm(y := self.a(x)) + self.other(y), a=conv(), norm=norm(), other=norm()
    ),
    "called twice with two norms": lambda: block(
        lambda self, x: self.norm(self.a(self.other(self.a(x)).relu())), a=conv(), norm=norm(), other=norm()
    ),
    "called once without": lambda: block(lambda self, x: self.norm(self.a(self.a(x).relu())), a=conv(), norm=norm()),
    "a norm of two layers": lambda: block(
        lambda self, x: self.norm(self.a(x)) + self.norm(self.b(x)), a=conv(), b=conv(), norm=norm()
    ),
    "a norm of a layer and another tensor": lambda: block(
        lambda self, x: self.norm(self.a(self.norm(x))), a=conv(), norm=norm()
    ),
    "the norm before": lambda: block(lambda self, x: self.a(self.norm(x)), a=conv(), norm=norm()),
    "an operation between": lambda: block(lambda self, x: self.norm(self.a(x).relu()), a=conv(), norm=norm()),
    "a view between": lambda: block(
        lambda self, x: self.norm(self.a(x).transpose(2, 3)), a=conv(), norm=norm()
    ),
    "act": lambda: block(lambda self, x: self.norm(self.a(x)), a=conv(act="relu"), norm=norm()),
    "pool": lambda: block(lambda self, x: self.norm(self.a(x)), a=conv(pool="max"), norm=norm()),
    "no running statistics": lambda: nn.Sequential(conv(), norm(track_running_stats=False)).eval(),
    "a layer that computes something else": lambda: drawn(nn.Sequential(Halved(3, 3, 3, **KIT), norm())),
    "a weight used elsewhere": lambda: block(
        lambda self, x: self.norm(self.a(x)) + ops.conv2d(x, self.a.weight, padding=1), a=conv(), norm=norm()
    ),
    "a bias used elsewhere": lambda: block(
        lambda self, x: self.norm(self.a(x)) + self.a.bias.reshape(1, -1, 1, 1), a=conv(), norm=norm()
    ),
    "statistics used elsewhere": lambda: block(
        lambda self, x: self.norm(self.a(x)) + self.norm.running_mean.reshape(1, -1, 1, 1), a=conv(), norm=norm()
    ),
}  # fmt: skip


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("kind", LEFT)
def test_a_norm_is_left_alone_where_more_depends_on_the_layer(kind, example):
    model = LEFT[kind]()
    before = repr(model)
    assert folded(model, Tensor(images(2, 3, 6, 6)), example=example)
    assert repr(model) == before


def test_an_order_that_depends_on_the_input_needs_an_example():
    model = block(
        lambda self, x: self.norm(self.a(x) if x.shape[2] > 4 else self.b(x)), a=conv(), b=conv(), norm=norm()
    )
    before = repr(model)
    with pytest.raises(ValueError, match=r"forward of Block cannot be traced without an input \(it reads the shape"):
        nn.fold_batch_norms(model)
    assert repr(model) == before
    assert not any("forward" in module.__dict__ for module in model.modules())
    x = Tensor(images(1, 3, 6, 6))
    with no_grad():
        expected = model(x)
        nn.fold_batch_norms(model, x)
        torch.testing.assert_close(model(x).data, expected.data, rtol=1e-12, atol=1e-12)
    assert norms(model) == []
    assert type(model.b) is nn.Conv2d
    values = block(lambda self, x: self.norm(self.a(x)) * float(x.sum()), a=conv(), norm=norm())
    with pytest.raises(ValueError, match=r"it reads the values of a tensor\); give an example"):
        nn.fold_batch_norms(values)
    with pytest.raises(ValueError, match="Conv2d"):
        nn.fold_batch_norms(values, Tensor(images(2, 5, 6, 6)))


def test_the_order_is_that_of_evaluation_and_nothing_else_changes():
    model = block(
        lambda self, x: self.norm(self.drop(self.a(x)) if self.training else self.a(x)),
        a=conv(), drop=nn.Dropout(), norm=norm(),
    ).train()  # fmt: skip
    state = random.get_state()
    nn.fold_batch_norms(model)
    assert norms(model) == []
    assert random.get_state() == state
    assert model.training
    assert model.a.training
    with pytest.raises(ValueError, match="a scale is for inference"):
        model(Tensor(images(2, 3, 6, 6)))


@pytest.mark.parametrize(("bias", "kind"), [(True, nn.BatchNorm1d), (False, nn.BatchNorm1d), (True, nn.SyncBatchNorm)])
def test_linear_layers_take_the_norm_into_their_weights(bias, kind):
    layers = (nn.Linear(5, 4, bias, **KIT), kind(4, act="relu", **KIT), nn.Linear(4, 3, **KIT))
    model = drawn(nn.Sequential(*layers))
    x = Tensor(images(7, 5))
    assert folded(model, x) == []
    assert [type(layer).__name__ for layer in model] == ["FoldedLinear", "Linear"]
    with pytest.raises(ValueError, match=r"FoldedLinear: input has shape \[2, 4, 5\], expected \[N, 5\]"):
        model[0](Tensor(images(2, 4, 5)))


def test_a_sparse_layer_takes_it_too():
    model = drawn(nn.Sequential(nn.SparseLinear(6, 4), nn.BatchNorm1d(4), nn.ReLU())).to(dtype=torch.float64)
    col = torch.tensor([0, 3, 1, 4, 2, 5, 0, 4, 1, 2])
    x = CSR.from_torch(torch.arange(0, 11, 2), col, images(10).cpu(), (5, 6)).to(default_device())
    assert folded(model, x) == []


def test_a_norm_of_another_dimension_than_the_layers_outputs_stays():
    """Of x [N, 4, in] it normalises the second one, of [N, in] the outputs."""
    for shape, left in (((3, 4, 5), ["1"]), ((3, 5), [])):
        model = drawn(nn.Sequential(nn.Linear(5, 4, **KIT), nn.BatchNorm1d(4, **KIT)))
        assert folded(model, Tensor(images(*shape)), example=True) == left


@pytest.mark.parametrize(
    ("views", "left"),
    [
        (lambda y: y.reshape(-1, 2, 3, 4).permute(0, 3, 1, 2), []),
        (lambda y: y.view(y.shape[0], 4, 6, 1), ["norm"]),
        (lambda y: y.reshape(-1, 4, 6).transpose(1, 2).transpose(1, 2).reshape(-1, 4, 2, 3), []),
        (lambda y: y.reshape(6, -1, 4).permute(1, 2, 0).reshape(-1, 4, 3, 2), ["norm"]),  # pictures mixed
        (lambda y: y.reshape(2, 4, 3, 6), ["norm"]),  # the same
    ],
)
def test_views_between_a_linear_layer_and_its_norm_are_followed(views, left):
    def model():
        return block(lambda self, x: self.norm(views(self.a(x))), a=nn.Linear(5, 24, **KIT), norm=norm(4))

    x = Tensor(images(6, 5))
    assert folded(model(), x) == left
    assert folded(model(), x, example=True) == (left if views(minidl.zeros(6, 24)).shape[3] > 1 else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_generator_has_no_norm_left_but_that_of_a_linear_layer_in_half_precision(dtype):
    minidl.manual_seed(0)
    exact = drawn(Generator(6, 1, (8, 8), 4, dtype=torch.float64).to(dtype=torch.float64))
    model = Generator(6, 1, (8, 8), 4, dtype=dtype)
    model.load_state_dict(exact.state_dict())
    z = images(3, 6).to(dtype)
    with no_grad():
        wanted = exact(Tensor(z.double())).data
        plain, after = (found(Tensor(z)).data.double() for found in (model.eval(), nn.fold_batch_norms(model)))
    assert norms(model) == ([] if dtype == torch.float32 else ["norm"])
    assert (after - wanted).norm() <= 2 * (plain - wanted).norm()


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("again", [lambda layers, x: layers[3](x), lambda layers, x: list(layers)[2:][0](x)])
def test_layers_that_are_called_by_their_place_keep_their_number(again, example):
    model = block(
        lambda self, x: again(self.layers, self.layers(x)),
        layers=nn.Sequential(conv(), norm(), nn.ReLU(), conv()),
    )  # fmt: skip
    assert folded(model, Tensor(images(2, 3, 6, 6)), example=example) == []
    assert len(model.layers) == 4


def intermediates(self, x):
    found = []
    for layer in self.features:
        x = layer(x)
        found += [x] if x.shape[0] > 1 else []
    return tuple(found)


UNTRACED = {
    "around a Sequential": (lambda: drawn(OfAnyShape(nn.Sequential(conv(), norm()))), []),
    "with its intermediate results": (
        lambda: block(intermediates, features=nn.Sequential(conv(), norm())), ["features.1"]
    ),
    "with a layer of a Sequential before": (
        lambda: block(
            lambda self, x: self.layers(x) + y if len(y := self.layers[0](x)) > 1 else y,
            layers=nn.Sequential(conv(), norm()),
        ),
        ["layers.1"],
    ),
    "a layer that is called out of sight": (
        lambda: block(
            lambda self, x: self.norm(self.hidden.inner(x)) + self.hidden(x), hidden=OfAnyShape(conv()), norm=norm()
        ),
        ["norm"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNTRACED)
def test_layers_in_a_module_that_cannot_be_traced_need_an_example(kind):
    make, left = UNTRACED[kind]
    model = make()
    before = repr(model)
    with pytest.raises(ValueError, match=r"cannot be traced without an input .* give an example"):
        nn.fold_batch_norms(model)
    assert repr(model) == before
    assert folded(model, Tensor(images(2, 3, 6, 6)), example=True) == left


def test_a_model_without_batch_norms_needs_no_example():
    assert folded(drawn(OfAnyShape(conv())), Tensor(images(2, 3, 6, 6))) == []


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("example", [False, True])
def test_layers_that_a_sequential_has_twice(relu, example):
    layers = [conv(), norm(), *([nn.ReLU()] if relu else [])]
    model = drawn(nn.Sequential(*layers, *layers))
    assert folded(model, Tensor(images(2, 3, 6, 6)), example=example) == []
    assert [type(layer).__name__ for layer in model] == ["FoldedConv2d", *(["ReLU"] if relu else [])] * 2
    assert list(model._modules) == [str(i) for i in range(len(model._modules))]


def test_layers_whose_forward_is_called():
    model = block(
        lambda self, x: self.layers[1].forward(self.layers[0].forward(x)), layers=nn.Sequential(conv(), norm())
    )
    folded(model, Tensor(images(2, 3, 6, 6)), example=True)
    folded(model, Tensor(images(2, 3, 6, 6)))


def test_a_norm_whose_call_does_more_is_left_alone():
    class Doubled(nn.BatchNorm2d):
        def __call__(self, x):
            return super().__call__(x) * 2

    model = drawn(nn.Sequential(conv(), Doubled(3, **KIT)))
    assert folded(model, Tensor(images(2, 3, 6, 6))) == ["1"]
