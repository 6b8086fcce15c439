import re
import resource
import subprocess
import sys

import pytest

from minidl import __version__
from minidl.cli import COMMANDS, Deferred
from minidl.training.settings.declaration import flag
from minidl.training.tasks import TASKS
from tests.cli.conftest import ROOT, environment

ALL = (
    ["train"], ["train", "text"], ["train", "table"], ["train", "images"], ["train", "gan"], ["evaluate"],
    ["predict"], ["generate"], ["bench"], ["doctor"], ["tune"], ["sanitize"],
)  # fmt: skip

# Scripts rely on these; adding one is fine, and then it is written here.
FLAGS = {
    "text": "--activation --analyzer --balance --batch-size --data --device --devices --dropout --epochs --features "
    "--hidden --label-column --label-smoothing --lazy --lr --max-features --min-df --model --momentum --ngrams "
    "--no-capture --no-nfc --no-plots --optimizer --out --overwrite --patience --precision --profile --quiet --resume "
    "--schedule --seed --shards --test --test-split --text-column --timeout --token-pattern --trace --val-split "
    "--validation --warmup --weight-decay --workers --zero",
    "table": "--balance --batch-size --data --device --devices --dropout --epochs --hidden --ignore --label-smoothing "
    "--lr --missing --momentum --no-capture --no-plots --numbers --optimizer --out --overwrite --patience --precision "
    "--profile --quiet --resume --schedule --seed --shards --target --task --test --test-split --timeout --trace "
    "--val-split --validation --warmup --weight-decay --workers --zero",
    "images": "--balance --batch-size --cache --crop --cutmix --data --device --devices --dropout --ema --epochs "
    "--flip --freeze --init --label-smoothing --lr --mixup --model --momentum --no-capture --no-flip --no-freeze "
    "--no-plots --no-sync-batch-norm --normalize --optimizer --out --overwrite --patience --precision --profile "
    "--progressive --quiet --resume --schedule --seed --shards --shift --size --stem --sync-batch-norm --test "
    "--test-split --timeout --trace --unfreeze --unfreeze-lr --val-split --validation --warmup --weight-decay "
    "--workers --zero",
    "gan": "--batch-size --data --device --devices --epochs --latent --lr --no-capture --no-plots "
    "--no-sync-batch-norm --out --overwrite --precision --profile --quiet --resume --seed --shards --size "
    "--sync-batch-norm --timeout --trace --width --workers --zero",
}


def python(*arguments, columns=200):
    command, env = [sys.executable, *arguments], environment() | {"COLUMNS": str(columns)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_help_answers_in_a_second():
    """Of a processor, as other work may have the machine."""
    best = 10.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = python("-m", "minidl", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
    assert 0.0 < best < 1.0
    assert "train" in done.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys, contextlib, io\n"
        "sys.argv = ['minidl', '--help']\n"
        "from minidl.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main()\n"
        "heavy = {'torch', 'triton', 'numpy', 'scipy', 'sklearn', 'matplotlib', 'safetensors', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_every_command_has_help_with_examples_to_copy(command):
    done = python("-m", "minidl", *command, "--help", columns=80)
    assert done.returncode == 0, done.stderr
    assert "<bool>" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not re.search(r"\w-$|--$", done.stdout, re.MULTILINE), "an option's name stays in one line"
    examples = done.stdout.partition("\nExamples:")[2]
    commands = [line.strip() for line in examples.splitlines() if line.strip()]
    assert len(commands) >= 2
    for example in commands:
        assert re.match(rf"(cat \S+ \| )?minidl {' '.join(command)}( |$)", example), "one line each, in 80 columns"


def test_help_says_what_is_guessed(command):
    text, table = (
        " ".join(command("train", kind, "--help").out.replace("│", " ").split()) for kind in ("text", "table")
    )
    assert "Default: the column named text, sentence, content, body, message, review or document" in text
    assert "Default: the column named label, class, category, target or topic" in text
    assert "classification if the target is text or has at most 20 different whole numbers, else regression" in table
    assert "clearly below the best, by more than one standard error" in table
    for line in ("--task classification", "--ignore", "--missing fill"):
        assert line in table.partition("Examples:")[2]
    shown = command("predict", "--help").out.partition("Examples:")[2]
    assert '\'{"area": 100' in shown
    assert "cat houses.csv |" in shown


@pytest.mark.parametrize("kind", TASKS)
def test_the_flags_are_those_that_scripts_rely_on(command, kind):
    shown = command("train", kind, "--help").out
    found = {word.strip("│,.;:") for word in shown.split() if word.startswith("--")} - {"--help"}
    assert found == set(FLAGS[kind].split())


@pytest.mark.parametrize("kind", TASKS)
def test_every_setting_has_a_flag(kind):
    known = set(FLAGS[kind].split()) | {"--plots", "--capture", "--nfc"}
    assert {flag(name) for name in TASKS[kind].settings.model_fields} <= known


def test_the_overview_says_what_each_command_says(command):
    for name, line in COMMANDS.items():
        assert Deferred(name).load().help.partition("\n")[0] == line


def test_version(minidl):
    assert minidl("--version").out.strip() == __version__


@pytest.mark.parametrize("arguments", [["train", "text"], ["train", "sound", "--out", "x"], ["sing"], ["predict"]])
def test_bad_usage_exits_with_2(command, arguments):
    result = command(*arguments)
    assert result.code == 2
    assert "Traceback" not in result.err
