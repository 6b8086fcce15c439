"""Pictures of any kind of numbers: what is white is documented, or they are refused, and none comes out black."""

import numpy as np
import pytest
from PIL import Image

from minidl.data import DataError
from minidl.data.pictures import read_picture


def read(path, pixels, channels=1, **options):
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)
    found = read_picture(path, (image.height, image.width), channels)
    return found[:, :, 0] if channels == 1 else found


RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)


@pytest.mark.parametrize(
    "pixels",
    [
        RAMP.astype(np.float32) / 255, RAMP.astype(np.float32), RAMP.astype(np.float32) + 0.25 * (RAMP < 255),
        RAMP.astype(np.uint16) * 257, RAMP.astype(np.int32) * 257,
    ],
)  # fmt: skip
def test_numbers_of_more_bits_keep_their_greys(tmp_path, pixels):
    """Floats from 0 to 1, from 0 to 255, 16 bits, and 16 bits in 32."""
    assert np.array_equal(read(tmp_path / "a.tif", pixels), RAMP)
    assert np.array_equal(read(tmp_path / "b.tif", pixels, 3), np.repeat(RAMP[:, :, None], 3, axis=2))


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.float32([[0, 256]]), "its values lie between 0 and 256, and floats must lie between 0 and 1, or 0 and 255"),
        (np.float32([[-0.5, 0.5]]), "its values lie between -0.5 and 0.5"),
        (np.float32([[0, np.nan]]), "its values lie between nan and nan"),
        (np.float32([[0, np.inf]]), "its values lie between 0 and inf"),
        (np.int32([[0, 2**31 - 1]]), r"between 0 and 2\.14748e\+09, and whole numbers must lie between 0 and 65535"),
        (np.int32([[-1, 2000]]), "its values lie between -1 and 2000"),
        (
            np.int32([[0, 200]]),
            "between 0 and 200, in 32 bits, of which 65535 is white: save it with 8 bits",
        ),
    ],
)
def test_numbers_of_which_white_is_not_known_are_refused(tmp_path, pixels, message):
    with pytest.raises(DataError, match=rf"a\.tif cannot be read as a picture: .*{message}"):
        read(tmp_path / "a.tif", pixels)


def test_black_is_black(tmp_path):
    for kind in (np.float32, np.uint16, np.int32):
        assert not read(tmp_path / "a.tif", np.zeros((3, 300), kind)).any()


@pytest.mark.parametrize("mode", ["CMYK", "LAB", "YCbCr", "1", "P"])
@pytest.mark.parametrize("channels", [1, 3])
def test_other_kinds_of_colours(tmp_path, mode, channels):
    image = Image.new("RGB", (5, 4), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 5, 2))
    if mode == "LAB":  # which Pillow makes of no other colours itself
        image = Image.merge("LAB", [image.getchannel(0), *[Image.new("L", (5, 4), 128)] * 2])
    found = read(tmp_path / "a.tif", image if mode == "LAB" else image.convert(mode), channels)
    assert found[:2].min() > 250
    assert found[2:].max() < 5


def test_a_palette_with_transparency_lies_on_black(tmp_path):
    image = Image.fromarray(RAMP % 4).convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
    found = read(tmp_path / "a.png", image, 3, transparency=1)
    assert [found[0, i].tolist() for i in range(4)] == [[255, 0, 0], [0, 0, 0], [0, 0, 255], [9, 9, 9]]


@pytest.mark.parametrize("suffix", [".gif", ".tif", ".png", ".webp"])
def test_of_several_frames_the_first_is_read(tmp_path, suffix):
    frames = [Image.new("L", (4, 4), value) for value in (200, 20, 90)]
    options = {"lossless": True} if suffix == ".webp" else {}
    found = read(tmp_path / f"a{suffix}", frames[0], save_all=True, append_images=frames[1:], **options)
    assert (found == 200).all()
