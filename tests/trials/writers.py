"""Everything that minidl writes, each as a function of a folder and a version, 1 or 2, of the content."""

import hashlib
import json

import numpy as np
import torch

import minidl
from minidl import nn, ops
from minidl.data import download
from minidl.generation import output
from minidl.models import dcgan
from minidl.runtime import launch
from minidl.tools.bench import results
from minidl.tools.bench.goals import GOALS
from minidl.tools.tuning import files as tables
from minidl.training.report import plots, samples
from minidl.training.run_folder import checkpoints, files


def tensors(version):
    return {"a": torch.full((5, 3), float(version)), "b": torch.arange(7) * version}


def settings(folder, version):
    files.write_json(folder / "config.json", {"seed": version, "data": "digits"}, sealed=True)


def model(folder, version):
    files.write_tensors(folder / "model.safetensors", tensors(version))


def vocabulary(folder, version):
    files.write_text(folder / "vocabulary.json", json.dumps({"terms": ["oil", "wheat"] * version}))


def report(folder, version):
    files.write_text(folder / "report.txt", f"accuracy 0.{version}\n")
    files.write_json(folder / "report.json", {"accuracy": version / 10})


def epochs(folder, version):
    files.write_json_lines(folder / "metrics.jsonl", [{"epoch": i, "loss": 1 / (i + version)} for i in range(4)])


def checkpoint(folder, version):
    kept = checkpoints.Checkpoints(folder / "checkpoints")
    kept.save(version, tensors(version), {"m": torch.ones(3) * version}, {"progress": {"steps": version}}, True)
    kept.wait()


def grid(folder, version):
    samples.write_grid(folder / "samples" / "epoch-001.png", np.full((4, 8, 8, 1), 50 * version, np.uint8))


def film(folder, version):
    samples.write_grid(folder / "samples" / "epoch-001.png", np.full((4, 8, 8, 1), 50 * version, np.uint8))
    samples.write_film(folder, 1)


def curves(folder, version):
    history = [{"epoch": 1, "steps": 3, "loss": 1.0 * version, "validation": {"loss": 1.0, "accuracy": 0.5}}]
    plots.curves(folder, history * 2, 1, "title", "loss", [])


def picture(folder, version):
    output.write_picture(folder / "seed-1.png", np.full((8, 8, 1), 50 * version, np.uint8), {"seed": "1"})


def array(folder, version):
    with output.array_file(folder / "images.npy", (3, 1, 4, 4), np.dtype(np.float32)) as write:
        for _ in range(3):
            write(np.full((1, 1, 4, 4), version, np.float32))


def generator(folder, version):
    minidl.manual_seed(version)
    dcgan.save_generator(dcgan.Generator(3, 1, (8, 8), 2), folder / "generator.safetensors", seed=version)


def tile_table(folder, version):
    tables.write_table(folder / "tiles", "softmax", dict(list(launch.table("softmax").items())[:version]))


def measured(folder, version):
    machine = dict.fromkeys(("device", "driver", "torch", "triton", "date"), "x")
    found = results.Results({**machine, "date": f"2026-01-0{version}"})
    found.add(next(iter(GOALS)), {
            "name": "a", "dtype": "float32", "peer": "torch", "error_ok": True, "ratio": 1.0 * version,
            "ours_ms": 1.0, "peer_ms": 1.0 * version, "share_of_floor": 0.5,
        })  # fmt: skip
    found.save(folder / "bench.json")


def trace(folder, version):
    with minidl.profile(folder / "trace.json"):
        ops.relu(minidl.randn(version, seed=0))


def drawing(folder, version):
    minidl.manual_seed(version)
    layer = nn.Linear(2, version)
    minidl.draw(ops.sum(layer(minidl.randn(1, 2, seed=0))), layer).save(folder / "graph.svg")


def downloaded(folder, version):
    """From a mirror that is a file beside the folder."""
    content = b"data" * 100 * version
    mirror = folder.with_name(f"mirror-{version}")
    mirror.write_bytes(content)
    resource = download.Resource(
        "set/data.bin", [mirror.as_uri()], lambda raw: {"data": raw}, hashlib.sha256(content).hexdigest(), 10**6
    )
    download.fetch(resource, cache=folder / "cache", progress=False)


WRITERS = (
    settings, model, vocabulary, report, epochs, checkpoint, grid, film, curves, picture, array, generator, tile_table,
    measured, trace, drawing, downloaded,
)  # fmt: skip
