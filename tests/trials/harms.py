"""Files that are cut off or have a wrong bit, and who reads them."""

import gzip
import hashlib
import json
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from minidl.cli.common import errors
from minidl.data import download, files, pictures
from minidl.data.download import gunzip
from minidl.data.images import parse_idx
from minidl.generation import built_in, evaluator, latents
from minidl.generation import model as models
from minidl.runtime import tile_tables
from minidl.tools.bench import results
from tests.trials import child, writers
from tests.trials.same import differences

HARMS = ("flip", "cut", "zeros")


@dataclass(frozen=True)
class Target:
    """A file of the folder `base`, and how it is read: `argv`, or `read` of the harmed file, in a copy of the folder.

    `checked` where every change must be told or make no difference; else an answer may be another one.
    """

    name: str
    base: Path
    file: str
    argv: tuple = ()
    read: object = None
    checked: bool = True
    resumed: bool = False  # `argv` continues a run, which must then be that of its reference


def harm(path, kind, draw):
    """Change a file; False when that is no change."""
    content = path.read_bytes()
    if kind == "cut":
        changed = content[: draw.randrange(len(content))]
    elif kind == "flip":
        place = draw.randrange(8 * len(content))
        altered = bytearray(content)
        altered[place // 8] ^= 1 << place % 8
        changed = bytes(altered)
    else:
        start = draw.randrange(len(content))
        changed = content[:start] + bytes(len(content[start : start + 512])) + content[start + 512 :]
    path.write_bytes(changed)
    return changed != content


def harmed(target, kind, draw, folder, answers, reference):
    """Read a harmed copy; what is wrong with the outcome. `answers` keeps what the whole files give."""
    copy = folder / "copy"
    if target not in answers:
        shutil.copytree(target.base, copy)
        answers[target] = _read(target, copy, folder)
        assert answers[target].code == 0, (target, answers[target])
        shutil.rmtree(copy)
    shutil.copytree(target.base, copy)
    if not harm(copy / target.file, kind, draw):
        return []
    ended = _read(target, copy, folder)
    found = child.wrongs(ended, (0, 1, 2))
    if ended.code == 0 and target.checked:
        if target.resumed:
            found += differences(copy, reference)
        elif ended.out != answers[target].out:
            found.append(f"another answer: {ended.out[:300]!r} in place of {answers[target].out[:300]!r}")
    return found


def _read(target, copy, folder):
    if target.argv:
        argv = [str(word).replace("COPY", str(copy)) for word in target.argv]
        return child.command(argv, folder / "log")

    def read():
        with errors():
            print(target.read(copy / target.file))

    return child.call(read, folder / "log")


def targets(runs, data):
    """All of them. `runs` are finished runs by kind, "open" an unfinished one; files are made in `data`."""
    found = []
    row = '{"a": 1.5, "b": -0.5}'
    asked = {
        "text": ("predict", "COPY", "oil barrel of the opec"),
        "table": ("predict", "COPY", row),
        "images": ("predict", "COPY", data / "one.png"),
        "gan": ("generate", "--model", "COPY", "--count", "2", "--format", "npy", "--quiet", "--out", "COPY/made"),
    }
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 3).save(data / "one.png")
    for kind, argv in asked.items():
        if kind not in runs:
            continue
        for file in ("config.json", "model.safetensors", "report.json", *DOCUMENTS[kind]):
            read = None if kind != "gan" else made
            found.append(Target(f"{kind} {file}", runs[kind], file, () if read else argv, read))
    argv = ("train", "text", "--out", "COPY", "--resume", "--no-plots")
    found += [
        Target("checkpoint", runs["open"], f"checkpoints/{path.name}", argv, resumed=True)
        for path in sorted((runs["open"] / "checkpoints").iterdir())
    ]
    found += [
        Target(f"unfinished {name}", runs["open"], name, argv, resumed=True)
        for name in ("config.json", "labels.json", "vocabulary.json", "metrics.jsonl", "environment.json")
    ]
    return found + _data_targets(data)


DOCUMENTS = {
    "text": ("labels.json", "vocabulary.json"), "table": ("schema.json",), "images": ("labels.json", "pictures.json"),
    "gan": (),
}  # fmt: skip


def made(path):
    """What a generator makes, as text: `path` is a file of its run, or its own."""
    loaded = models.load(str(path if path.name == "generator.safetensors" else path.parent))
    z = latents.from_seeds([0, 1], loaded.latent, None)
    from minidl.generation import passes

    return digest(passes.everything(loaded.generator, z, loaded.channels, loaded.size))


def digest(array):
    return array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _built_in(path):
    built_in.FOLDER = path.parent
    if "evaluator" in path.name:
        return digest(evaluator.load(path).read(np.zeros((1, 28, 28, 1), np.uint8))[0])
    return models.load("mnist").sha256


def _idx(path):
    values = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
    resource = download.Resource(
        path.name, [], lambda raw: {"images": parse_idx(gunzip(raw, 1000), 3, "x").tobytes()},
        hashlib.sha256(values.tobytes()).hexdigest(), 1000,
    )  # fmt: skip
    os.environ["MINIDL_DATA"] = str(path.parent)
    return hashlib.sha256(download.fetch(resource)[0]["images"]).hexdigest()


def _data_targets(data):
    folder = data / "files"
    folder.mkdir()
    values = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
    head = struct.pack(">HBB3I", 0, 8, 3, *values.shape)
    (folder / "images.gz").write_bytes(gzip.compress(head + values.tobytes()))
    (folder / "images.idx").write_bytes(head + values.tobytes())
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8))
    for suffix in ("png", "bmp", "gif", "jpg", "tif", "webp", "ppm"):
        picture.save(folder / f"a.{suffix}")
    rows = [{"text": f"oil and wheat {i}", "label": "ab"[i % 2]} for i in range(12)]
    (folder / "a.csv").write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows))
    (folder / "a.tsv").write_text("text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in rows))
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    z = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    np.save(folder / "z.npy", z)
    np.savetxt(folder / "z.txt", z)
    shutil.copy(tile_tables.FOLDER / "softmax.json", folder)
    writers.measured(folder, 1)
    writers.generator(folder, 1)
    shutil.copytree(built_in.FOLDER, data / "weights")

    def unchecked(kind, file, read):
        return Target(f"{kind} {Path(file).suffix[1:] or file}", folder, file, read=read, checked=False)

    return [
        Target("data IDX", folder, "images.gz", read=_idx),
        Target("picture PNG", folder, "a.png", read=_picture),
        Target("exported generator", folder, "generator.safetensors", read=made),
        Target("built-in generator", data / "weights", "mnist.safetensors", read=_built_in),
        Target("built-in evaluator", data / "weights", "mnist-evaluator.safetensors", read=_built_in),
        *(unchecked("picture", f"a.{suffix}", _picture) for suffix in ("bmp", "gif", "jpg", "tif", "webp", "ppm")),
        *(unchecked("data", f"a.{suffix}", _rows) for suffix in ("csv", "tsv", "jsonl")),
        *(unchecked("latents", f"z.{suffix}", lambda path: latents.read(path, 5).shape) for suffix in ("npy", "txt")),
        unchecked("data", "images.idx", lambda path: digest(parse_idx(path.read_bytes(), 3, str(path)))),
        unchecked("tile table", "softmax.json", lambda path: sorted(tile_tables.load(path))),
        unchecked("bench results", "bench.json", lambda path: len(results.load(path).rows)),
    ]


def _picture(path):
    return digest(pictures.read_picture(path, (9, 7), 3))


def _rows(path):
    return len(files.read_records(path).rows)
