"""Joins along the channels again and again, in one memory: the values and gradients of plain joins, nothing shared."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import minidl
from minidl import models, nn, ops
from minidl.autograd import deferred, no_grad
from minidl.kernels.norm import alone
from minidl.ops import join
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device


def image(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device(), dtype)


class Dense(nn.Module):
    """Batch norm of all so far, of which some channels are joined to it, or, with `lists`, to all parts anew; `keep`
    sees each join."""

    def __init__(self, first, more, keep=lambda x: None, lists=False):
        super().__init__()
        self.keep, self.more, self.lists = keep, more, lists
        for index, _ in enumerate(more):
            setattr(self, f"norm{index}", nn.BatchNorm2d(first + sum(more[:index]), dtype=torch.float64))

    def forward(self, x):
        parts = [x]
        for norm, count in zip(self.children(), self.more, strict=True):
            new = ops.relu(norm(x))
            if self.lists:
                parts.append(new[:, :count])
                x = ops.cat(parts, 1)
                self.keep(x)
                continue
            x = ops.cat([x, new[:, :count]] if count % 3 else [x, new[:, :count], x[:, :0]], 1)
            self.keep(x)
        return x


def of(model, x, training=True):
    """The result, all gradients and running statistics."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.train(training).zero_grad()
    leaf = Tensor(x, requires_grad=True)
    y = model(leaf)
    y.backward(Tensor(image(*y.shape, seed=5, dtype=x.dtype)))
    found = [y.data, leaf.grad.data, *(p.grad.data for p in model.parameters())]
    found += [t.clone() for t in model.state_dict().values()]
    model.load_state_dict(before)
    return found


def assert_as_plain(model, x, **how):
    """In the first call, and in the second, which knows how wide joins become."""
    first, fused = of(model, x, **how), of(model, x, **how)
    assert all(map(torch.equal, first, fused))
    with minidl.fusion(False):
        plain = of(model, x, **how)
    assert torch.equal(fused[0], plain[0])
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@given(
    first=st.integers(1, 9), more=st.lists(st.integers(0, 9), max_size=5), size=st.tuples(*[st.integers(1, 3)] * 3),
    last=st.booleans(), training=st.booleans(), in_bands=st.booleans(), lists=st.booleans(),
)  # fmt: skip
def test_a_dense_block_is_as_with_plain_joins(first, more, size, last, training, in_bands, lists):
    for index, count in enumerate(more):
        more[index] = min(count, first + sum(more[:index]))
    x = image(size[0] + 1, first, *size[1:], dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    most, alone.MOST = alone.MOST, 0 if in_bands else alone.MOST
    try:
        assert_as_plain(Dense(first, more, lists=lists), x, training=training)
    finally:
        alone.MOST = most


class Sizes(TorchDispatchMode):
    """How many values are copied to other places."""

    def __init__(self):
        super().__init__()
        self.values = self.joined = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::cat", "aten::copy_") and out.dim() == 4:
            self.values += out.numel()
            self.joined += out.numel() * (func._schema.name == "aten::cat")
        return out


@pytest.mark.parametrize("lists", [False, True])
def test_what_is_joined_is_copied_once(lists):
    """The last join is one as always: the result, and not a batch norm's input."""
    x = Tensor(image(2, 8, 3, 3, dtype=torch.float64))
    model = Dense(8, [4] * 14, lists=lists).eval()
    counts = []
    for _ in range(3):
        with no_grad(), Sizes() as sizes:
            model(x)
        counts.append(sizes.values)
    moved = 12 + 32  # at first, to a room of 32 channels, and to one of 72
    assert counts == [2 * 9 * (60 + moved + 64), 2 * 9 * (60 + 64), 2 * 9 * (60 + 64)]


def test_other_joins_than_in_the_last_call():
    """Fewer, more, and of other sizes: what is known is room that they may have, and no more."""
    blocks = [Dense(3, more) for more in ([2, 2, 3], [2, 2, 2, 2, 2, 2, 2], [])]

    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.which = nn.Sequential(*blocks), ()

        def forward(self, x):
            for index in self.which:
                x = self.blocks[index](x)[:, :3]
            return x

    model = Chosen()
    for which, size in (((0, 1), 3), ((1, 0), 3), ((0,), 2), ((1, 1, 0), 4), ((2, 0), 1), ((1,), 5)):
        model.which = which
        x = Tensor(image(size, 3, 2, 3, dtype=torch.float64))
        found = model(x).data
        with minidl.fusion(False):
            assert torch.equal(found, model(x).data)


def test_results_share_no_memory():
    """What a user keeps of the joins may be changed, and changes nothing else."""
    kept = []
    model, x = Dense(3, [2, 2, 2, 2], kept.append), image(2, 3, 4, 4, dtype=torch.float64)
    y = model(Tensor(x))
    expected, places = y.data.clone(), set()
    for t in kept:
        assert t.data.is_contiguous(memory_format=torch.channels_last) or t.data.is_contiguous()
        places.add(t.data.untyped_storage().data_ptr())
        assert torch.equal(t.data, expected[:, : t.shape[1]])
    assert len(places) == 4
    kept[1].data.zero_()
    assert torch.equal(y.data, expected)


def test_a_part_that_was_changed_is_joined_anew():
    norms = [nn.BatchNorm2d(c, dtype=torch.float64).eval() for c in (4, 6, 8)]
    parts = [Tensor(image(2, c, 2, 2, seed=c, dtype=torch.float64)) for c in (3, 1, 2, 2)]

    class Body(nn.Module):
        def forward(self):
            found = []
            for index, norm in enumerate(norms):
                found.append(norm(ops.cat(parts[: index + 2], 1)).data)
                parts[index].data.add_(1)
            return found

    with no_grad():
        found = Body()()
        assert deferred.call() is None
        for index in range(3):
            parts[index].data.add_(-1)
        with minidl.fusion(False):
            plain = Body()()
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_something_else_may_be_joined_to_a_part():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.Sequential(*(nn.BatchNorm2d(c, dtype=torch.float64) for c in (4, 6, 7, 12, 8)))

        def forward(self, x):
            first, second, third, twice, again = self.norms.children()
            a = ops.cat([x, x], 1)
            b = ops.cat([a, first(a)[:, :2]], 1)
            c, d = ops.cat([b, second(b)[:, 1:2]], 1), ops.cat([b, b], 1)
            return third(c).sum() + (twice(d) * d).sum() + (again(ops.cat([c, c[:, 3:4]], 1)) * 0.5).sum() + c.sum()

    assert_as_plain(Forked(), image(3, 2, 2, 2, dtype=torch.float64))


def test_a_list_may_grow_after_it_was_joined():
    class Growing(nn.Module):
        def forward(self, x):
            parts = [x, x]
            y = ops.cat(parts, 1)
            parts.append(y)
            z = ops.cat(parts, 1)
            parts.clear()
            return y, z

    x = image(2, 3, 4, 4)
    y, z = Growing()(Tensor(x))
    assert torch.equal(y.data, torch.cat([x, x], 1))
    assert torch.equal(z.data, torch.cat([x] * 4, 1))


def test_a_step_of_densenet(monkeypatch):
    """No sum of gradients is a launch: the batch norm after a join adds those of the joins after it."""
    monkeypatch.setattr(alone, "fits", lambda x: False)
    model = models.densenet.DenseNet((2, 3), 5, first=8, growth=4, dtype=torch.float64)
    names = []
    with launch.watch(lambda kernel, grid, args, meta, go: (names.append(kernel.__name__), go())):
        assert_as_plain(model, image(2, 3, 32, 32, dtype=torch.float64))
    fused, plain = names[: names.index("tile_kernel")], names[names.index("tile_kernel") :]
    assert fused.count("batch_norm_grad_kernel") >= 5
    assert plain.count("tile_kernel") == 5


def test_a_part_that_torch_changed_is_refused():
    norm, x, y = nn.BatchNorm2d(5), Tensor(image(2, 3, 2, 2)), Tensor(image(2, 2, 2, 2))

    class Body(nn.Module):
        def forward(self):
            z = ops.cat([x, y], 1)
            y.data.add_(1)
            return norm(z)

    with pytest.raises(RuntimeError, match="was changed in place before a result of it was used"):
        Body()()


def test_gradients_of_joins_in_a_room():
    """By differences, in float64."""
    x, new = (Tensor(image(2, c, 2, 3, seed=c, dtype=torch.float64), requires_grad=True) for c in (3, 2))

    def joined(x, new):
        room = join.Room(x.data, 8)
        return join.CatInRoom.apply(room, x, new)

    assert torch.equal(joined(x, new).data, torch.cat([x.data, new.data], 1))
    dy = image(2, 5, 2, 3, seed=9, dtype=torch.float64)
    joined(x, new).backward(Tensor(dy))
    assert torch.equal(x.grad.data, dy[:, :3])
    assert torch.equal(new.grad.data, dy[:, 3:])
