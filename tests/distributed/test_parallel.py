"""DataParallel in one process: its gradients are those of the shards, added in the tree, whatever fills the buckets."""

import contextlib

import pytest
import torch

from minidl import distributed, nn, ops
from minidl.distributed import buckets
from minidl.kernels import tree
from minidl.tensors import Tensor

ROWS, SHARDS = 13, 5


def made():
    """A model with a weight that is used twice, one that is not used, and a batch norm."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model.unused = nn.Linear(2, 2)
    for number, parameter in enumerate(model.parameters()):
        values = torch.linspace(-1, 1, parameter.data.numel()).reshape(parameter.shape) * (1 + number % 3)
        parameter.data.copy_(values)
    x, y = (Tensor(torch.linspace(-1, 2, ROWS * n).sin().reshape(ROWS, n)) for n in (6, 2))
    return model, x, y


def loss_of(model):
    def loss(x, y):
        (0.125 * ops.sum(model[2].weight * model[2].weight)).backward()  # a penalty, walked back by itself
        return ops.mse_loss(model[2](model[1](model[0](ops.relu(model[0](x))))), y)

    return loss


def expected():
    """Gradients, buffers and loss, each shard by itself."""
    of = distributed.shards(SHARDS)
    rows = []
    for own in of.rows(ROWS):
        model, x, y = made()
        loss = loss_of(model)(x[own.start : own.stop], y[own.start : own.stop])
        loss.backward()
        used = [p.grad.data for p in model.parameters() if p.grad is not None]
        rows.append([*used, *(b.data for b in model.buffers() if b.is_floating_point()), loss.data])
    weights = torch.tensor([len(own) / ROWS for own in of.rows(ROWS)], dtype=torch.float64)
    joined = [torch.stack([values.reshape(-1) for values in each]) for each in zip(*rows, strict=True)]
    return [tree.sum_rows(each, range(SHARDS), tree.leaves(SHARDS), weights) for each in joined]


@pytest.mark.parametrize("cap", [25.0, 60e-6])
def test_gradients_are_those_of_the_shards_in_the_tree(cap):
    model, x, y = made()
    steps = distributed.DataParallel(model, distributed.shards(SHARDS), bucket_cap_mb=cap)
    for step in range(2):  # the first one finds out what the buckets are
        model.load_state_dict(made()[0].state_dict())
        loss = steps(loss_of(model), x, y)
        found = [p.grad.data for p in model.parameters() if p.grad is not None]
        found += [b.data for b in model.buffers() if b.is_floating_point()]
        for ours, right in zip([*found, loss.data], expected(), strict=True):
            assert torch.equal(ours.reshape(-1), right), step
        assert model.unused.weight.grad is None
        assert int(model[1].num_batches_tracked.data) == 1
    assert len(steps._grad_buckets.used) == (1 if cap == 25.0 else 4)


def test_what_may_be_wrong():
    model, x, y = made()
    with pytest.raises(ValueError, match="bucket_cap_mb is 0, expected MB above 0"):
        distributed.DataParallel(model, bucket_cap_mb=0)
    steps = distributed.DataParallel(model, distributed.shards(SHARDS))
    steps(loss_of(model), x, y)
    with pytest.raises(RuntimeError, match="a parameter has a gradient, and had none in the first step"):
        steps(lambda x, y: ops.mse_loss(model.unused(model(x)), y), x, y)
    assert not any(parameter._after for parameter in model.parameters())
    loss = steps(loss_of(model), x, y)  # what was raised has left nothing
    assert torch.isfinite(loss.data)


class _Stream:
    """A stream as a vector clock: what is known to be done before what comes next on it."""

    now = None

    def __init__(self, number):
        self.number, self.seen = number, {}

    def tick(self):
        self.seen[self.number] = self.seen.get(self.number, 0) + 1
        return dict(self.seen)

    def record_event(self):
        return dict(self.seen)

    def wait_event(self, event):
        self.seen = {n: max(self.seen.get(n, 0), event.get(n, 0)) for n in {*self.seen, *event}}

    def wait_stream(self, other):
        self.wait_event(other.seen)

    @contextlib.contextmanager
    def __call__(self):
        before, _Stream.now = _Stream.now, self
        yield
        _Stream.now = before


def test_sums_wait_for_what_they_add_and_not_for_more(monkeypatch):
    """The order that the streams of a recording are given, followed by clocks in place of a GPU."""
    main, *others = (_Stream(number) for number in range(2 + buckets.MAX_STREAMS))
    monkeypatch.setattr(buckets, "recording", lambda: True)
    monkeypatch.setattr(buckets, "_streams", lambda device: others)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: _Stream.now)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream())
    written, reads, means, copy = {}, [], buckets.Bucket.means, buckets.copy

    def copies(to, source):
        written.update({each.data_ptr(): (_Stream.now.number, _Stream.now.tick()) for each in to})
        copy(to, source)

    def adds(joined, *args):
        now = _Stream.now.tick()
        reads.append([(*written[view.data_ptr()], now) for views in joined.views for view in views])
        return means(joined, *args)

    model, x, y = made()
    steps = distributed.DataParallel(model, distributed.shards(SHARDS), bucket_cap_mb=60e-6)
    for _ in range(2):
        reads.clear()
        with main():
            main.tick()
            model.load_state_dict(made()[0].state_dict())
            monkeypatch.setattr(buckets, "copy", copies)
            monkeypatch.setattr(buckets.Bucket, "means", adds)
            loss = steps(loss_of(model), x, y)
            monkeypatch.setattr(buckets, "copy", copy)
            monkeypatch.setattr(buckets.Bucket, "means", means)
        end = main.tick()
        assert all(end.get(stream.number, 0) == stream.seen.get(stream.number, 0) for stream in others)
        assert torch.equal(loss.data.reshape(-1), expected()[-1])
        for read in reads:  # each was written before
            assert all(now[stream] >= then[stream] for stream, then, now in read)
        lanes = {stream for stream, *_ in reads[0]}
        assert lanes == {stream.number for stream in others[1:]}
    # The first bucket of the second step does not wait for the last one of any shard; but the first shard was done
    # before another one ran on its stream.
    (*_, began), last = reads[0][0], reads[-1][len(reads[-1]) // SHARDS :]
    assert all(began.get(stream, 0) < then[stream] for stream, then, _ in last)
