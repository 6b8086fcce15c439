"""Training with captured steps against training without, bit for bit: several epochs with a smaller last batch, stopped
and continued. Without a GPU a stand-in for CUDA's graphs is replayed."""

import json
import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from scipy import sparse

from minidl import models, nn, ops, optim, random
from minidl.data import Augment, Batches, ImageBatches, Pictures
from minidl.distributed.parallel import DataParallel
from minidl.distributed.parts import Shards
from minidl.errors import Interrupted
from minidl.tensors import Tensor, default_device
from minidl.training.loop.adversaries import Adversaries
from minidl.training.loop.averages import ModelAverage
from minidl.training.loop.epochs import Trainer
from minidl.training.loop.learner import Judgement, Learner
from minidl.training.process.display import Display
from minidl.training.tasks.images.stages import Stages
from tests.graphs import graphs, same_random

__all__ = ["graphs", "same_random"]

ROWS, BATCH, EPOCHS = 10, 4, 5  # the fifth of the smaller last batches is replayed
STEPS = -(-ROWS // BATCH)


def text(draw):
    model = nn.Sequential(nn.SparseLinear(40, 16, act="relu"), nn.Dropout(0.5), nn.Linear(16, 3))
    x = sparse.random(ROWS, 40, 0.2, format="csr", dtype=np.float32, random_state=0)
    batches = Batches(x, draw.integers(0, 3, ROWS), BATCH, seed=1, device=default_device())
    return model, batches, optim.AdamW(model.parameters(), lr=0.02), ops.cross_entropy


def table(draw):
    model = nn.MLP(6, [8], 1, act="gelu", dropout=0.2)
    x, y = draw.normal(size=(ROWS, 6)).astype(np.float32), draw.normal(size=ROWS).astype(np.float32)
    batches = Batches(x, y, BATCH, seed=1, device=default_device())
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, max_norm=0.5)
    return model, batches, optimizer, lambda y, truth: ops.mse_loss(ops.flatten(y, 0), truth)


def pictures(draw, dtype=torch.float32):
    model = models.SmallCNN(1, (8, 8), 3, dtype=dtype)
    some = Pictures(draw.integers(0, 256, (ROWS, 8, 8, 1), dtype=np.uint8), (128.0,), (64.0,))
    batches = ImageBatches(
        some, draw.integers(0, 3, ROWS), BATCH, seed=1, augment=Augment(shift=1, flip=True), dtype=dtype
    )  # fmt: skip
    scale = 2.0**24 if dtype == torch.float16 else None
    optimizer = optim.AdamW(model.parameters(), lr=0.01, loss_scale=scale)
    return model, batches, optimizer, lambda y, truth: ops.cross_entropy(y.to(torch.float32), truth)


def half_pictures(draw):
    return pictures(draw, torch.float16)


DATA = {"text": text, "table": table, "pictures": pictures, "pictures in float16": half_pictures}


def trainer(make, folder, captured, epochs=EPOCHS, shards=None):
    """A trainer whose every epoch is the best; validation draws random numbers and runs the model."""
    random.manual_seed(0)
    model, batches, optimizer, loss = make(np.random.default_rng(0))
    schedule = optim.CosineLR(optimizer, EPOCHS * STEPS, warmup=3)

    def validate():
        x, y = next(iter(batches.epoch(0)))
        value = loss(model(x if not isinstance(x, torch.Tensor) else Tensor(x)), Tensor(y)).item()
        return Judgement({"loss": value, "drawn": ops.rand(1).item()}, 1.0, 0.0)

    learner = Learner(model, optimizer, schedule, batches, lambda x, y: loss(model(x), y), validate)
    if shards is not None:
        learner.parallel = DataParallel(model, Shards(shards))
    folder.mkdir(exist_ok=True)
    state = {"config": {"seed": 0}}
    return Trainer(learner, folder, epochs, 0, Display(quiet=True), state, "minidl", captured)


def end(one):
    """All that a run has come to."""
    history = [{name: value for name, value in record.items() if name != "seconds"} for record in one.progress.history]
    last = one.checkpoints.last()
    tensors = {**last.weights, **{k: v for k, v in last.optimizer.items() if isinstance(v, torch.Tensor)}}
    return history, {name: value.cpu().tolist() for name, value in tensors.items()}, last.state["generator"]


def stopped_at(one, step):
    """Run until a step, where a signal stops it."""
    done = iter(range(1, 1000))

    def count(*_):
        if next(done) == step:
            os.kill(os.getpid(), signal.SIGINT)

    one.display.step = count
    with pytest.raises(Interrupted):
        one.run()


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=pytest.mark.slow if "pictures" in name else ()) for name, make in DATA.items()],
)
def test_a_captured_run_is_the_run_itself(graphs, tmp_path, make):
    plain = trainer(make, tmp_path / "plain", False)
    plain.run()
    captured = trainer(make, tmp_path / "captured", True)
    captured.run()
    assert plain.progress.steps == EPOCHS * STEPS
    assert end(captured) == end(plain)
    if make is half_pictures:
        assert plain.progress.skipped > 0


@pytest.mark.parametrize("make", [text, table])
def test_a_captured_run_by_shards_is_the_run_itself(graphs, tmp_path, make):
    """Three shards; the last batch has two rows."""
    plain = trainer(make, tmp_path / "plain", False, epochs=4, shards=3)
    plain.run()
    captured = trainer(make, tmp_path / "captured", True, epochs=4, shards=3)
    captured.run()
    assert end(captured) == end(plain)


@pytest.mark.slow
def test_a_captured_recipe_is_the_run_itself(graphs, tmp_path):
    """Frozen layers and small pictures for two epochs, then another step; mixed pictures, and a moving average."""
    ends = []
    for captured in (False, True):
        one = trainer(pictures, tmp_path / str(captured), captured)
        learner = one.learner
        whole = learner.batches
        learner.batches = ImageBatches(
            Pictures(whole._host, (128.0,), (64.0,)), whole.targets, BATCH, seed=1, classes=3,
            augment=Augment(crop=0.4, flip=True, mixup=0.3, cutmix=1.0), sizes=((0, (6, 5)), (2, (8, 8))),
        )  # fmt: skip
        learner.stage_starts, learner.enter = (0, 2), partial(Stages(2).enter, learner.model)
        learner.average = ModelAverage(learner.model, models.SmallCNN(1, (8, 8), 3), 0.9)
        one.run()
        tensors = {name: value.cpu().tolist() for name, value in one.model.state_dict().items()}
        last = one.checkpoints.last().optimizer["average"]
        assert one.model is learner.average.averaged
        assert tensors == {name: value.tolist() for name, value in last.items()}
        ends.append((end(one), tensors))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("make", [text, table])
def test_where_batches_lie_and_their_room_change_nothing(tmp_path, make):
    first = trainer(make, tmp_path / "first", False)
    first.run()
    second = trainer(make, tmp_path / "second", False)
    before = second.learner.batches
    second.learner.batches = Batches(before.features, before.targets, before.batch_size, before.seed)
    second.run()
    assert end(second) == end(first)


@pytest.mark.parametrize("step", [2, 7])
@pytest.mark.parametrize("captured_first", [True, False])
def test_a_stopped_run_goes_on_with_or_without_capture(graphs, tmp_path, captured_first, step):
    complete = trainer(text, tmp_path / "complete", False)
    complete.run()
    first = trainer(text, tmp_path / "run", captured_first)
    stopped_at(first, step)
    assert json.loads((tmp_path / "run" / "checkpoints" / "last.json").read_text())["progress"]["steps"] == step
    resumed = trainer(text, tmp_path / "run", not captured_first)
    resumed.restore(resumed.checkpoints.last())
    resumed.run()
    assert end(resumed) == end(complete)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_captured_gan_trains_as_without(graphs, shards):
    settings = {"latent": 6, "channels": 1, "size": [8, 8], "width": 4, "layers": 2, "kernel": 4}
    results = []
    for captured in (False, True):
        random.manual_seed(0)
        networks = Adversaries(settings, batch_size=6, lr=0.01, seed=0, captured=captured, shards=Shards(shards))
        shape, generator = (6, 1, 8, 8), torch.Generator().manual_seed(0)
        figures = []
        for _ in range(5):
            x = Tensor((2.0 * torch.rand(shape, generator=generator) - 1.0).to(default_device()))
            parts = [x] if shards == 1 else [x[:3], x[3:]]
            figures.extend(part.tolist() for part in networks.step(*parts))
        results.append((figures, {name: value.tolist() for name, value in networks.weights().items()}))
    assert results[0] == results[1]


@pytest.mark.gpu
@pytest.mark.parametrize("make", DATA.values(), ids=DATA)
def test_batches_are_on_the_device_before_their_step(make):
    """And are whole, whenever they were copied there."""
    _, batches, _, _ = make(np.random.default_rng(0))
    seen = [
        [part.to("cpu").to_dense() if not isinstance(part, torch.Tensor) else part.cpu() for part in batch]
        for batch in batches.epoch(0)
    ]
    again = [
        [part.to("cpu").to_dense() if not isinstance(part, torch.Tensor) else part.cpu() for part in batch]
        for batch in list(batches.epoch(0))
    ]
    assert all(
        torch.equal(a, b) for one, other in zip(seen, again, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["array", "pictures", "sparse"])
def test_batches_that_are_copied_ahead_are_those_of_the_host(form):
    """Many of them, so that pinned memory and the device's is used again while copies and kernels run."""
    draw, device = np.random.default_rng(0), default_device()
    if form == "pictures":
        some = Pictures(draw.integers(0, 256, (999, 16, 16, 1), dtype=np.uint8), (0.0,), (1.0,))
        there, here = (ImageBatches(some, np.arange(999), 10, resident=resident) for resident in (True, False))
    else:
        x = draw.normal(size=(999, 300)).astype(np.float32)
        x = x if form == "array" else sparse.csr_matrix(x * (draw.random(x.shape) < 0.1))
        there, here = Batches(x, np.arange(999), 10), Batches(x, np.arange(999), 10, device=device, resident=False)
    for (x, y), (z, w) in zip(there.epoch(1), here.epoch(1), strict=True):
        busy = z.to_dense() if not isinstance(z, torch.Tensor) else z.clone()
        for _ in range(20):
            busy = busy.clone()
        expected = x.to_dense() if not isinstance(x, torch.Tensor) else x
        assert torch.equal(busy.cpu(), expected.cpu())
        assert torch.equal(y.cpu(), w.cpu())
