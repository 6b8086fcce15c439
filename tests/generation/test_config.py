from pathlib import Path

import pytest

from minidl.errors import ConfigError
from minidl.generation.config import MAX_SEED, Generate, parse_grid, parse_pair, parse_seeds

OUT = Path("pictures")


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("5", (5,)), ("0-3,100", (0, 1, 2, 3, 100)), (" 7 , 2 - 3", (7, 2, 3)), ("4-4", (4,)),
        (str(MAX_SEED), (MAX_SEED,)),
    ],
)  # fmt: skip
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--seeds: '' is not a seed"), ("1,,2", "'' is not a seed"),
        ("-3", "'' is not a seed"), ("1.5", "'1.5' is not a seed"),
        ("٣", "is not a seed"), ("5-2", "the range 5-2 ends before it begins; write 2-5"), ("1-2-3", "is not a range"),
        (str(MAX_SEED + 1), "is not a seed; expected whole numbers from 0 to 2^63 - 1"),
        ("9" * 5000, "is not a seed"),
        ("0-99999999999", "names more than 10,000,000 seeds"), ("0-3,2", "names 2 twice"),
        ("a" * 5000, "is not a seed"),
    ],
)  # fmt: skip
def test_bad_seeds(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_seeds(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_grid_and_ends():
    assert parse_grid("8x8") == (8, 8)
    assert parse_grid("2X12") == (2, 12)
    assert parse_pair(("3", "17")) == (3, 17)
    for text in ("8", "8x", "0x8", "8x8x8", "axb", "1001x1", "x" * 3000):
        with pytest.raises(ConfigError, match="expected rows and columns"):
            parse_grid(text)
    with pytest.raises(ConfigError, match="requires two different seeds, got 3 twice"):
        parse_pair(("3", "3"))
    with pytest.raises(ConfigError, match="--interpolate: 'b' is not a seed"):
        parse_pair(("3", "b"))


def test_how_many():
    assert Generate(out=OUT).all_seeds() == tuple(range(64))
    assert Generate(out=OUT, grid=(2, 3)).all_seeds() == tuple(range(6))
    assert Generate(out=OUT, count=5).all_seeds() == tuple(range(5))
    assert Generate(out=OUT, seeds=(9, 4)).all_seeds() == (9, 4)
    assert Generate(out=OUT, interpolate=(1, 2), steps=7).total() == 7
    assert Generate(out=OUT, interpolate=(1, 2)).total() == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "gif"}, "--format is gif, expected one of png, jpg, webp, bmp, npy, zip"),
        ({"workers": 0}, "--workers is 0, expected a whole number from 1 to 1024"),
        ({"precision": "bfloat16"}, "--precision is bfloat16"),
        ({"device": "tpu"}, "--device is tpu"),
        ({"seeds": (1,), "count": 2}, "--seeds and --count cannot be combined"),
        ({"count": 2, "latents": Path("z.txt")}, "--count and --latents cannot be combined"),
        ({"count": 0}, "--count is 0, expected a whole number from 1"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"interpolate": (1, 2), "steps": 1}, "--steps is 1, expected a whole number from 2"),
        ({"steps": 3}, "--steps requires --interpolate A B"),
        ({"truncation": 0.0}, "--truncation is 0.0, expected a number above 0, at most 100"),
        ({"truncation": float("nan")}, "--truncation is nan"),
        ({"truncation": 1.0, "latents": Path("z.txt")}, "--truncation cannot be combined with --latents"),
        ({"grid": (2, 2), "format": "npy"}, "--grid requires --format png, jpg, webp or bmp, got npy"),
        ({"grid": (2, 2), "format": "zip"}, "--grid requires --format png, jpg, webp or bmp, got zip"),
        ({"grid": (2, 2), "count": 5}, "--grid 2x2 has 4 cells, and 5 pictures were requested"),
        ({"grid": (2, 2), "interpolate": (1, 2)}, "--grid 2x2 has 4 cells, and 9 pictures"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError) as caught:
        Generate(out=OUT, **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("given", [{"model": "run\udcff"}, {"latents": Path("z\udcff.txt")}])
def test_names_that_the_pictures_cannot_record(given):
    with pytest.raises(ConfigError, match="expected a name in UTF-8"):
        Generate(out=OUT, **given)
