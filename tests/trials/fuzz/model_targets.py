"""Files of models, runs and checkpoints, and the JSON that minidl reads back."""

import contextlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save

from minidl.common import write_files
from minidl.data import DataError
from minidl.data.files import Records
from minidl.data.hashing import HashedTfidf
from minidl.data.schema import TableSchema
from minidl.data.vectorizer import Tfidf, TfidfOptions, _checksum
from minidl.errors import ConfigError, DamagedError, RunError
from minidl.generation import evaluator, model, passes
from minidl.generation import folder as album
from minidl.models import dcgan
from minidl.runtime import launch, tile_tables
from minidl.tools.bench import results
from minidl.tools.bench import run as bench_run
from minidl.training.loop.adversaries import Adversaries
from minidl.training.loop.epochs import Trainer
from minidl.training.loop.gan import GanTrainer
from minidl.training.prediction import predict
from minidl.training.process.display import Display
from minidl.training.run_folder import files
from minidl.training.run_folder.checkpoints import Checkpoints
from minidl.training.run_folder.folder import RunFolder
from minidl.training.tasks import TASKS
from minidl.training.tasks.gan import model_settings, training_pixels
from minidl.training.tasks.images import PictureFormat
from tests.trials.fuzz import mutate
from tests.trials.fuzz.data_targets import OLD
from tests.trials.fuzz.target import Target, after_first, variants


def sealed(content: bytes) -> bytes:
    """A safetensors file with the checksum that its tensors have; what cannot be read stays as it is."""
    with contextlib.suppress(Exception):
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header["__metadata__"] = {"sha256": write_files.checksum(load(content))}
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]
    return content


def vocabulary(folder: Path) -> Target:
    """vocabulary.json."""
    return _vectorizer(Tfidf, (OLD / "text/vocabulary.json").read_bytes(), ("options", "terms", "idf"))


def hashing(folder: Path) -> Target:
    """hashing.json."""
    fitted = HashedTfidf.fit(["crude oil", "wheat and corn"], TfidfOptions(min_df=1, max_features=8))
    return _vectorizer(HashedTfidf, fitted.to_json().encode(), ("options", "texts", "found"))


def _vectorizer(kind: type[Tfidf | HashedTfidf], seed: bytes, names: tuple[str, ...]) -> Target:
    def repair(content: bytes) -> bytes:
        with contextlib.suppress(Exception):
            found = json.loads(content)
            found["sha256"] = _checksum({key: found[key] for key in names})
            return json.dumps(found).encode()
        return content

    def run(content: bytes) -> object:
        try:
            text = content.decode()
        except UnicodeDecodeError:  # told by files.read_text
            return None
        return kind.from_json(text, "input").transform(["crude oil and wheat", "", "\ud800 x"[2:]])

    return Target(run, [seed], (DataError,), change=mutate.change_json, repair=repair)


def schema(folder: Path) -> Target:
    """schema.json of tables, with a row that has its columns."""
    rows = [[100, 10, "house", 300], ["50.5", None, "flat", "x"]]
    records = Records(Path("row"), ["size", "age", "kind", "price"], rows, [1, 2], "")

    def run(content: bytes) -> object:
        try:
            text = content.decode()
        except UnicodeDecodeError:
            return None
        found = TableSchema.from_json(text, "input")
        return found.features(records), found.unknown(records)

    seeds = [(OLD / kind / "schema.json").read_bytes() for kind in ("table", "classes")]
    return Target(run, seeds, (DataError,), change=mutate.change_json)


def picture_format(folder: Path) -> Target:
    """pictures.json."""
    return Target(
        lambda content: PictureFormat.from_json(content.decode("utf-8", "ignore"), "input"),
        [(OLD / "images/pictures.json").read_bytes()], (DataError,), change=mutate.change_json,
    )  # fmt: skip


def tensors(folder: Path) -> Target:
    """Tensor files with a checksum, and the state_dict of another program's generator."""
    state = {
        "main.0.weight": torch.zeros(2, 4, 4, 4), "main.1.weight": torch.zeros(4), "main.1.bias": torch.zeros(4),
        "main.1.running_mean": torch.zeros(4), "main.1.running_var": torch.ones(4),
        "main.1.num_batches_tracked": torch.tensor(0), "main.3.weight": torch.zeros(4, 1, 4, 4),
    }  # fmt: skip
    kinds = [
        torch.zeros(3, dtype=kind)
        for kind in (torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64)
    ]
    plain = save(
        {f"t{i}": tensor for i, tensor in enumerate(kinds)} | {"empty": torch.zeros(0, 3), "one": torch.tensor(1.0)}
    )
    null = save({"a": torch.zeros(1)}).replace(b'{"a"', b'{"__metadata__":null,"a"')
    null = struct.pack("<Q", struct.unpack("<Q", null[:8])[0] + len(b'"__metadata__":null,')) + null[8:]

    def run(content: bytes) -> object:
        if content[:1] == b"\1":
            try:
                given = load(content[1:])
            except Exception:  # noqa: BLE001  (the library's own)
                return None
            return dcgan.from_pytorch_examples(given)
        path = Path("input.safetensors")
        path.write_bytes(content[1:])
        return files.read_tensors(path)

    huge = struct.pack("<Q", 2**62) + b"{}"
    claim = b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    stored = [
        (OLD / "text/model.safetensors").read_bytes(),
        sealed(plain),
        null,
        huge,
        struct.pack("<Q", len(claim)) + claim,
    ]
    return Target(
        run, variants(stored, [save(state)]), (DamagedError, ValueError), change=after_first(mutate.change_safetensors),
        repair=lambda content: content[:1] + sealed(content[1:]) if content[:1] == b"\0" else content,
    )  # fmt: skip


def generator(folder: Path) -> Target:
    """The .safetensors file of a generator, and a picture from it."""

    def run(content: bytes) -> object:
        path = Path("input.safetensors")
        path.write_bytes(content)
        found = model.load(str(path))
        z = np.zeros((1, found.latent), np.float32)
        for part in passes.images(found.generator, z, found.channels, found.size, 1):
            passes.check_finite(part, 0)
        return found

    return Target(
        run,
        [(OLD / "generator.safetensors").read_bytes()],
        (DamagedError, ConfigError, RunError),
        change=mutate.change_safetensors,
    )


def classifier(folder: Path) -> Target:
    """The .safetensors file of an evaluator."""

    def run(content: bytes) -> object:
        path = Path("input.safetensors")
        path.write_bytes(content)
        found = evaluator.load(path)
        return found.read(np.zeros((1, *found.format.shape), np.uint8))

    return Target(
        run, [(OLD / "evaluator.safetensors").read_bytes()], (DamagedError,), change=mutate.change_safetensors
    )


_RUN_FILES = tuple(
    (kind, name)
    for kind, names in {
        "text": ("config.json", "labels.json", "vocabulary.json", "model.safetensors", "report.json"),
        "table": ("config.json", "schema.json", "model.safetensors"),
        "classes": ("config.json", "schema.json", "model.safetensors"),
        "images": ("config.json", "labels.json", "pictures.json", "model.safetensors"),
        "gan": ("config.json", "model.safetensors", "report.json"),
    }.items()
    for name in names
)


def _change_file(draw, content: bytes) -> bytes:
    """A change of a file of a run: its first byte says which."""
    kinds = (mutate.change_safetensors, mutate.change_json)
    return content[:1] + kinds[content[1:2] in b"{["](draw, content[1:])


def _seal_file(content: bytes) -> bytes:
    return content[:1] + (content[1:] if content[1:2] in b"{[" else sealed(content[1:]))


def run(folder: Path) -> Target:
    """Finished runs with one file exchanged, read to answer; documents have no checksums, as in the oldest runs."""
    for kind in ("text", "table", "classes", "images", "gan"):
        shutil.copytree(OLD / kind, folder / kind)
        config = json.loads((folder / kind / "config.json").read_text())
        config.pop("documents")
        (folder / kind / "config.json").write_text(json.dumps(config))
    before = {place: (folder / place[0] / place[1]).read_bytes() for place in _RUN_FILES}
    shutil.copy(OLD / "pictures/dark/1.png", folder / "1.png")
    asked = {
        "text": ["crude oil"], "images": [Path("1.png")],
        "table": Records(Path("row"), ["size", "age", "kind"], [[100, 10, "house"]], [1], ""),
        "classes": Records(Path("row"), ["size", "age", "price"], [[100, 10, 5]], [1], ""),
    }  # fmt: skip

    def read(content: bytes) -> object:
        kind, name = place = _RUN_FILES[(content[0] if content else 0) % len(_RUN_FILES)]
        path = Path(kind, name)
        path.write_bytes(content[1:])
        try:
            if kind == "gan":
                return model.load(kind)
            found = predict.load(Path(kind))
            return [line.encode() for line in found.lines(asked[kind], 3)]
        finally:
            path.write_bytes(before[place])

    return Target(
        read, variants(*([content] for content in before.values())), (DamagedError, ConfigError, DataError),
        change=_change_file, repair=_seal_file,
    )  # fmt: skip


def checkpoint(folder: Path) -> Target:
    """A stopped run's checkpoint, read and put into a trainer that would go on."""
    trainers = {}
    with contextlib.chdir(OLD):
        for kind in ("text", "table", "gan"):
            config = RunFolder(Path(f"{kind}-stopped")).read().settings()
            dataset = TASKS[kind].load(config)
            shutil.copytree(f"{kind}-stopped", folder / kind)
            state = {"config": config.identity(), "environment": {}}
            if kind == "gan":
                pixels = training_pixels(dataset)
                networks = Adversaries(model_settings(config, dataset), 8, config.lr, config.seed)
                trainers[kind] = GanTrainer(
                    networks, [], len(pixels) // 8, 2, None, folder / kind, Display(True), state, ""
                )
            else:
                learner = TASKS[kind].prepare(config, dataset).learner()
                trainers[kind] = Trainer(
                    learner, folder / kind, config.epochs, config.patience, Display(True), state, ""
                )
    places = [
        (kind, path.name)
        for kind in trainers
        for path in sorted((folder / kind / "checkpoints").iterdir())
    ]  # fmt: skip
    before = {place: (folder / place[0] / "checkpoints" / place[1]).read_bytes() for place in places}

    def read(content: bytes) -> object:
        kind, name = place = places[(content[0] if content else 0) % len(places)]
        own = Path(kind, "checkpoints")
        (own / name).write_bytes(content[1:])
        last = own / "last.json"
        if name.endswith(".safetensors"):
            with contextlib.suppress(Exception):
                (length,) = struct.unpack("<Q", content[1:9])
                named = json.loads(before[kind, "last.json"])
                named["sha256"] = json.loads(content[9 : 9 + length])["__metadata__"]["sha256"]
                last.write_text(json.dumps(named))
        try:
            found = Checkpoints(own).last()
            if found is not None:
                trainers[kind].restore(found)
            return found
        finally:
            (own / name).write_bytes(before[place])
            last.write_bytes(before[kind, "last.json"])

    return Target(
        read,
        variants(*([content] for content in before.values())),
        (DamagedError,),
        change=_change_file,
        repair=_seal_file,
    )


def tiles(folder: Path) -> Target:
    """Tile tables of a folder that MINIDL_TILES names."""
    families = launch.families()

    def run(content: bytes) -> object:
        path = Path(f"{families[(content[0] if content else 0) % len(families)]}.json")
        path.write_bytes(content[1:])
        return tile_tables.load(path)

    seeds = variants(*([(tile_tables.FOLDER / f"{family}.json").read_bytes()] for family in families))
    return Target(run, seeds, (tile_tables.TableError,), change=after_first(mutate.change_json))


def bench(folder: Path) -> Target:
    """Results of `minidl bench` that `--show` and `--json` read."""
    from minidl.tools.bench.goals import GOALS

    whole = json.loads((Path(__file__).parents[3] / "benchmarks/results/nvidia-h200.json").read_text())
    few = json.dumps({**whole, "rows": whole["rows"][:2]}).encode()

    def run(content: bytes) -> object:
        path = Path("input.json")
        path.write_bytes(content)
        found = results.load(path)
        return bench_run.table(found, list(GOALS)), bench_run.summary(found)

    return Target(run, [few], (ConfigError,), change=mutate.change_json)


def images(folder: Path) -> Target:
    """images.json of a folder that `minidl generate --overwrite` is to empty: nothing else may go."""
    own = Path("made")

    def run(content: bytes) -> object:
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        for name in ("mine.txt", "seed-1.txt", "epoch-1.png"):
            (own / name).write_text("mine")
        (own / "images.json").write_bytes(content)
        new = {"files": [{"file": "seed-000009.png", "seed": 9}], "grid": None}
        try:
            album._check_free(own, album._listed(new), album.check(own, True))
            staged = own / album._STAGED
            staged.mkdir()
            (staged / "seed-000009.png").write_text("new")
            files.write_json(staged / album._MARK, album._MARKED)
            new = album._with_sums(new, staged)
            files.write_json(staged / album.MANIFEST, new)
            album._replace(own, new)
        finally:
            left = {path.name for path in own.iterdir()}
            if not left >= {"mine.txt", "seed-1.txt", "epoch-1.png"}:
                raise AssertionError(f"files of the user's are gone: {left}")
        return None

    return Target(run, [(OLD / "made/images.json").read_bytes()], (ConfigError,), change=mutate.change_json)
