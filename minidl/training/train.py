"""`minidl train text`, `table` and `images`: from settings to a finished run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minidl import nn, ops, optim, random
from minidl.autograd import no_grad
from minidl.data import ImageDataset, Pictures, TableDataset, TextDataset
from minidl.data.batches import Batches
from minidl.data.image_batches import ImageBatches
from minidl.tensor import Tensor, default_device
from minidl.training import baselines, files, memory, metrics, plots, reports, runs, session
from minidl.training.checkpoints import Checkpoint
from minidl.training.config import TrainImages, TrainTable, TrainText
from minidl.training.display import Display
from minidl.training.forward import outputs
from minidl.training.loop import Judgement, Task, Trainer
from minidl.training.pictures import HALVES
from minidl.training.problems import Problem, make_problem
from minidl.training.progress import Progress

FEW_STEPS = 100  # fewer seldom learn much
LOSS_SCALE = 2.0**16  # of float16, to begin with
Training = TrainText | TrainTable | TrainImages


def train(
    kind: str, config: Training, dataset: TextDataset | TableDataset | ImageDataset, checksum: str
) -> dict[str, Any]:
    """Train, test and report: the run in `config.out` is finished afterwards. Returns the content of report.json.

    `checksum` is the data's fingerprint, kept in the run.

    Raises DataError, ConfigError, RunError, Interrupted.
    """
    display = Display(config.quiet)
    with session.failures(config, kind, config.batch_size):
        session.check_precision(config.precision)
        problem = make_problem(config, dataset)
        display.note(_introduction(config, problem))
        return session.in_run(
            config, kind, checksum, problem.documents, display,
            lambda checkpoint: _fit(kind, config, problem, checkpoint, display),
        )  # fmt: skip


def _fit(
    kind: str, config: Training, problem: Problem, checkpoint: Checkpoint | None, display: Display
) -> dict[str, Any]:
    described = session.prepare(config, config.precision, checkpoint, kind == "images")
    task = make_task(config, problem)
    state = {"config": config.identity(), "environment": described}
    hint = runs.resume_command(kind, config.out)
    # On a CPU no batch is given room, and none needs it.
    captured = config.capture and default_device().type == "cuda"
    trainer = Trainer(task, config.out, config.epochs, config.patience, display, state, hint, captured)
    resumed: dict[str, Any] = {}
    if checkpoint is not None:
        trainer.restore(checkpoint)
        resumed = session.resumed(checkpoint, described, trainer.progress.place, display)
        trainer.state.update(resumed)
        display.note(f"going on after {trainer.progress.place}")
    elif config.epochs * len(task.batches) < FEW_STEPS:
        more = math.ceil(FEW_STEPS / len(task.batches))
        # A folder may have fewer pictures than a batch, and a step with fewer of them is quicker.
        smaller = f" or a smaller --batch-size than {config.batch_size}" if kind == "images" else ""
        display.note(
            f"{config.epochs * len(task.batches)} steps in all; try --epochs {more}{smaller} if the scores are low"
        )
    # A graph keeps the memory of its own that its first steps took outside of it.
    smaller = memory.BATCH_SIZE if checkpoint is None else memory.NEW_RUN
    progress = memory.guarded(trainer.run, config.batch_size, trainer.attempt, 0.5 if captured else 1.0, smaller)
    display.note(f"kept: {reports.kept(progress.best_epoch)} (*: the best so far)")

    display.note("training is done; testing, and fitting the baselines")
    report = {**_report(config, problem, task.model, progress, described["device"]), **resumed}
    files.write_tensors(config.out / "model.safetensors", task.model.state_dict())
    plotted = _plots(config, problem, task.model, progress, report)
    text = reports.as_text(report)
    files.write_text(config.out / "report.txt", text)
    # Last: with it the run is finished, and --resume makes nothing that is missing.
    files.write_json(config.out / "report.json", report)
    display.note("\n" + text)
    for note in (plotted, runs.finish(config.out)):
        if note:
            display.note(note)
    display.note(f"the run is in {config.out}")
    return report


def make_task(config: Training, problem: Problem) -> Task:
    """Model, optimiser, schedule and batches, all decided by the settings and the seed."""
    random.manual_seed(config.seed)
    model = problem.model()
    batches = _batches(config, problem)
    optimizer = make_optimizer(config, model)
    schedule = make_schedule(config, optimizer, len(batches))
    if problem.task == "regression":
        return Task(
            model, optimizer, schedule, batches,
            loss=lambda x, y: ops.mse_loss(ops.flatten(model(x), 0), y),
            validate=lambda: _judge_numbers(model, problem),
        )  # fmt: skip

    def logits(x: Any) -> Tensor:
        y = model(x)
        return y if y.dtype == torch.float32 else y.to(torch.float32)

    weight = class_weights(problem.train[1], len(problem.labels), config.balance)
    return Task(
        model, optimizer, schedule, batches,
        loss=lambda x, y: ops.cross_entropy(logits(x), y, weight, label_smoothing=config.label_smoothing),
        validate=lambda: _judge_classes(model, problem),
    )  # fmt: skip


def _batches(config: Training, problem: Problem) -> Batches | ImageBatches:
    features, targets = problem.train
    if not isinstance(features, Pictures):
        device = default_device()
        # Where kernels run on the CPU, the batches are there already.
        there = None if device.type == "cpu" else device
        return Batches(features, targets, config.batch_size, config.seed, device=there)
    dtype = HALVES.get(config.precision, torch.float32)
    return ImageBatches(
        features, targets, config.batch_size, config.seed, augment=problem.augment, dtype=dtype
    )  # fmt: skip


def make_optimizer(config: Training, model: nn.Module) -> optim.Optimizer:
    """The optimiser named in the settings, with its usual constants."""
    parameters = list(model.parameters())
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "lazy": isinstance(config, TrainText) and config.lazy,
        "loss_scale": LOSS_SCALE if config.precision == "float16" else None,
    }
    if config.optimizer == "sgd":
        return optim.SGD(parameters, momentum=0.9, **options)
    makers = {"adamw": optim.AdamW, "adam": optim.Adam, "rmsprop": optim.RMSprop, "adagrad": optim.Adagrad}
    return makers[config.optimizer](parameters, **options)


def make_schedule(config: Training, optimizer: optim.Optimizer, steps_per_epoch: int) -> optim.Schedule:
    """The learning rate's course over all steps."""
    steps = config.epochs * steps_per_epoch
    warmup = min(round(config.warmup * steps_per_epoch), steps - 1)
    if config.schedule == "constant":
        return optim.ConstantLR(optimizer, warmup=warmup)
    falling = {"cosine": optim.CosineLR, "linear": optim.LinearLR}
    return falling[config.schedule](optimizer, steps, warmup=warmup)


def class_weights(targets: np.ndarray, classes: int, balance: float) -> Tensor | None:
    """float32 [classes]: (N / (C n_c))^balance for a class with n_c of the N targets; None for balance 0."""
    if balance == 0:
        return None
    counts = np.maximum(1, np.bincount(targets, minlength=classes))
    weights = (len(targets) / (classes * counts)) ** balance
    return _tensor(weights.astype(np.float32))


def _judge_classes(model: nn.Module, problem: Problem) -> Judgement:
    """The accuracy a of N examples decides; its standard error is sqrt(a (1 - a) / N)."""
    features, truth = problem.validation
    logits = outputs(model, features)
    with no_grad():
        loss = ops.cross_entropy(_tensor(logits), _tensor(truth)).item()
    scores = metrics.classification(truth, logits.argmax(1), len(problem.labels))
    accuracy = scores["accuracy"]
    return Judgement({"loss": float(loss), **scores}, accuracy, math.sqrt(accuracy * (1 - accuracy) / len(truth)))


def _judge_numbers(model: nn.Module, problem: Problem) -> Judgement:
    """The mean square error decides, of standardised values as in training; the scores are in the target's units."""
    features, truth = problem.validation
    raw = outputs(model, features).reshape(-1)
    with no_grad():
        loss = float(ops.mse_loss(_tensor(raw), _tensor(truth)).item())
    squares = np.square(raw.astype(np.float64) - truth)
    scores = metrics.regression(in_units(truth, problem), in_units(raw, problem))
    return Judgement({"loss": loss, **scores}, -loss, float(squares.std() / math.sqrt(len(truth))))


def in_units(standardised: np.ndarray, problem: Problem) -> np.ndarray:
    """Standardised targets or outputs in the target's units, float64 [N]."""
    return standardised.reshape(-1).astype(np.float64) * problem.scale + problem.mean


def _tensor(array: np.ndarray) -> Tensor:
    return Tensor(torch.from_numpy(array).to(default_device()))


def _report(config: Training, problem: Problem, model: nn.Module, progress: Progress, device: str) -> dict[str, Any]:
    """The content of report.json. This is where the test split is read."""
    test_x, test_y = problem.test()
    raw = outputs(model, test_x)
    train_x, train_y = problem.train
    report = {
        "task": problem.task,
        "kind": problem.kind,
        **reports.training(config, progress, device, model.num_parameters()),
        "source": problem.source,
        "validation": progress.history[progress.best_epoch - 1]["validation"],
    }
    if problem.task == "classification":
        return {
            **report,
            **reports.classification(test_y, raw.argmax(1), problem.labels),
            "baseline": baselines.classification(
                problem.train, problem.validation, (test_x, test_y), len(problem.labels)
            ),
        }
    return {
        **report,
        "target": problem.target,
        **metrics.regression(in_units(test_y, problem), in_units(raw, problem)),
        "baseline": baselines.regression(train_x, train_y, test_x, test_y, problem.mean, problem.scale),
    }


def _plots(
    config: Training, problem: Problem, model: nn.Module, progress: Progress, report: dict[str, Any]
) -> str | None:
    """The pictures of the run; a sentence instead when they cannot be made."""
    if not config.plots:
        return None
    if not plots.available():
        return plots.MISSING
    regression = problem.task == "regression"
    score = "r2" if regression else "accuracy"
    title = f"{plots.shorten(Path(config.data).name)}: test {metrics.TITLES[score]} {report[score]:.3f}"
    loss = f"mean squared error of standardised {plots.shorten(problem.target)}" if regression else "cross-entropy"
    plots.curves(config.out, progress.history, progress.best_epoch, title, loss, _only_in_training(config))
    if regression:
        test_x, test_y = problem.test()
        predicted = in_units(outputs(model, test_x), problem)
        plots.predictions(config.out, in_units(test_y, problem), predicted, problem.target, title)
    else:
        plots.confusion(config.out, report["confusion"], problem.labels, title)
        if isinstance(config, TrainImages):
            _plot_pictures(config, problem, model, title)
    return None


def _plot_pictures(config: TrainImages, problem: Problem, model: nn.Module, title: str) -> None:
    test_x, test_y = problem.test()
    probabilities = ops.softmax(_tensor(outputs(model, test_x)), -1).data.cpu().numpy()
    plots.mistakes(config.out, test_x.pixels, test_y, probabilities, problem.labels, title)
    first = next(parameter for parameter in model.parameters() if parameter.ndim == 4)
    plots.filters(config.out, first.data.to(torch.float32).cpu().numpy(), title)


def _only_in_training(config: Training) -> list[str]:
    """What makes the training loss another one than the validation loss."""
    shares = {
        "dropout": config.dropout,
        "label smoothing": config.label_smoothing,
        "class weights": config.balance,
    }
    return [name for name, share in shares.items() if share]


def _introduction(config: Training, problem: Problem) -> str:
    source = problem.source
    sizes = source["sizes"]
    features = f"{source['features']:,} features"
    if problem.kind == "images":
        colours = "grey" if source["channels"] == 1 else "colour"
        features = f"{colours} pictures of {source['height']} x {source['width']} pixels"
    classes = f", {len(problem.labels)} classes" if problem.labels else ""
    columns = reports.columns(source)
    return (
        f"{config.data}: {sizes['train']:,} training, {sizes['validation']:,} validation and {sizes['test']:,} test "
        f"examples, {features}{classes}" + (f"\ncolumns: {columns}" if columns else "")
    )
