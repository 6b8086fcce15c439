"""Command lines, parsed and checked by the commands themselves; what would work for long is left out."""

import json
import os
import shutil
from pathlib import Path
from random import Random
from unittest import mock

from typer.testing import CliRunner

from minidl.cli import app
from minidl.errors import ConfigError
from minidl.tools import doctor
from minidl.tools.doctor import jobs
from minidl.training.tasks import TASKS
from tests.trials.fuzz import limits
from tests.trials.fuzz.data_targets import OLD
from tests.trials.fuzz.target import Target

_LINES = """
train text --data texts.csv --out new --hidden 8,4 --epochs 3 --batch-size 16 --lr 0.1 --optimizer sgd --lazy
train text --data texts.csv --text-column text --label-column label --weight-decay 0.1 --balance 0.5 --out new
train text --data texts.csv --schedule linear --warmup 1 --patience 2 --val-split 0.1 --test-split 0.2 --out new
train text --data texts.csv --max-features 10 --ngrams 2 --min-df 1 --seed 3 --quiet --no-plots --out new
train text --data texts.csv --precision tf32 --device cpu --no-capture --dropout 0.5 --label-smoothing 0.1 --out new
train text --out text-stopped --resume
train text --data texts.csv --out text --overwrite --profile --trace t.json
train table --data houses.csv --target price --task regression --ignore age --missing fill --hidden 4 --out new
train table --data diabetes --out new --epochs 2
train images --data pictures --model small --size 3x4 --shift 1 --flip --out new --precision float16
train images --data pictures --model ece408 --size 28 --no-flip --out new
train gan --data pictures --size 8 --epochs 1 --batch-size 8 --lr 0.001 --latent 3 --width 2 --seed 1 --out new
train gan --out gan-stopped --resume --quiet
generate --out made2 --model gan --seeds 0-3,7 --grid 2x3 --truncation 1.5 --format png --precision float16
generate --out made --model gan --count 2 --overwrite --device cpu --quiet
generate --out made2 --model mnist --interpolate 1 2 --steps 3
generate --out made2 --model generator.safetensors --latents latents.txt --format npy --profile --trace t.json
evaluate text --data texts.csv --text-column text --label-column label --json out.json
evaluate table --device cpu --profile --trace t.json
evaluate gan --samples 10 --evaluator images
evaluate images --data pictures
predict text oil wheat --top 2
predict text --file texts.csv --text-column text
predict table {"size":1,"age":2,"kind":"house"}
predict images pictures/dark pictures/light/1.png --device auto
bench softmax --list
bench --show results.json
bench conv --json r.json --plot r.svg --peers
tune softmax --list --device cpu
tune gemm --only wide --budget 5 --out tiles --dry-run --json r.json --plot p.svg
doctor
doctor --compile --arch 80,90 --only gemm --brief 80 --details --json d.json
--version
--help
train --help
""".strip().splitlines()
_VALUES = (
    "",
    " ",
    "0",
    "-1",
    "1",
    "2",
    "1e400",
    "-1e400",
    "1e-400",
    "nan",
    "NaN",
    "inf",
    "-inf",
    "1" + "0" * 30,
    "9" * 5000,
    "0.5",
    "1.0",
    "0x10",
    "1_000",
    "٣",
    "²",
    "\0",
    "a\0b",
    "\ud800",
    "\udcff.csv",
    "text\udcff",
    "é",
    "🙂",
    "a" * 300,
    "a" * 5000,
    "/",
    ".",
    "..",
    "~",
    "~nobody",
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "/proc/x",
    "//",
    "a/b/c",
    "text",
    "table",
    "gan",
    "images",
    "texts.csv",
    "text/config.json",
    "text/model.safetensors",
    "pictures",
    "loop",
    "pipe",
    "locked",
    "-",
    "--",
    "--help",
    "-h",
    "=",
    "a=b",
    "%s",
    "{}",
    "[red]x[/red]",
    "[/]",
    "[",
    "'",
    '"',
    "\n",
    "\r",
    "\x1b[2J",
    "0-",
    "-",
    "0-99999999999999999999",
    "5-2",
    "1,1",
    ",",
    "8x8",
    "0x0",
    "1000x1000",
    "x",
    "1x",
    "32x48x3",
    "mnist",
    "digits",
    "docstrings",
    "reuters-r8",
    "cpu",
    "cuda",
    "auto",
    "None",
    "True",
    "null",
    "9223372036854775807",
    "9223372036854775808",
    "65536",
    "65537",
    "1000001",
    "3.4028235e38",
    "3.5e38",
)
_FLAGS = sorted({word for line in _LINES for word in line.split() if word.startswith("--")})


def _change(draw: Random, data: bytes) -> bytes:
    """Words of a command line changed. Raises ValueError for what is none."""
    words = json.loads(data)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("no command line")
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(words) + 1)
        what = draw.randrange(8)
        if what <= 2 and at < len(words):
            words[at] = draw.choice(_VALUES)
        elif what == 3:
            words[at:at] = [draw.choice(_FLAGS), draw.choice(_VALUES)]
        elif what == 4:
            words.insert(at, draw.choice([*_FLAGS, *_VALUES]))
        elif what == 5 and at < len(words):
            del words[at]
        elif what == 6 and at < len(words):
            words.insert(at, words[at])
        elif what == 7:
            line = draw.choice(_LINES).split()
            begin = draw.randrange(len(line))
            words[at:at] = line[begin : begin + draw.choice([1, 2, 2, 4])]
    return json.dumps(words[:40]).encode()


def _load(task: object, config: object) -> object:
    if Path(config.data).suffix:
        return real_loads[type(task)](task, config)
    raise ConfigError("a data set that takes time to read")


def _compile(archs: list[int], **options: object) -> int:
    for arch in archs:
        jobs.target_name(arch)
    return 0


real_loads = {type(task): type(task).load for task in TASKS.values()}
_STUBS = {
    **{f"{kind.__module__}.{kind.__name__}.load": _load for kind in real_loads},
    "minidl.training.train.train": lambda *a, **k: {},
    "minidl.generation.generate.generate": lambda *_: 1,
    "minidl.distributed.workers.run": lambda *_, **__: None,
    "minidl.generation.evaluate.evaluate": lambda config: (_ for _ in ()).throw(ConfigError("takes time")),
    "minidl.cli.tune._tune": lambda *a: None,
    "minidl.training.process.environment.fix_threads": lambda count: None,
    "minidl.runtime.launch.set_float32_precision": lambda precision: None,
}


def _fill(folder: Path) -> None:
    """The folder that commands find: runs, data, and what is no usual file."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    shutil.copytree(OLD, folder, dirs_exist_ok=True)
    shutil.copy(Path(__file__).parents[3] / "benchmarks/results/nvidia-h200.json", folder / "results.json")
    (folder / "latents.txt").write_text("1 2 3")
    (folder / "loop").symlink_to("loop")


def _state(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for path, _, names in os.walk(folder):
        for name in names:
            stat = os.lstat(os.path.join(path, name))  # noqa: PTH118  (twice as fast, and often)
            found.append((f"{path}/{name}", stat.st_size, stat.st_mtime_ns))
    return sorted(found)


def command(folder: Path) -> Target:
    """Command lines of every command."""
    _fill(folder)
    before = [_state(folder)]

    def run(data: bytes) -> object:
        try:
            words = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return None
        for name, stub in _STUBS.items():
            mock.patch(name, stub).start()
        mock.patch.object(doctor, "doctor", return_value=0).start()
        mock.patch.object(doctor, "doctor_compile", _compile).start()
        mock.patch.object(doctor, "doctor_files", lambda files, archs, **options: _compile(archs)).start()
        mock.patch.object(doctor, "doctor_warm", return_value=0).start()
        try:
            done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, words)
        finally:
            mock.patch.stopall()
            if _state(folder) != before[0]:
                _fill(folder)
                before[0] = _state(folder)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        said = done.stderr
        if (
            done.exit_code not in (0, 1, 2)
            or "Traceback" in said
            or (done.exit_code and not said.strip() and "Usage" not in done.stdout)
        ):
            raise AssertionError(f"exit code {done.exit_code} and {said!r:.300}")
        if done.exit_code == 2 and said.count("error:") > 1:
            raise AssertionError(f"more than one error: {said!r:.300}")
        if len(said) > limits.MESSAGE + 4 * len(max(words, key=len, default="")):
            raise AssertionError(f"a message of {len(said)} characters: {said!r:.300}")
        return done

    seeds = [json.dumps(line.split()).encode() for line in _LINES]
    return Target(run, seeds, (), change=_change, anywhere=True)
