"""Makes a run of each kind as this version writes them, a few kilobytes each, for `test_old.py` to read ever after.

    python -m tests.old.make tests/old/NAME

NAME says which formats they have: `formats-1` has version 1 of every one. When a format gets a new version, a new
folder is made and the old ones stay. A kind has two runs: KIND is finished, KIND-stopped was interrupted half way and
is to be continued. generator.safetensors and evaluator.safetensors are models as single files, made/ is a folder of
`minidl generate`. `expected.json` has what the models answer and generate.
"""

import json
import os
import random
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image
from typer.testing import CliRunner

from minidl.cli import app
from minidl.generation import evaluator
from minidl.models import dcgan

FEW = ("--device", "cpu", "--no-plots", "--quiet", "--seed", "5")
KINDS = {
    "text": ("--data", "texts.csv", "--hidden", "4", "--epochs", "4", "--batch-size", "16", "--lr", "0.05"),
    "table": ("--data", "houses.csv", "--target", "price", "--hidden", "4,3", "--epochs", "4", "--batch-size", "16"),
    "classes": ("--data", "houses.csv", "--target", "kind", "--hidden", "4", "--epochs", "4", "--optimizer", "sgd"),
    "images": ("--data", "pictures", "--size", "3", "--optimizer", "sgd", "--epochs", "2", "--batch-size", "8"),
    "gan": ("--data", "pictures", "--latent", "3", "--width", "1", "--epochs", "2", "--batch-size", "8"),
}  # fmt: skip
ASKED = {
    "text": ("crude oil barrel", "wheat harvest", "nothing known"),
    "table": ('{"size": 100, "age": 10, "kind": "house"}', '{"size": 20.5, "age": 80, "kind": "boat"}'),
    "classes": ('{"size": 100, "age": 10, "price": 300}',),
    "images": ("pictures/dark/1.png", "pictures/light/2.png"),
}
STOP_AFTER = 3  # steps
# What a reader needs of a run; the rest are pictures.
_KEPT = (".json", ".jsonl", ".txt", ".safetensors")


class Stopped:
    """`Interrupts` that asks to stop after STOP_AFTER looks, as Ctrl-C would."""

    def __init__(self):
        self.looks = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def requested(self):
        self.looks += 1
        return self.looks >= STOP_AFTER


def minidl(*arguments, code=0):
    """Runs the command in this process; its standard output. Raises when it ends with another code."""
    threads = torch.get_num_threads()
    try:
        done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(map(str, arguments)))
    finally:
        torch.set_num_threads(threads)
    if done.exit_code != code:
        raise RuntimeError(f"minidl {' '.join(map(str, arguments))}: {done.exit_code}, {done.stderr}{done.exception!r}")
    return done.stdout


def command(kind):
    """The name of the command that trains a kind."""
    return "table" if kind == "classes" else kind


def answers(kind):
    """What the finished run of a kind in the current folder answers."""
    return [json.loads(line) for line in minidl("predict", kind, *ASKED[kind]).splitlines()]


def pictures(folder, run):
    """The floats that a GAN run generates from three seeds, [3, C, H, W]."""
    minidl("generate", "--model", run, "--seeds", "0-2", "--format", "npy", "--out", folder, "--quiet")
    return np.load(folder / "images.npy")


def write_data():
    """texts.csv, houses.csv and a folder of pictures, in the current folder."""
    draw = random.Random(0)
    words = {"crude": "oil barrel opec tanker crude", "grain": "wheat corn harvest flour grain"}
    lines = ["text,label"]
    for i in range(60):
        label = sorted(words)[i % 2]
        lines.append(f"{' '.join(draw.sample(words[label].split(), 3))} the of n{i},{label}")
    Path("texts.csv").write_text("\n".join(lines) + "\n")
    lines = ["size,age,kind,price"]
    for _ in range(60):
        size, age, kind = draw.uniform(20, 200), draw.uniform(0, 80), draw.choice(["house", "flat"])
        lines.append(f"{size:.1f},{age:.1f},{kind},{3 * size - age + 50 * (kind == 'house'):.1f}")
    Path("houses.csv").write_text("\n".join(lines) + "\n")
    for name, least in (("dark", 0), ("light", 128)):
        Path("pictures", name).mkdir(parents=True)
        for i in range(12):
            pixels = bytes(least + draw.randrange(128) for _ in range(64))
            Image.frombytes("L", (8, 8), pixels).save(f"pictures/{name}/{i}.png")


def make_runs():
    """A finished and a stopped run of each kind in the current folder."""
    for kind, settings in KINDS.items():
        minidl("train", command(kind), *settings, *FEW, "--out", kind)
        with mock.patch("minidl.training.loop.trainer.Interrupts", Stopped):
            minidl("train", command(kind), *settings, *FEW, "--out", f"{kind}-stopped", code=130)
        for path in Path(kind).rglob("*"):
            if path.is_file() and path.suffix not in _KEPT:
                path.unlink()
        # A finished run is read without them.
        shutil.rmtree(Path(kind) / "checkpoints")
        shutil.rmtree(Path(kind) / "samples", ignore_errors=True)


def features():
    """What the evaluator in a file makes of four pictures, [4, d]."""
    pixels = np.arange(36, dtype=np.uint8).reshape(4, 3, 3, 1) * 7
    return evaluator.load(Path("evaluator.safetensors")).read(pixels)[0]


def main(folder):
    """Fill an empty folder."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    write_data()
    make_runs()
    dcgan.save_generator(dcgan.load_generator("gan"), "generator.safetensors", command="minidl", seed=5)
    evaluator.save(Path("images"), Path("evaluator.safetensors"), {})
    minidl("generate", "--model", "gan", "--seeds", "0", "--out", "made", "--quiet")
    expected = {
        "answers": {kind: answers(kind) for kind in ASKED},
        "pictures": pictures(Path("array"), "gan").tolist(),
        "features": features().tolist(),
    }
    Path("expected.json").write_text(json.dumps(expected) + "\n")
    shutil.rmtree("array")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
