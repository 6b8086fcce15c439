"""One of three processes that compute the same things as one, as two and as three; see test_together.

python together.py FOLDER RANK PORT PORT PORT
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import sparse

from minidl import distributed, nn, ops, optim, random
from minidl.data import Augment, Batches, ImageBatches, Pictures
from minidl.distributed import group
from minidl.distributed.parallel import DataParallel
from minidl.distributed.parts import cut
from minidl.errors import Interrupted
from minidl.tensors import Tensor
from minidl.training.loop.adversaries import Adversaries
from minidl.training.loop.averages import ModelAverage
from minidl.training.loop.epochs import Trainer
from minidl.training.loop.learner import Judgement, Learner
from minidl.training.process.display import Display
from minidl.training.run_folder.checkpoints import Checkpoints

ROWS, BATCH, EPOCHS = 21, 16, 2  # the last batch has fewer examples than there are shards
SHARDS = 8
OPTIMIZERS = {
    "SGD": (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "max_norm": 3.0}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "Adam": (optim.Adam, {"amsgrad": True, "max_norm": 3.0, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"loss_scale": 2.0**10, "max_norm": 3.0}),
}  # fmt: skip
SHAPES = [(37, 21), (7,), (), (0, 3), (4, 5, 3, 3), (300,)]


def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def text(draw):
    model = nn.Sequential(nn.SparseLinear(40, 16, act="relu"), nn.Dropout(0.5), nn.Linear(16, 3))
    x = sparse.random(ROWS, 40, 0.2, format="csr", dtype=np.float32, random_state=0)
    return model, Batches(x, draw.integers(0, 3, ROWS), BATCH, seed=1), ops.cross_entropy


def pictures(draw):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, act="relu"), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(36, 3)
    )
    some = Pictures(draw.integers(0, 256, (ROWS, 8, 8, 1), dtype=np.uint8), (128.0,), (64.0,))
    return model, ImageBatches(some, draw.integers(0, 3, ROWS), BATCH, 1, augment=Augment(shift=1)), ops.cross_entropy


def synced(draw):
    model, *rest = pictures(draw)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model), *rest


def trainer(make, folder, stops=False, zero=False):
    """A trainer whose every epoch is the best, or which is stopped in the first. Only the first process may judge."""
    random.manual_seed(0)
    model, batches, loss = make(np.random.default_rng(0))
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    schedule = optim.CosineLR(optimizer, EPOCHS * len(batches), warmup=1)
    parallel = DataParallel(model, distributed.shards(SHARDS))
    random.manual_seed(0)
    average = ModelAverage(model, make(np.random.default_rng(0))[0], 0.5)
    if zero:
        distributed.shard_optimizer(optimizer)

    def validate():
        assert group.current().leads
        if stops:
            os.kill(os.getpid(), signal.SIGTERM)
        return Judgement({"loss": 1.0, "drawn": ops.rand(1).item()}, 1.0, 0.0)

    learner = Learner(
        model, optimizer, schedule, batches, lambda x, y: loss(model(x), y), validate,
        average=average, parallel=parallel,
    )  # fmt: skip
    folder.mkdir(exist_ok=True, parents=True)
    return Trainer(learner, folder, EPOCHS, 0, Display(quiet=True), {"config": {"seed": 0}}, "minidl", False)


def trained(make, folder, before, zero=False):
    """Weights and losses after all epochs; of a run that goes on where `before` ended, if that is given."""
    run = trainer(make, folder, zero=zero)
    if before is not None:
        if group.current().leads:
            shutil.copytree(before, folder, dirs_exist_ok=True)
        group.current().gathered(None, "the copy")
        run.restore(run.checkpoints.last())
    progress = run.run()
    losses = [record["loss"] for record in progress.history]
    averages = [tensor for tensor in run.model.state_dict().values() if tensor.is_floating_point()]
    return [digest([*(t for _, t in sorted(run.learner.model.state_dict().items())), *averages]), losses]


def adversaries(sync=False):
    random.manual_seed(0)
    settings = {"latent": 4, "channels": 1, "size": (8, 8), "width": 4, "layers": 2, "kernel": 5}
    both = Adversaries(settings, 6, 1e-3, 0, captured=False, shards=distributed.shards(4), sync_batch_norm=sync)
    distributed.shard_optimizer(both.generator_optimizer)
    distributed.shard_optimizer(both.discriminator_optimizer)
    x = torch.linspace(-1, 1, 6 * 64).reshape(6, 1, 8, 8)
    figures = both.step(*(Tensor(x[own.start : own.stop]) for own in both.shards.rows(6)))
    return digest([*figures, *both.weights().values()])


def sums(size):
    """Sums of rows that belong to shards, whoever has them."""
    found = {}
    draw = np.random.default_rng(0)
    for count in (4, 5, 8, 13, 64):
        for dtype in (torch.float16, torch.float32, torch.float64):
            rows = torch.from_numpy(draw.normal(size=(count, 3, int(draw.integers(1, 60))))).to(dtype)
            weights = torch.from_numpy(draw.random(count))
            own = cut(count, size)[group.current().rank]
            for factors in (None, Tensor(weights[own.start : own.stop])):
                part = Tensor(rows[own.start : own.stop])
                total = distributed.all_reduce_fixed(part, distributed.shards(count), factors)
                found[f"{count} {dtype} {factors is not None}"] = digest([total.data])
            for columns in (slice(None, None, 2), slice(2, 3)):  # not contiguous, and one value
                part = Tensor(rows[own.start : own.stop, columns, 0])
                total = distributed.all_reduce_fixed(part, distributed.shards(count))
                expected = rows[:, columns, 0].double().sum(0)
                bound = count * torch.finfo(dtype).eps
                torch.testing.assert_close(total.data.double(), expected, rtol=0, atol=bound * 4)
                found[f"{count} {dtype} {columns}"] = digest([total.data])
    return found


def user_steps():
    """The loop of a user, whose model has parameters that get no gradient, on whole batches."""
    random.manual_seed(group.current().rank)  # the weights of the first process are taken
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    model.unused = nn.Linear(2, 2)
    parallel = distributed.DataParallel(model, distributed.shards(4))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    random.manual_seed(0)
    for rows in (8, 3, 8):
        x, y = (Tensor(torch.linspace(-1, 1, rows * n).reshape(rows, n)) for n in (6, 2))
        loss = parallel(lambda x, y: ops.mse_loss(model[2](model[1](model[0](x))), y), x, y)
        assert model.unused.weight.grad is None
        optimizer.step()
    return [digest(tensor for name, tensor in model.state_dict().items() if "unused" not in name), loss.item()]


def optimizer_of(name, shared):
    """An optimiser of two groups, and a function that takes its step of a number with gradients of their own."""
    make, settings = OPTIMIZERS[name]
    dtypes = [torch.float16 if settings.get("loss_scale") and i % 2 else torch.float32 for i in range(len(SHAPES))]
    params = [Tensor(values(i, shape).to(dtype)) for i, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True))]
    params[4] = Tensor(params[4].data.to(memory_format=torch.channels_last))
    for param in params:
        param.requires_grad_()
    some, others, last = params[:2], params[2:-1], params[-1:]
    optimizer = make([{"params": some, "lr": 0.05}, {"params": others}], lr=0.02, **settings)
    if shared:
        assert distributed.shard_optimizer(optimizer) is optimizer
        if group.current().size > 1:
            with pytest.raises(ValueError, match=f"{name}: its state is already distributed"):
                distributed.shard_optimizer(optimizer)
    optimizer.add_param_group({"params": last})

    def step(number):
        scale = 1.0 if optimizer.loss_scale is None else optimizer.loss_scale.item()
        for i, param in enumerate(params):
            param.grad = None
            if (i + number) % 4:  # the others miss this step
                grad = scale * values(100 * number + i, SHAPES[i])
                param.grad = Tensor(grad.to(param.dtype).contiguous(memory_format=order(param)))
        if number == 2 and optimizer.loss_scale is not None:  # it is skipped
            params[0].grad.data[0, 0] = torch.inf
        optimizer.step()

    return optimizer, params, step


def values(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def order(param):
    return torch.channels_last if param.ndim == 4 else torch.contiguous_format


def optimizers(folder, size):
    """What each optimiser makes in five steps: its parameters, and its state in the first process. The last two steps
    begin with what one process fewer saved, with the state shared out and not. And the bytes that are kept."""
    found, held, leads = {}, {}, group.current().leads
    for name in OPTIMIZERS:
        optimizer, params, step = optimizer_of(name, shared=True)
        for number in range(3):
            step(number)
        saved = {"torch": optimizer.state_dict(), "flat": optimizer.flat_state()}
        if leads:
            files = Checkpoints(folder / f"{name}-{size}")
            files.save(3, {str(i): param.data for i, param in enumerate(params)}, saved, {}, best=False)
            files.wait()
        else:
            assert saved == {"torch": {}, "flat": {}}
        kept = (value for each in optimizer.state.values() for key, value in each.items() if key != "step")
        held[name] = sum(tensor.untyped_storage().nbytes() for tensor in kept)
        for form, shared in (("torch", True), ("flat", True), ("flat", False)):
            optimizer, params, step = optimizer_of(name, shared)
            group.current().gathered(None, "the saving")
            before = Checkpoints(folder / f"{name}-{max(1, size - 1)}").last()
            state = before.optimizer[form]
            if form == "torch":
                state["state"] = {int(key): kept for key, kept in state["state"].items()}  # JSON has strings
            optimizer.load_state_dict(state)
            for i, param in enumerate(params):
                param.data.copy_(before.weights[str(i)])
            step(3)
            step(4)
            found[f"{name} {form} {shared}"] = digest(p.data for p in params), optimizer.grad_norm.item()
            flat = optimizer.flat_state()
            if leads:
                tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
                found[f"{name} {form} {shared} state"] = list(tensors), digest(tensors.values())
    return found, held


def main():
    folder, rank, ports = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for size, port in enumerate(ports, 1):
        if rank >= size:
            continue
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(size))
        distributed.init(timeout=120)
        before = folder / f"part-{size - 1}" if size > 1 else None
        found = {
            "sums": sums(size),
            "user's steps": user_steps(),
            # Two share out the optimizer's state of a run that did not; three go on without from one that did.
            "text": trained(text, folder / f"text-{size}", before, zero=size != 3),
            "pictures": trained(pictures, folder / f"pictures-{size}", None, zero=size == 3),
            "adversaries": adversaries(),
            "pictures, joined statistics": trained(synced, folder / f"synced-{size}", None),
            "adversaries, joined statistics": adversaries(sync=True),
        }
        found["optimizers"], found["bytes"] = optimizers(folder, size)
        with contextlib.suppress(Interrupted):  # one more process goes on with it
            trainer(text, folder / f"part-{size}", stops=True, zero=size % 2 == 0).run()
        group.current().gathered(None, "the checkpoint")
        (written,) = (folder / f"part-{size}" / "checkpoints").glob("*.safetensors")
        found["checkpoint"] = hashlib.sha256(written.read_bytes()).hexdigest()
        (folder / f"found-{size}-{rank}.json").write_text(json.dumps(found))
        if size > 1:
            group.current().gathered(None, "the end")
            dist.destroy_process_group()
            group._joined.clear()


if __name__ == "__main__":
    main()
