"""`minidl train gan`: a DCGAN, which generates pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from pydantic import Field

from minidl.common.console import one_line
from minidl.data import ImageDataset
from minidl.errors import ConfigError
from minidl.training.settings import fields
from minidl.training.task import Experiment
from minidl.training.tasks.images import PictureSettings, PictureTask

if TYPE_CHECKING:
    import numpy as np

    from minidl.training.loop.gan import GanTrainer
    from minidl.training.process import out_of_memory
    from minidl.training.process.display import Display
    from minidl.training.run_folder.manifest import RunFiles

MIDDLE = 127.5  # mean and deviation of the pixels: the networks' pictures range from -1 to 1, as tanh does


def _by_data(default: float, digits: float, text: str) -> Any:
    """Return a field whose default depends on the data: pictures of 28 pixels or more, or digits."""
    return Field(
        default_factory=lambda values: digits if values.get("data") == "digits" else default,
        description=f"{text} Default: {digits} for digits, else {default}.",
    )


class TrainGan(PictureSettings):
    """Train a generator of pictures: a DCGAN.

    After every epoch 64 samples from fixed noise are saved as a grid; at the end the grids become an animation. Classes
    are not used. Ctrl-C saves the run and prints the command that continues it.
    """

    examples = (
        "minidl train gan --data digits --epochs 1 --out runs/first-gan",
        "minidl train gan --data mnist --out runs/mnist-gan",
        "minidl train gan --data photos --size 64 --out runs/photos-gan",
        "minidl train gan --out runs/mnist-gan --resume",
    )
    data: Annotated[
        fields.Data,
        Field(description="digits, mnist, fashion-mnist, or a folder with one folder of pictures per class."),
    ]
    size: fields.Size = None
    epochs: fields.Epochs = _by_data(65, 10, "Number of passes over the pictures.")
    batch_size: Annotated[fields.BatchSize, Field(ge=2)] = _by_data(128, 32, "Number of pictures per step.")
    lr: fields.LearningRate = _by_data(6e-4, 1e-3, "Learning rate of both networks.")
    latent: Annotated[int, Field(ge=1, le=65536)] = _by_data(
        100, 32, "Size of the latent: how many random numbers a picture is generated from."
    )
    width: Annotated[int, Field(ge=1, le=1024)] = _by_data(
        64, 16, "Channels of the layer next to the picture; deeper layers have 2, 4 or 8 times as many."
    )
    seed: fields.Seed = 0
    shards: fields.Shards = None
    sync_batch_norm: fields.SyncBatchNorm = None
    precision: fields.Precision = "float32"
    plots: Annotated[bool, Field(description="Do not draw curves; sample grids are always saved.")] = True


class GanTask(PictureTask[TrainGan]):
    """The task of generating pictures; their classes are not used."""

    name = "gan"
    run = "a gan run"
    settings = TrainGan
    files = ("curves.png", "training.gif", "evaluation.json", "nearest.png")
    updates = 2
    generates = True

    def prepare(self, config: TrainGan, dataset: ImageDataset) -> GanExperiment:
        """Return the experiment. Raises ConfigError for an unsuitable picture size, and for a run of other networks."""
        return GanExperiment(config, dataset)

    def predictor(self, config: TrainGan, run: RunFiles) -> NoReturn:
        """Raise ConfigError: a GAN makes no predictions."""
        raise ConfigError(
            f"{config.out} is {self.run}, which generates pictures and cannot predict; its samples are in"
            f" {config.out}/samples"
        )

    def as_text(self, report: dict[str, Any]) -> str:
        """Return the text of a report."""
        from minidl.training.loop.adversaries import PENALTY
        from minidl.training.loop.gan import format_figures
        from minidl.training.report import report_files

        source, optimizer, parameters = report["source"], report["optimizer"], report["parameters"]
        training = f"{report_files.count(report['epochs'], 'epoch')}, {report_files.count(report['steps'], 'step')}"
        speed = f"{report['images_per_second']:,.0f} pictures a second"
        pairs = [
            ("source", f"{source.get('about', source['name'])}; {source['examples']:,} pictures"),
            *report_files.notes(source),
            ("device", report_files.device(report)),
            ("data parallel", report_files.data_parallel(report)),
            ("training", f"{training}, {report['seconds']:.1f} s, {speed}"),
            ("seed", str(report["seed"])),
            ("generator", f"{parameters['generator']:,} parameters, {report['model']['latent']} latent numbers"),
            ("discriminator", f"{parameters['discriminator']:,} parameters, gradient penalty {PENALTY:g}"),
            ("optimizer", f"{optimizer['name']}, rate {optimizer['lr']:g}, batches of {optimizer['batch_size']}"),
            ("precision", report["precision"]),
            ("updates skipped", str(report["skipped"]) if report["skipped"] else ""),
            *report_files.resumptions(report),
            ("last epoch", format_figures(report, ", ")),
        ]
        return "\n".join([one_line(f"generator of {report['data']}"), "", *report_files.pairs(pairs)]) + "\n"


class GanExperiment(Experiment[TrainGan]):
    """Generator and discriminator for the pictures of a data set."""

    scaled_by = ("width", "latent")

    def __init__(self, config: TrainGan, dataset: ImageDataset) -> None:
        from minidl.training.run_folder import files

        self.documents: dict[str, str] = {}
        self.config, self.dataset = config, dataset
        self.model: dict[str, Any] = model_settings(config, dataset)
        path = config.out / "config.json"
        saved = files.read_json(path).get("model") if config.resume and path.exists() else self.model
        if saved != self.model:  # another version of minidl started the run
            raise ConfigError(
                f"the networks of {config.out} ({saved}) are not those of this version of minidl ({self.model}): train "
                "again with --overwrite"
            )
        self.pixels = training_pixels(dataset)
        self.batch_size = min(config.batch_size, len(self.pixels))

    @property
    def introduction(self) -> str:
        count, height, width, channels = self.pixels.shape
        colours = "grey" if channels == 1 else "colour"
        notes = "".join(f"\nnote: {note}" for note in self.dataset.source.get("notes", ()))
        return f"{one_line(self.config.data)}: {count:,} {colours} pictures of {height} x {width} pixels{notes}"

    def networks(self, config: TrainGan) -> out_of_memory.Networks:
        from minidl import optim
        from minidl.models import Discriminator, Generator

        settings = {**self.model, "width": config.width, "latent": config.latent, "device": "meta"}
        generator = Generator(**settings)
        del settings["latent"]
        discriminator = Discriminator(**settings)
        return [
            (generator, optim.Adam(generator.parameters())),
            (discriminator, optim.Adam(discriminator.parameters())),
            (generator, None),
        ]

    def trainer(self, display: Display, state: dict[str, Any], hint: str) -> GanTrainer:
        import numpy as np

        from minidl import random
        from minidl.data import ImageBatches, Pictures
        from minidl.distributed import shard_optimizer, shards
        from minidl.training.loop.adversaries import Adversaries, latents
        from minidl.training.loop.gan import GanTrainer
        from minidl.training.report import samples

        config, count = self.config, len(self.pixels)
        random.manual_seed(config.seed)
        networks = Adversaries(
            self.model, self.batch_size, config.lr, config.seed, config.capture, shards(config.shards or 1),
            bool(config.sync_batch_norm),
        )  # fmt: skip
        if config.zero:
            shard_optimizer(networks.generator_optimizer)
            shard_optimizer(networks.discriminator_optimizer)
        middle = (MIDDLE,) * self.pixels.shape[3]
        pictures = Pictures(self.pixels, middle, middle)
        batches = ImageBatches(pictures, np.zeros(count, dtype=np.int64), self.batch_size, config.seed)
        z = latents(range(samples.SIDE**2), networks.average.latent)
        return GanTrainer(
            networks, batches, count // self.batch_size, config.epochs, z, config.out, display, state, hint
        )  # fmt: skip

    def report(self, trainer: GanTrainer, device: str) -> dict[str, Any]:
        from minidl.training.loop.gan import FIGURES

        config, progress, networks = self.config, trainer.progress, trainer.networks
        last = progress.history[-1]
        return {
            "task": "gan",
            "kind": "gan",
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
            "source": {**self.dataset.source, "examples": len(self.pixels)},
            **{name: last[name] for name in FIGURES},
        }

    def plot(self, trainer: GanTrainer, report: dict[str, Any]) -> None:
        """Draw curves.png."""
        from minidl.training.report import plots

        plots.gan_curves(self.config.out, trainer.progress.history, plots.shorten(Path(self.config.data).name))

    def closing_note(self) -> str:
        return f"{super().closing_note()}; its pictures are in {self.config.out / 'samples'} and training.gif"


def model_settings(config: TrainGan, dataset: ImageDataset) -> dict[str, Any]:
    """Return the arguments of `Generator` for the data. Raises ConfigError for an unsuitable picture size."""
    from minidl.models import dcgan

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


def training_pixels(dataset: ImageDataset) -> np.ndarray:
    """Return uint8 [N, H, W, C], the training and validation split; evaluation compares with the test split."""
    import numpy as np

    return np.concatenate([dataset.train.pixels, dataset.validation.pixels])
