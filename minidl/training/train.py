"""`minidl train text` and `minidl train table`: from settings to a finished run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from minidl import nn, ops, optim, random
from minidl.autograd import no_grad
from minidl.csr import CSR
from minidl.data.batches import Batches
from minidl.kernels import launch
from minidl.tensor import Tensor, default_device
from minidl.training import baselines, environment, files, metrics, plots, problems, reports, runs
from minidl.training.checkpoints import Checkpoint
from minidl.training.config import TrainTable, TrainText
from minidl.training.display import Display
from minidl.training.errors import ConfigError, RunError
from minidl.training.loop import Progress, Task, Trainer
from minidl.training.problems import Problem

EVALUATION_BATCH = 1024


def train(kind: str, config: TrainText | TrainTable) -> dict[str, Any]:
    """Train, test and report: the run in `config.out` is finished afterwards. Returns the content of report.json.

    Raises DataError, ConfigError, RunError, Interrupted.
    """
    display = Display(config.quiet)
    if config.resume and (config.out / "report.json").exists():
        display.note(f"{config.out} is finished already; its report:\n")
        display.note((config.out / "report.txt").read_text())
        return files.read_json(config.out / "report.json")
    try:
        return _train(kind, config, display)
    except OSError as error:
        failure = runs.cannot_save(config.out, kind, error)
    except torch.cuda.OutOfMemoryError:
        failure = RunError(f"the GPU's memory is full: train with a smaller --batch-size than {config.batch_size}")
    if not (config.out / "checkpoints" / "last.json").exists() and runs.abandon(config.out):
        failure = RunError(f"{failure} The run that was to be replaced is back.")
    raise failure


def _train(kind: str, config: TrainText | TrainTable, display: Display) -> dict[str, Any]:
    problem = problems.text_problem(config) if isinstance(config, TrainText) else problems.table_problem(config)
    display.note(_introduction(config, problem))
    resumed = config.resume and (config.out / "config.json").exists()
    if resumed:
        runs.same_data(runs.read_run(config.out), problem.sha256)
    else:
        runs.start(config, kind, problem.sha256, problem.documents)
    checkpoint = trainer_checkpoint(config) if resumed else None
    threads = checkpoint.state["environment"]["threads"] if checkpoint else environment.wanted_threads()
    environment.fix_threads(threads)
    launch.set_float32_precision("tf32" if config.precision == "tf32" else "tf32x3")
    described = environment.describe(threads)
    files.write_json(config.out / "environment.json", described)

    task = make_task(config, problem)
    state = {"config": config.identity(), "environment": described}
    hint = runs.resume_command(kind, config.out)
    trainer = Trainer(task, config.out, config.epochs, config.patience, display, state, hint)
    if checkpoint is not None:
        for change in environment.changes(checkpoint.state["environment"], described):
            display.note(f"note: {change}; the result may differ in its last digits from an uninterrupted run's")
        trainer.restore(checkpoint)
        display.note(f"going on after {_place(trainer.progress)}")
    progress = trainer.run()

    display.note("training is done; testing, and fitting the baselines")
    report = _report(config, problem, task.model, progress, described["device"])
    files.write_tensors(config.out / "model.safetensors", task.model.state_dict())
    text = reports.as_text(report)
    files.write_text(config.out / "report.txt", text)
    files.write_json(config.out / "report.json", report)
    display.note("\n" + text)
    for note in (_plots(config, problem, task.model, progress, report), runs.finish(config.out)):
        if note:
            display.note(note)
    display.note(f"the run is in {config.out}")
    return report


def make_task(config: TrainText | TrainTable, problem: Problem) -> Task:
    """Model, optimiser, schedule and batches, all decided by the settings and the seed."""
    random.manual_seed(config.seed)
    model = problem.model()
    batches = Batches(*problem.train, batch_size=config.batch_size, seed=config.seed)
    optimizer = make_optimizer(config, model)
    schedule = make_schedule(config, optimizer, len(batches))
    if problem.task == "classification":
        classes = len(problem.labels)
        loss = classification_loss(config.label_smoothing, _class_weights(config, problem))
        return Task(
            model, optimizer, schedule, batches, loss,
            validate=lambda: _judge_classes(model, problem.validation, classes),
            score=lambda scores: (scores["accuracy"], scores["macro_f1"], -scores["loss"]),
        )  # fmt: skip
    return Task(
        model, optimizer, schedule, batches, lambda x, y: ops.mse_loss(ops.flatten(model(x), 0), y),
        validate=lambda: _judge_numbers(model, problem),
        score=lambda scores: (-scores["loss"],),
    )  # fmt: skip


def make_optimizer(config: TrainText | TrainTable, model: nn.Module) -> Any:
    """The optimiser named in the settings, with its usual constants."""
    parameters = list(model.parameters())
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return optim.SGD(parameters, momentum=0.9, **options)
    makers = {"adamw": optim.AdamW, "adam": optim.Adam, "rmsprop": optim.RMSprop, "adagrad": optim.Adagrad}
    return makers[config.optimizer](parameters, lazy=getattr(config, "lazy", False), **options)


def make_schedule(config: TrainText | TrainTable, optimizer: Any, steps_per_epoch: int) -> Any:
    """The learning rate's course over all steps."""
    steps = config.epochs * steps_per_epoch
    warmup = round(config.warmup * steps_per_epoch)
    if config.schedule == "cosine":
        return optim.CosineLR(optimizer, steps, warmup=warmup)
    return optim.ConstantLR(optimizer, warmup=warmup)


def classification_loss(
    label_smoothing: float, weight: Tensor | None
) -> Callable[[nn.Module], Callable[[CSR | Tensor, Tensor], Tensor]]:
    """Cross-entropy with label smoothing and class weights."""
    return lambda model: lambda x, y: ops.cross_entropy(model(x), y, weight, label_smoothing=label_smoothing)


def outputs(model: nn.Module, features: Any) -> np.ndarray:
    """The model's outputs [N, K] for features of a split: a scipy CSR matrix or an array [N, F]."""
    device = default_device()
    batches = Batches(features, np.zeros(features.shape[0], dtype=np.int64), EVALUATION_BATCH, shuffle=False)
    parts = [np.zeros((0, 0), dtype=np.float32)]
    with no_grad():
        model.eval()
        for x, _ in batches.epoch(0):
            parts.append(model(x.to(device) if isinstance(x, CSR) else Tensor(x.to(device))).data.cpu().numpy())
    return np.concatenate(parts[1:]) if len(parts) > 1 else parts[0]
