"""What a command line follows from: a class of settings, and nothing else."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from minidl.cli.options import command
from minidl.training.settings.command import Session
from minidl.training.settings.declaration import REPEATED, Positional, Settings
from minidl.training.settings.fields import Size


class Paint(Settings):
    """Paint a picture.

    Twice, if wanted.
    """

    examples = ("minidl paint sky --colour red",)
    subject: Annotated[str, Positional(), Field(description="What is seen.")]
    colour: Annotated[Literal["red", "blue"], Field(description="Colour:")] = "blue"
    layers: Annotated[int, Field(ge=1, le=9, description="Coats of paint.")] = 2
    thinner: Annotated[float, Field(gt=0, le=1, description="Share of water.")] = 0.5
    size: Size = None
    brush: Annotated[tuple[str, ...], Field(strict=False, description="May be repeated."), REPEATED] = ()
    frame: Annotated[bool, Field(description="Leave it bare.")] = True
    dry: Annotated[bool, Field(description="Wait.")] = False
    gloss: Annotated[bool | None, Field(description="Default: what suits the paint.")] = None
    record: Annotated[Path | None, Field(alias="json", description="Also write it here.")] = None


class TrainSound(Session):
    """A fifth task's settings."""

    data: str
    rate: Annotated[int, Field(ge=1, description="Samples per second.")] = 8000


def run(settings, *arguments):
    given = []
    app = typer.Typer()
    app.callback()(lambda: None)
    command("it", settings, lambda values: given.append((values, settings(**values))))(app)
    done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["it", *arguments])
    return given[0] if given else None, done


def test_only_what_is_given_is_passed_on():
    (given, config), _ = run(Paint, "sky")
    assert given == {"subject": "sky"}
    assert (config.colour, config.layers, config.frame, config.gloss) == ("blue", 2, True, None)


def test_values_have_the_types_of_their_fields():
    (given, config), _ = run(
        Paint, "sky", "--colour", "red", "--layers", "3", "--thinner", "1", "--size", "4x5", "--brush", "a",
        "--brush", "b", "--no-frame", "--dry", "--no-gloss", "--json", "f.json",
    )  # fmt: skip
    assert given["json"] == Path("f.json")
    assert config.model_dump() == {
        "subject": "sky", "colour": "red", "layers": 3, "thinner": 1.0, "size": (4, 5), "brush": ("a", "b"),
        "frame": False, "dry": True, "gloss": False, "record": Path("f.json"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--colour", "green"), "error: --colour is green, expected one of red, blue"),
        (("--layers", "10"), "error: --layers is 10, expected a whole number from 1 to 9"),
        (("--layers", "2.5"), "error: --layers is 2.5, expected a whole number from 1 to 9\n"),
        (("--layers", "--dry"), "error: --layers is --dry, expected a whole number from 1 to 9\n"),
        (("--gloss", "--thinner", "much"), "error: --thinner is much, expected a number above 0, at most 1\n"),
        (("--size", "4x5x6"), "error: --size is 4x5x6, expected a height and width in pixels, such as 32 or 32x48"),
        (("--size", "4x2000"), "error: --size is 4x2000, expected a height and width from 1 to 1024"),
    ],
)
def test_errors_are_sentences(arguments, message):
    given, done = run(Paint, "sky", *arguments)
    assert given is None
    assert done.exit_code == 2
    assert done.stderr.startswith(message)


def test_help_has_the_docstring_the_choices_and_the_defaults():
    shown = run(Paint, "--help")[1].stdout
    for text in (
        "Paint a picture.", "Twice, if wanted.", "Colour: red or blue. Default: blue.", "Coats of paint. Default: 2.",
        "--no-frame", "--gloss", "--no-gloss", "minidl paint sky --colour red",
    ):  # fmt: skip
        assert text in shown
    assert "--frame" not in shown.replace("--no-frame", "")
    assert "--no-dry" not in shown


def test_settings_of_a_run_are_left_out_where_it_is_continued():
    (given, _), _ = run(TrainSound, "--out", "r", "--data", "bells", "--rate", "44100")
    assert given == {"out": Path("r"), "data": "bells", "rate": 44100}
    assert "Missing option '--out'" in run(TrainSound, "--data", "bells")[1].stderr
    result = run(TrainSound, "--out", "r")[1]
    assert result.stderr == "error: --data is missing\n"
