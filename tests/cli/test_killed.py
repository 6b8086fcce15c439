"""A sample of `python -m tests.trials.resume`: each trainer is killed at random moments, goes on, and ends the same."""

import json
import random
import shutil

import pytest
import torch

from minidl.runtime import launch
from minidl.training.run_folder import files
from tests.cli.conftest import edited
from tests.trials.lives import Cold, Parent, place_after
from tests.trials.resume import Trials, visits
from tests.trials.same import differences


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """Trials with lives from one warm parent, or processes of their own where children cannot use the device."""
    parent = Parent(1, **({"TRITON_INTERPRET": "1"} if launch.INTERPRETED else {}))
    device = "cpu" if launch.INTERPRETED else "auto"
    yield Trials(tmp_path_factory.mktemp("trials"), [parent if parent.ready else Cold()], device, ["--no-plots"])
    parent.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "seed", "manner"),
    [("text", 0, "file"), ("text", 1, "moment"), ("images", 2, "file"), ("gan", 3, "stop")],
)
def test_killed_runs_end_as_the_run_that_was_left_alone(trials, trainer, seed, manner):
    if trainer not in trials.references:
        trials.prepare(trainer, real=False)
    deaths, found = trials.run(trainer, seed, random.Random(seed), kills=1, manner=manner)
    assert not found, deaths
    assert manner != "file" or deaths != ["end"]


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("metrics.jsonl", lambda line: line.update(loss=1.0), "metrics.jsonl: 0.loss is "),
        ("metrics.jsonl", lambda line: line.update(seconds="1"), "metrics.jsonl: 0.seconds is "),
        ("report.json", lambda report: report["confusion"][0].reverse(), "report.json: confusion.0.0 is "),
        ("report.json", lambda report: report.pop("seconds") and None, "report.json: seconds is "),
        ("config.json", lambda config: config.update(minidl="0"), "config.json: its bytes differ"),
        ("checkpoints/last.json", lambda state: state["generator"].update(stream=0), "last.json: generator.stream is "),
        ("checkpoints/last.json", lambda state: state["progress"].update(loss_sum=-0.0), "progress.loss_sum is "),
    ],
)
def test_a_run_that_is_not_the_same_is_told(text_run, tmp_path, name, change, told):
    run = tmp_path / "run"
    shutil.copytree(text_run[0], run)
    assert differences(run, text_run[0]) == []
    if name == "metrics.jsonl":
        first, *others = (run / name).read_text().splitlines(keepends=True)
        line = json.loads(first)
        change(line)
        (run / name).write_text("".join([json.dumps(line) + "\n", *others]))
    else:
        edited(run / name, change)
    assert any(told in what for what in differences(run, text_run[0]))


def test_times_are_not_compared_and_files_tensors_and_pictures_are(text_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(text_run[0], run)
    for name in ("last.json", "best.json"):
        edited(run / "checkpoints" / name, lambda state: state["progress"].update(seconds=1e6))
    assert differences(run, text_run[0]) == []
    tensors = files.read_tensors(run / "model.safetensors")
    tensors["0.weight"][0, 0] = torch.nextafter(tensors["0.weight"][0, 0], torch.tensor(9.0))
    files.write_tensors(run / "model.safetensors", tensors)
    (run / "report.txt").write_text((run / "report.txt").read_text().replace("float32", "tf32"))
    (run / "samples").mkdir()
    (run / "labels.json").unlink()
    assert differences(run, text_run[0]) == [
        f"samples is in {run} alone",
        f"labels.json is in {text_run[0]} alone",
        f"model.safetensors: tensor 0.weight differs in 1 of {tensors['0.weight'].numel()} values",
        f"report.txt: {run / 'report.txt'} is not what report.json says",
    ]


def test_where_a_life_was_is_read_from_its_timeline():
    assert place_after([]) == "start-up"
    assert place_after(["set-up", "file", "steps", "+saving", "file", "steps"]) == "saving"
    assert place_after(["set-up", "steps", "+saving", "validation", "-saving"]) == "validation"
    timeline = [(1.0, "steps"), (2.5, "+saving"), (3.0, "report"), (3.25, "-saving"), (4.0, "steps")]
    assert visits(timeline) == {"steps": [2.0, 0.0], "saving": [0.75], "report": [1.0]}
