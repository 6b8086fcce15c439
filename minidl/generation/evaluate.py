"""`minidl evaluate` of a generator: the scores of its pictures, and of reference sets with one fault each.

real               training pictures: the best possible
a class missing    training pictures without one class, the one whose absence changes the Frechet distance least
blurred            training pictures under a Gaussian blur of one pixel
ten images         ten training pictures, one of each class, repeated
noise              every pixel drawn from the uniform distribution
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from minidl import data
from minidl.common.console import one_line
from minidl.data import ImageDataset, Images
from minidl.errors import ConfigError
from minidl.generation import evaluator, latents, output, passes, quality
from minidl.generation.config import BUILT_IN, EvaluateGan
from minidl.generation.model import Loaded, load
from minidl.runtime import launch
from minidl.training.process import environment
from minidl.training.run_folder import files
from minidl.training.run_folder.folder import RunFolder
from minidl.training.run_folder.saved_run import SavedRun
from minidl.training.tasks.gan import training_pixels

SAMPLES = 10_000
SAMPLES_CPU = 1_000
_PASS = 64  # images of one pass on a CPU: the last bits do not matter for scores
_SHOWN = 10  # nearest pictures


@dataclass(frozen=True)
class Reference:
    """The real pictures, with the features of the test pictures and their distances to the training pictures."""

    training: Images
    test: Images
    features: np.ndarray
    distances: np.ndarray
    classes: int


def evaluate(config: EvaluateGan) -> dict[str, Any]:
    """Return the report of a generator: its scores, the scores of the references, and how they were computed. In a
    run's folder, also write it as evaluation.json, and the pictures nearest to training pictures as nearest.png.

    Raises ConfigError for a model, data and an evaluator with different shapes of pictures.
    """
    started = time.perf_counter()
    loaded = load(config.model)
    loaded.show_notes()
    name = _data(config, loaded.run)
    judge = (
        evaluator.load(evaluator.built_in(name)) if config.evaluator is None else evaluator.from_run(config.evaluator)
    )
    dataset = data.load_images(name) if config.data or loaded.run is None else loaded.run.load_data()
    _check(loaded, judge, dataset)
    count = config.samples or (SAMPLES_CPU if launch.ON_CPU else SAMPLES)
    reference = reference_of(dataset, judge, count)
    real = subset(reference.training, count)
    pixels = samples(loaded, count)
    generated, neighbours = scores(pixels, judge, reference)
    rows = {"generated": generated, **reference_rows(real, judge, reference)}
    report = {
        "task": "generation",
        "data": name,
        "model": loaded.name,
        "model_sha256": loaded.sha256,
        "evaluator": {"name": judge.name, "sha256": judge.sha256, **judge.about},
        "samples": count,
        "reference": f"{len(reference.test):,} test pictures and {len(reference.training):,} training pictures",
        "device": environment.device_name(),
        "seconds": round(time.perf_counter() - started, 1),
        "scores": rows,
    }
    folder = Path(config.model)
    if config.model not in BUILT_IN and folder.is_dir():
        with RunFolder(folder).add_files("evaluation.json", "nearest.png"):
            files.write_json(folder / "evaluation.json", report)
            write_nearest(folder / "nearest.png", pixels, neighbours, reference.training)
    if config.json_file is not None:
        files.write_json(config.json_file, report)
    return report


def samples(loaded: Loaded, count: int) -> np.ndarray:
    """Return pixels uint8 [count, H, W, C] of the seeds from 0 on."""
    z = latents.from_seeds(range(count), loaded.latent)
    return output.pixels(passes.everything(loaded.generator, z, loaded.channels, loaded.size, None, _PASS))


def reference_of(dataset: ImageDataset, judge: evaluator.Evaluator, count: int) -> Reference:
    """Return the reference for generated pictures, with at most `count` test pictures."""
    test = subset(dataset.test, count)
    labels = np.concatenate([dataset.train.labels, dataset.validation.labels])
    training = Images(training_pixels(dataset), labels)
    features, _ = judge.read(test.pixels)
    distances, _ = quality.nearest(test.pixels, training.pixels)
    return Reference(training, test, features, distances, len(dataset.labels))


def scores(
    pixels: np.ndarray, judge: evaluator.Evaluator, reference: Reference
) -> tuple[dict[str, Any], tuple[np.ndarray, np.ndarray]]:
    """Return (scores of pictures, (distances, indices) of the nearest training pictures)."""
    features, classes = judge.read(pixels)
    values = feature_scores(features, classes, reference)
    distances, indices = quality.nearest(pixels, reference.training.pixels)
    values["memorised"] = quality.memorised(distances, reference.distances)
    values["nearest_percentile"] = quality.median_percentile(distances, reference.distances)
    return values, (distances, indices)


def feature_scores(features: np.ndarray, classes: np.ndarray, reference: Reference) -> dict[str, Any]:
    """Return the scores that follow from features [N, d] and the classes of the pictures."""
    precision, recall = quality.precision_recall(reference.features, features)
    return {
        "frechet": quality.frechet_distance(reference.features, features),
        "kernel": quality.kernel_distance(reference.features, features),
        "precision": precision,
        "recall": recall,
        "classes": quality.histogram(classes, reference.classes),
    }


def reference_rows(real: Images, judge: evaluator.Evaluator, reference: Reference) -> dict[str, dict[str, Any]]:
    """Return the scores of the reference sets by name, without `memorised`: they are training pictures.

    "a class missing" requires enough pictures of the other classes.
    """
    features, predicted = judge.read(real.pixels)
    distances = {
        label: quality.frechet_distance(reference.features, features[real.labels != label])
        for label in np.unique(real.labels).tolist()
        if (real.labels != label).sum() > quality.NEIGHBOURS
    }
    rows = {"real": feature_scores(features, predicted, reference)}
    if distances:
        mildest = min(distances, key=lambda label: distances[label])
        rest = real.labels != mildest
        rows["a class missing"] = {**feature_scores(features[rest], predicted[rest], reference), "missing": mildest}
    for name, pixels in (
        ("blurred", blurred(real.pixels)),
        ("ten images", collapsed(real, len(real))),
        ("noise", noise(real.pixels.shape)),
    ):
        rows[name] = feature_scores(*judge.read(pixels), reference)
    return rows


def blurred(pixels: np.ndarray) -> np.ndarray:
    """Return uint8 [N, H, W, C] under a Gaussian blur with a standard deviation of one pixel."""
    smooth = ndimage.gaussian_filter(pixels.astype(np.float32), (0, 1, 1, 0))
    return np.clip(np.rint(smooth), 0, 255).astype(np.uint8)


def collapsed(images: Images, count: int) -> np.ndarray:
    """Return `count` pictures: the first of each class, repeated."""
    firsts = [int(np.flatnonzero(images.labels == label)[0]) for label in np.unique(images.labels)]
    return images.pixels[np.resize(firsts, count)]


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return pixels uint8 of a shape, drawn from the uniform distribution on 0 to 255."""
    return np.random.Generator(np.random.Philox(seed)).integers(0, 256, shape, dtype=np.uint8)


def subset(images: Images, count: int, seed: int = 0) -> Images:
    """Return `count` different pictures, or all if there are fewer, in a random order that depends on the seed."""
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(images))[:count]
    return Images(images.pixels[order], images.labels[order])


def write_nearest(path: Path, pixels: np.ndarray, neighbours: tuple[np.ndarray, np.ndarray], training: Images) -> None:
    """Write a grid of two rows: the pictures nearest to a training picture, and below each the training picture."""
    distances, indices = neighbours
    first = np.argsort(distances, kind="stable")[:_SHOWN]
    both = np.concatenate([pixels[first], training.pixels[indices[first]]])
    output.write_picture(path, output.grid(both, 2, len(first)), {"Software": "minidl"})


def as_text(report: dict[str, Any]) -> str:
    """Return the report as a table in plain text."""
    judge, model = report["evaluator"]["name"], f"{report['model']} ({report['model_sha256'][:12]})"
    about = f"{report['samples']:,} pictures by {model} compared with {report['data']}, evaluator {judge}"
    lines = [one_line(about), ""]
    heads = f"{'':16}{'Frechet':>10}{'kernel':>11}{'precision':>11}{'recall':>9}{'near copies':>13}"
    lines.append(f"{heads}  classes, least to most")
    for name, row in report["scores"].items():
        shares = sorted(row["classes"])
        copied = f"{row['memorised']:>13.2%}" if "memorised" in row else f"{'':>13}"
        figures = f"{row['frechet']:>10.4g}{row['kernel']:>11.3g}{row['precision']:>11.3f}{row['recall']:>9.3f}"
        lines.append(f"{name:16}{figures}{copied}  {shares[0]:.1%} to {shares[-1]:.1%}")
    nearer = report["scores"]["generated"]["nearest_percentile"]
    lines.append("\nnear copies: the share of pictures nearer to a training picture than 99% of test pictures are")
    lines.append(
        f"the median distance to the nearest training picture is percentile {nearer:.0f} of that of test pictures"
    )
    lines.append(f"computed with {report['reference']}, on {report['device']} in {report['seconds']} s")
    if report["samples"] < SAMPLES:
        few = f"with {report['samples']:,} samples all Frechet distances are too large"
        lines.append(f"{few}: compare them only within this table, or use --samples {SAMPLES}")
    return "\n".join(lines) + "\n"


def _data(config: EvaluateGan, run: SavedRun | None) -> str:
    if config.data is not None:
        return config.data
    if config.model in BUILT_IN:
        return config.model
    if run is not None:
        return str(run.config.get("data"))
    raise ConfigError(f"{config.model} does not say what it was trained on: give --data")


def _check(loaded: Loaded, judge: evaluator.Evaluator, dataset: ImageDataset) -> None:
    """Raise ConfigError if generator, evaluator and data have pictures of different shapes, or there are too few."""
    shapes = {
        "the generator makes": (*loaded.size, loaded.channels),
        f"the evaluator {judge.name} takes": judge.format.shape,
        f"{dataset.name} has": dataset.test.pixels.shape[1:],
    }
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{source} {' x '.join(map(str, shape))}" for source, shape in shapes.items())
        raise ConfigError(f"pictures of different shapes: {listed}; give another --data or --evaluator")
    training = len(dataset.train) + len(dataset.validation)
    for count, what in ((len(dataset.test), "test"), (training, "training")):
        if count <= quality.NEIGHBOURS:
            raise ConfigError(
                f"{dataset.name} has {count} {what} pictures, and the scores need {quality.NEIGHBOURS + 1} or more: "
                "give --data with more pictures"
            )
