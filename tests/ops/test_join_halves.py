"""What is joined for a convolution alone is read where it lies: bits as with a copy, and none is made."""

import contextlib

import pytest
import torch

import minidl
from minidl import models, nn, ops
from minidl.autograd import grad, no_grad
from minidl.compilation.capture import capture
from minidl.compilation.rehearsal import rehearsal
from minidl.kernels import conv
from minidl.kernels.conv import boxed, boxed_grad_weight
from minidl.runtime import launch
from minidl.runtime.cost_model import devices, selection
from minidl.tensors import Tensor, default_device
from tests.graphs import graphs, same_random  # noqa: F401 (fixtures)
from tests.ops.test_join import Sizes
from tests.rounded_once import rounded_once  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("rounded_once")

LAST = torch.channels_last


def image(*shape, seed=0, dtype=torch.float16):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(default_device(), dtype).contiguous(memory_format=LAST)


@contextlib.contextmanager
def in_boxes(copied=False):
    """A context in which all that can is computed in boxes, of blocks that halves of 32 channels have; `copied` joins
    first."""
    sizes = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "PIECES": 1, "PER_PROCESSOR": 0, "FLATTEN": 0}
    with pytest.MonkeyPatch.context() as patched:
        for form in (boxed, boxed_grad_weight):
            patched.setattr(form, "estimate", lambda problem: 0.0)
        if copied:
            patched.setattr(conv, "reads_concat_pair", lambda *_, **__: False)
        with launch.force(conv_box=launch.Tile(sizes)):
            yield


def joins(work, copied=False):
    """What `work` returns, and how many values were joined by a copy."""
    with in_boxes(copied), Sizes() as sizes:
        return work(), sizes.joined


@pytest.fixture
def net():
    minidl.manual_seed(3)
    return models.u_net.UNet(32, channels=32, width=32, depth=1, dtype=torch.float16)


def step(net, x):
    """The result, all gradients and running statistics, after which the network is as before."""
    before = {name: t.clone() for name, t in net.state_dict().items()}
    net.zero_grad()
    leaf = Tensor(x, requires_grad=True)
    y = net(leaf)
    y.backward(Tensor(image(*y.shape, seed=5)))
    found = [y.data, leaf.grad.data, *(p.grad.data for p in net.parameters())]
    found += [t.clone() for t in net.state_dict().values()]
    net.load_state_dict(before)
    return found


def test_a_u_net_has_the_bits_of_copies(net):
    x = image(2, 32, 4, 6)
    mine, none = joins(lambda: step(net, x))
    theirs, some = joins(lambda: step(net, x), copied=True)
    assert (none, some) == (0, 2 * 64 * 4 * 6)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    net.eval()
    with no_grad():
        mine, none = joins(lambda: net(Tensor(x)).data)
        theirs, some = joins(lambda: net(Tensor(x)).data, copied=True)
    assert none == 0 < some
    assert torch.equal(mine, theirs)


def test_a_captured_u_net_too(net, graphs):  # noqa: F811
    net.eval()

    def answer(x):
        with no_grad():
            return net(x)

    with in_boxes():
        recorded = capture(answer)
        for seed in range(3):
            x = Tensor(image(2, 32, 4, 4, seed=seed))
            assert torch.equal(recorded(x).data, answer(x).data)


@pytest.mark.parametrize("device", ["nvidia-h100", "nvidia-h200"])
@pytest.mark.parametrize("training", [True, False])
def test_a_recorded_u_net_joins_nothing(training, device):
    """16 images of 256x256."""
    net = models.u_net.UNet(2, width=64, depth=4, dtype=torch.float16).train(training)
    x = Tensor(torch.empty(16, 256, 256, 3, dtype=torch.float16, device=default_device()).permute(0, 3, 1, 2))
    known = selection.use(devices.of_file(devices.FOLDER / f"{device}.json"))
    with known, rehearsal(lambda *_: None, "sm_90"), Sizes() as sizes, minidl.set_grad_enabled(training):
        y = net(x)
        if training:
            y.backward(Tensor(torch.empty_like(y.data)))
    assert sizes.values == 0


class Body(nn.Module):
    """What `does` makes of a convolution and two tensors."""

    def __init__(self, does, dtype=torch.float16):
        super().__init__()
        self.conv, self.does = nn.Conv2d(64, 32, 3, padding=1, dtype=dtype), does

    def forward(self, first, second):
        return self.does(self.conv, first, second)


def parts(dtype=torch.float16, wants=(True, True)):
    return [Tensor(image(2, 32, 5, 6, seed=seed, dtype=dtype), requires_grad=want) for seed, want in enumerate(wants)]


@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True), (False, False)])
def test_gradients_of_what_wants_one(wants):
    def work():
        minidl.manual_seed(1)
        body, given = Body(lambda conv, a, b: ops.gelu(conv(ops.cat([a, b], 1)))), parts(wants=wants)
        y = body(*given)
        y.backward(Tensor(image(*y.shape, seed=7)))
        return [
            y.data,
            *(None if t.grad is None else t.grad.data for t in given),
            *(p.grad.data for p in body.parameters()),
        ]

    (mine, none), (theirs, some) = joins(work), joins(work, copied=True)
    assert none == 0 < some
    for a, b, want in zip(mine, theirs, (True, *wants, True, True), strict=True):
        assert torch.equal(a, b) if want else a is b is None


def test_a_join_that_is_used_otherwise_has_memory_of_its_own():
    kept = []

    def does(conv, a, b):
        both = ops.cat([a, b], 1)
        y = conv(both)
        kept[:] = [both, both * 2]
        return y

    given = parts()
    with in_boxes(), no_grad():
        y = Body(does)(*given)
    assert torch.equal(kept[0].data, torch.cat([t.data for t in given], 1))
    assert torch.equal(kept[1].data, 2 * kept[0].data)
    before = y.data.clone()
    kept[0].data.zero_()
    assert torch.equal(y.data, before)
    assert given[0].data.any()


def test_a_part_changed_by_minidl_comes_after():
    def does(conv, a, b):
        y = conv(ops.cat([a, b], 1))
        a.add_(1)
        return y

    with no_grad():
        minidl.manual_seed(1)
        body = Body(does)
        mine, none = joins(lambda: body(*parts()).data)
        assert none == 0
        assert torch.equal(mine, joins(lambda: body(*parts()).data, copied=True)[0])


def test_a_part_that_torch_changed_is_refused():
    def does(conv, a, b):
        y = conv(ops.cat([a, b], 1))
        b.data.add_(1)
        return y.data

    with in_boxes(), pytest.raises(RuntimeError, match="was changed in place before a result of it was used"):
        Body(does)(*parts())


def test_a_part_that_was_changed_before_its_gradient_is_refused():
    given = parts()
    with in_boxes():
        y = Body(lambda conv, a, b: conv(ops.cat([a, b], 1)))(*given)
        given[1].data.add_(1)
        with pytest.raises(RuntimeError, match=r"saved tensor 1 of shape .* was changed in place"):
            y.backward(Tensor(torch.ones_like(y.data)))


def test_other_joins_are_joined():
    """One tensor twice, three, of unlike sizes, in other orders of memory: all have the values of a copy."""

    def twice(conv, a, b):
        return conv(ops.cat([a, a], 1))

    def three(conv, a, b):
        return conv(ops.cat([a, b[:, :16], b[:, 16:]], 1))

    def unlike(conv, a, b):
        return conv(ops.cat([a[:, :16], ops.cat([b, a[:, 16:]], 1)], 1))

    def planes(conv, a, b):
        return conv(ops.cat([a, Tensor(b.data.contiguous())], 1))

    for does in (twice, three, unlike, planes):
        minidl.manual_seed(2)
        body = Body(does)
        with no_grad():
            found, some = joins(lambda: body(*parts()).data)  # noqa: B023
            assert some > 0
            with minidl.fusion(False):
                assert torch.equal(found, joins(lambda: body(*parts()).data)[0])  # noqa: B023


def test_second_derivatives():
    def work():
        minidl.manual_seed(1)
        body, given = Body(lambda conv, a, b: conv(ops.cat([a, b], 1)), torch.float32), parts(torch.float32)
        y = ops.tanh(body(*given))
        first = grad(y.sum(), [*given, body.conv.weight], create_graph=True)
        second = grad(sum((t * t).sum() for t in first), [*given, *body.parameters()])
        return [t.data for t in (y, *first, *second)]

    for mine, theirs in zip(joins(work)[0], joins(work, copied=True)[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
