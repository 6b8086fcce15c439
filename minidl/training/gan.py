"""`minidl train gan`: from settings to a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from minidl import random
from minidl.data import ImageDataset, Pictures
from minidl.data.image_batches import ImageBatches
from minidl.models import dcgan
from minidl.tensor import Tensor, default_device
from minidl.training import files, memory, plots, reports, runs, samples, session
from minidl.training.adversaries import PENALTY, Adversaries, latents
from minidl.training.checkpoints import Checkpoint
from minidl.training.config import TrainGan
from minidl.training.display import Display
from minidl.training.errors import ConfigError
from minidl.training.gan_loop import FIGURES, GanProgress, GanTrainer, shown

KIND = "gan"
MIDDLE = 127.5  # of the pixels: pictures reach from -1 to 1, as tanh does


def train(config: TrainGan, dataset: ImageDataset, checksum: str) -> dict[str, Any]:
    """Train, draw and report: the run in `config.out` is finished afterwards. Returns the content of report.json.

    `checksum` is the data's fingerprint, kept in the run.

    Raises ConfigError, RunError, Interrupted.
    """
    display = Display(config.quiet)
    with session.failures(config, KIND, _batch_size(config)):
        settings = model_settings(config, dataset)
        _check_networks(config, settings)
        pixels = training_pixels(dataset)
        height, width, channels = pixels.shape[1:]
        colours = "grey" if channels == 1 else "colour"
        display.note(f"{config.data}: {len(pixels):,} {colours} pictures of {height} x {width} pixels")
        return session.in_run(
            config, KIND, checksum, {}, display,
            lambda checkpoint: _fit(config, dataset, pixels, settings, checkpoint, display), settings,
        )  # fmt: skip


def model_settings(config: TrainGan, dataset: ImageDataset) -> dict[str, Any]:
    """The arguments of `Generator` for the data. Raises ConfigError for pictures whose size cannot be halved."""
    height, width, channels = dataset.train.pixels.shape[1:]
    layers = dcgan.default_layers((height, width))
    step = 1 << layers
    if height % step or width % step:
        raise ConfigError(
            f"pictures of {height} x {width} pixels cannot be halved {layers} times; give a --size of multiples of 4, "
            "such as 28 or 32, or of multiples of 16 from 64 on"
        )
    return {
        "latent": config.latent,
        "channels": channels,
        "size": [height, width],
        "width": config.width,
        "layers": layers,
        "kernel": dcgan.KERNEL,
    }


def _check_networks(config: TrainGan, settings: dict[str, Any]) -> None:
    """Raises ConfigError when the run to continue has networks of other settings, as another version of minidl made
    them."""
    path = config.out / "config.json"
    if config.resume and path.exists():
        saved = files.read_json(path).get("model")
        if saved != settings:
            raise ConfigError(
                f"the networks of {config.out} ({saved}) are not those of this version of minidl ({settings}): train "
                "again with --overwrite"
            )


def training_pixels(dataset: ImageDataset) -> np.ndarray:
    """uint8 [N, H, W, C]: training and validation split; the test split stays unseen, to compare with."""
    return np.concatenate([dataset.train.pixels, dataset.validation.pixels])


def _batch_size(config: TrainGan) -> int:
    assert config.batch_size is not None
    return config.batch_size


def _fit(
    config: TrainGan,
    dataset: ImageDataset,
    pixels: np.ndarray,
    settings: dict[str, Any],
    checkpoint: Checkpoint | None,
    display: Display,
) -> dict[str, Any]:
    assert config.epochs is not None
    assert config.lr is not None
    described = session.prepare(config, config.precision, checkpoint, convolves=True)
    random.manual_seed(config.seed)
    batch_size = min(_batch_size(config), len(pixels))
    networks = Adversaries(settings, batch_size, config.lr, config.seed, config.capture)
    middle = (MIDDLE,) * pixels.shape[3]
    batches = ImageBatches(
        Pictures(pixels, middle, middle), np.zeros(len(pixels), dtype=np.int64), batch_size, config.seed
    )
    state = {"config": config.identity(), "environment": described}
    z = latents(range(samples.SIDE**2), networks.average.latent)
    trainer = GanTrainer(
        networks, batches, len(pixels) // batch_size, config.epochs, z, config.out, display, state,
        runs.resume_command(KIND, config.out),
    )  # fmt: skip
    resumed: dict[str, Any] = {}
    if checkpoint is not None:
        trainer.restore(checkpoint)
        resumed = session.resumed(checkpoint, described, trainer.progress.place, display)
        trainer.state.update(resumed)
        display.note(f"going on after {trainer.progress.place}")
    lr = config.lr

    def attempt(size: int) -> None:
        """A step of other networks with batches of another size."""
        others = Adversaries(settings, size, lr, config.seed, captured=False)
        others.step(Tensor(torch.zeros(size, *pixels.shape[3:], *pixels.shape[1:3], device=default_device())))

    smaller = memory.BATCH_SIZE if checkpoint is None else memory.NEW_RUN
    progress = memory.guarded(trainer.run, batch_size, attempt, 0.5 if config.capture else 1.0, smaller)

    report = {**_report(config, dataset, len(pixels), networks, progress, described["device"]), **resumed}
    files.write_tensors(config.out / "model.safetensors", networks.average.state_dict())
    samples.write_film(config.out, progress.epoch)
    plotted = _plot(config, progress)
    text = as_text(report)
    files.write_text(config.out / "report.txt", text)
    files.write_json(config.out / "report.json", report)
    display.note("\n" + text)
    for note in (plotted, runs.finish(config.out)):
        if note:
            display.note(note)
    display.note(f"the run is in {config.out}; its pictures are in {samples.folder(config.out)} and training.gif")
    return report


def _report(
    config: TrainGan, dataset: ImageDataset, count: int, networks: Adversaries, progress: GanProgress, device: str
) -> dict[str, Any]:
    """The content of report.json."""
    last = progress.history[-1]
    return {
        "task": "gan",
        "kind": KIND,
        "data": config.data,
        "device": device,
        "seconds": round(progress.seconds, 2),
        "epochs": progress.epoch,
        "steps": progress.steps,
        "skipped": progress.skipped,
        "seed": config.seed,
        "images_per_second": round(progress.steps * networks.batch_size / progress.seconds, 1),
        "parameters": {
            "generator": networks.generator.num_parameters(),
            "discriminator": networks.discriminator.num_parameters(),
        },
        "model": networks.average.settings,
        "optimizer": {"name": "adam", "lr": config.lr, "batch_size": networks.batch_size},
        "precision": config.precision,
        "source": {**dataset.source, "examples": count},
        **{name: last[name] for name in FIGURES},
    }


def as_text(report: dict[str, Any]) -> str:
    """The report as plain text."""
    source, optimizer, parameters = report["source"], report["optimizer"], report["parameters"]
    training = f"{reports.count(report['epochs'], 'epoch')}, {reports.count(report['steps'], 'step')}"
    pairs = [
        ("source", f"{source.get('about', source['name'])}; {source['examples']:,} pictures"),
        ("device", "cpu (interpreted)" if report["device"] == "cpu" else report["device"]),
        ("training", f"{training}, {report['seconds']:.1f} s, {report['images_per_second']:,.0f} pictures a second"),
        ("seed", str(report["seed"])),
        ("generator", f"{parameters['generator']:,} parameters, {report['model']['latent']} latent numbers"),
        ("discriminator", f"{parameters['discriminator']:,} parameters, gradient penalty {PENALTY:g}"),
        ("optimizer", f"{optimizer['name']}, rate {optimizer['lr']:g}, batches of {optimizer['batch_size']}"),
        ("precision", report["precision"]),
        ("updates skipped", str(report["skipped"]) if report["skipped"] else ""),
        *reports.resumptions(report),
        ("last epoch", shown(report, ", ")),
    ]
    return "\n".join([f"generator of {report['data']}", "", *reports.pairs(pairs)]) + "\n"


def _plot(config: TrainGan, progress: GanProgress) -> str | None:
    if not config.plots:
        return None
    if not plots.available():
        return plots.MISSING
    plots.gan_curves(config.out, progress.history, plots.shorten(Path(config.data).name))
    return None
