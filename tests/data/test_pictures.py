"""Picture files: every kind of pixels, sizes, and files that are damaged or promise too much."""

import hashlib
import os
import struct
import subprocess
import sys
import zlib
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from minidl.data import DataError, pictures
from minidl.data.pictures import picture_files, picture_size, read_picture, read_pictures
from minidl.data.workers import Message, Workers


def grey(height=6, width=9, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)


def saved(path, image, **options):
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(path, **options)
    return path


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".gif", ".pgm", ".webp"])
def test_formats_without_loss_give_the_pixels(tmp_path, suffix):
    options = {"lossless": True} if suffix == ".webp" else {}
    path = saved(tmp_path / f"a{suffix}", grey(), **options)
    assert np.array_equal(read_picture(path, (6, 9), 1)[:, :, 0], grey())
    assert np.array_equal(read_picture(path, (6, 9), 3), np.repeat(grey()[:, :, None], 3, axis=2))
    assert picture_size(path) == (6, 9)


def test_a_jpeg_is_close(tmp_path):
    smooth = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8) * 8
    path = saved(tmp_path / "a.jpeg", smooth, quality=95)
    assert np.abs(read_picture(path, (16, 16), 1)[:, :, 0].astype(int) - smooth).max() < 8


def test_16_bits_become_the_upper_8(tmp_path):
    wide = grey().astype(np.uint16) * 257
    path = saved(tmp_path / "a.png", wide)
    assert np.array_equal(read_picture(path, (6, 9), 1)[:, :, 0], grey())


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize("colour", [False, True])
def test_all_16_bits_values_become_their_upper_8(tmp_path, colour):
    # By hand: Pillow writes no colour of 16 bits.
    wide = np.arange(65536, dtype=">u2").reshape(256, 256, 1).repeat(3 if colour else 1, axis=2)
    rows = b"".join(b"\0" + row.tobytes() for row in wide)
    head = struct.pack(">IIBBBBB", 256, 256, 16, 2 if colour else 0, 0, 0, 0)
    path = tmp_path / "a.png"
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    assert np.array_equal(read_picture(path, (256, 256), 3), np.broadcast_to(wide >> 8, (256, 256, 3)))


def test_one_bit_is_black_and_white(tmp_path):
    path = saved(tmp_path / "a.png", Image.fromarray(grey() > 127))
    assert np.array_equal(read_picture(path, (6, 9), 1)[:, :, 0], np.where(grey() > 127, 255, 0))


def test_transparency_lies_on_black(tmp_path):
    pixels = np.zeros((2, 2, 4), dtype=np.uint8)
    pixels[0, 0] = (255, 0, 0, 255)
    pixels[1, 1] = (255, 255, 255, 0)
    found = read_picture(saved(tmp_path / "a.png", pixels), (2, 2), 3)
    assert found[0, 0].tolist() == [255, 0, 0]
    assert found[1, 1].tolist() == [0, 0, 0]


def test_a_palette_gives_its_colours(tmp_path):
    colour = np.zeros((4, 4, 3), dtype=np.uint8)
    colour[1:3] = (10, 200, 30)
    path = saved(tmp_path / "a.png", Image.fromarray(colour).quantize(4))
    assert np.array_equal(read_picture(path, (4, 4), 3), colour)


def test_the_camera_that_was_held_sideways(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    path = saved(tmp_path / "a.png", grey(), exif=exif)
    assert picture_size(path) == (9, 6)
    assert np.array_equal(read_picture(path, (9, 6), 1)[:, :, 0], np.rot90(grey(), -1))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_way_to_hold_a_camera(tmp_path, mode, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    wide = Image.fromarray(grey().astype(np.uint16) * 257)
    image = wide if mode == "I;16" else Image.fromarray(grey()).convert("RGB").convert(mode)
    upright = read_picture(saved(tmp_path / "upright.png", image), (6, 9), 3)
    turned = upright.swapaxes(0, 1) if orientation > 4 else upright
    flip = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}.get(orientation, ())
    path = saved(tmp_path / "a.png", image, exif=exif)
    assert np.array_equal(read_picture(path, turned.shape[:2], 3), np.flip(turned, flip))


@pytest.mark.parametrize("channels", [None, 1, 3])
@pytest.mark.parametrize("colour", [False, True])
def test_keys_are_those_of_the_pixels(tmp_path, channels, colour):
    """Also where the memory that processes share cannot be opened."""
    paths = [saved(tmp_path / f"{i:02}.png", grey(seed=i % 30)) for i in range(40)]
    if colour:
        saved(paths[17], np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8))
    pixels, keys = pictures.read_keyed(paths, (6, 9), channels)
    assert keys == [hashlib.sha256(np.ascontiguousarray(picture).data).hexdigest() for picture in pixels]
    assert pixels.shape == (40, 6, 9, channels or (3 if colour else 1))
    with mock.patch.object(pictures.os, "getpid", return_value=2**30):
        others, other_keys = pictures.read_keyed(paths, (6, 9), channels)
    assert np.array_equal(others, pixels)
    assert other_keys == keys


def test_a_worker_that_is_late_writes_to_no_other_file(tmp_path):
    """Whose number the closed memory of a failed command had."""
    path, other = saved(tmp_path / "a.png", grey()), tmp_path / "other"
    other.write_bytes(b"of the user")
    values = {"paths": [str(path)], "size": [6, 9], "channels": 1, "grey": False, "keyed": False, "first": 0}
    inode = other.stat().st_ino
    found = pictures._pixels(Message({**values, "bytes": 54, "into": [str(other), inode + 1]}))
    assert found.buffers == [grey().tobytes()]
    assert other.read_bytes() == b"of the user"
    assert pictures._pixels(Message({**values, "bytes": 54, "into": [str(other), inode]})).buffers == ()
    assert other.read_bytes() == grey().tobytes()


def test_a_process_that_decodes_needs_no_numpy(tmp_path):
    path = saved(tmp_path / "a.png", grey())
    code = (
        "import sys; from minidl.data import pictures; from minidl.data.workers import Message\n"
        f"values = {{'paths': [{str(path)!r}], 'size': [4, 4], 'channels': 3, 'grey': True, 'keyed': True}}\n"
        "found = pictures._pixels(Message({**values, 'first': 0, 'bytes': 48, 'into': ['/none', 0]}))\n"
        "assert len(found.buffers[0]) == 48 and found.values['grey'] and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(1, 20))
def test_any_size_becomes_any_other(tmp_path_factory, height, width, rows, columns):
    path = saved(tmp_path_factory.mktemp("p") / "a.png", np.full((height, width), 77, dtype=np.uint8))
    found = read_picture(path, (rows, columns), 1)
    assert found.shape == (rows, columns, 1)
    assert (found == 77).all()


def test_pictures_are_grey_when_no_pixel_has_colour(tmp_path):
    a = saved(tmp_path / "a.png", np.repeat(grey()[:, :, None], 3, axis=2))
    b = saved(tmp_path / "b.png", grey(seed=1))
    assert read_pictures([a, b], None, None).shape == (2, 6, 9, 1)
    colour = np.repeat(grey()[:, :, None], 3, axis=2)
    colour[0, 0, 0] ^= 1
    c = saved(tmp_path / "c.png", colour)
    assert read_pictures([a, b, c], None, None).shape == (3, 6, 9, 3)
    assert read_pictures([a, b, c], (3, 3), 1).shape == (3, 3, 3, 1)


def test_files_are_known_by_their_suffix(tmp_path):
    for name in ("b.PNG", "a.jpg", ".c.png", "notes.txt", "d"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    assert [path.name for path in picture_files(tmp_path)] == ["a.jpg", "b.PNG"]


def png(width, height, data=b""):
    """A PNG whose header says so, whatever its data are."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(8193, 8192), (20_000, 20_000), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_by_its_header(tmp_path, width, height):
    path = tmp_path / "bomb.png"
    path.write_bytes(png(width, height))
    with pytest.raises(DataError, match=r"bomb\.png has .*limit of 67,108,864"):
        read_pictures([path], (8, 8), None)
    with pytest.raises(DataError, match="limit of 67,108,864"):
        picture_size(path)


@pytest.mark.parametrize("size", [(2**17, 1), (1, 2**26)])
def test_a_side_that_resizing_has_no_memory_for(tmp_path, size):
    """It would take 32 bytes for each pixel of the side, 2 GB for a file of 8 KB."""
    path = saved(tmp_path / "long.png", Image.new("L", size))
    with pytest.raises(DataError, match=rf"long\.png has {size[0]} x {size[1]} pixels, and a side may have 65,536"):
        read_picture(path, (8, 8), 1)
    assert read_picture(saved(tmp_path / "longest.png", Image.new("L", (2**16, 1), 9)), (8, 8), 1).max() == 9


def test_a_picture_for_which_there_is_no_memory_is_named(tmp_path, monkeypatch):
    path = saved(tmp_path / "a.png", Image.new("L", (4, 4)))
    monkeypatch.setattr(Image.Image, "resize", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(DataError, match=r"a\.png does not fit into free memory"):
        read_picture(path, (8, 8), 1)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".gif", ".tif", ".webp"])
def test_a_file_that_is_cut_off(tmp_path, suffix):
    whole = saved(tmp_path / f"a{suffix}", grey(64, 64)).read_bytes()
    path = tmp_path / f"cut{suffix}"
    for share in (0.02, 0.3, 0.6):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(DataError, match=rf"cut\{suffix} (cannot be read as a picture|is not a picture)"):
            read_picture(path, (64, 64), 1)


@given(st.sampled_from([".png", ".gif", ".tif", ".bmp", ".jpg"]), st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(tmp_path_factory, suffix, place, value):
    path = saved(tmp_path_factory.mktemp("p") / f"a{suffix}", grey())
    content = bytearray(path.read_bytes())
    content[place % len(content)] = value
    path.write_bytes(content)
    message = ""
    try:
        assert read_picture(path, (4, 4), 3).shape == (4, 4, 3)
    except DataError as error:
        message = str(error)
    assert not message or str(path) in message


def test_a_format_that_starts_a_program_is_not_tried(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EOF\n")
    with pytest.raises(DataError, match="is not a picture of a known format"):
        read_picture(path, (4, 4), 1)


def test_limits_on_what_a_network_gets(tmp_path, monkeypatch):
    path = saved(tmp_path / "a.png", grey(4, 1100))
    with pytest.raises(DataError, match="the pictures are 4 x 1100 pixels, a network takes sides from 1 to 1024"):
        read_pictures([path], None, None)
    monkeypatch.setattr(pictures, "MAX_BYTES", 100)
    with pytest.raises(DataError, match=r"1 pictures of 8 x 8 are 192 bytes, above the limit of 100; give a smaller"):
        read_pictures([path], (8, 8), None)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"none\.png does not exist"):
        read_pictures([tmp_path / "none.png"], (8, 8), 1)
    os.mkfifo(tmp_path / "pipe.png")  # to wait for it, in a thread, would hold up Ctrl-C
    for path in (tmp_path, tmp_path / "pipe.png"):
        with pytest.raises(DataError, match="is a folder, a device or a pipe; give the path of a picture"):
            read_pictures([path], (8, 8), 1)


def test_no_bit_of_a_png_can_change_its_pixels(tmp_path):
    """Pillow looks at the checksums of chunks before the pixels only."""
    path = saved(tmp_path / "a.png", grey())
    whole = path.read_bytes()
    told = 0
    for place in range(0, 8 * len(whole), 3):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            assert np.array_equal(read_picture(path, (6, 9), 1)[:, :, 0], grey()), place
        except DataError:
            told += 1
    assert told > 2 * len(whole)


@pytest.mark.slow
def test_processes_read_what_one_does(tmp_path):
    draw = np.random.default_rng(0)
    paths = [tmp_path / f"{i:03d}{'é' if i % 7 == 0 else ''}.png" for i in range(300)]
    for i, path in enumerate(paths):
        Image.fromarray(draw.integers(0, 256, (6 + i % 3, 5), dtype=np.uint8)).save(path)
    with Workers(2) as pool:
        for size, channels in ((None, None), ((4, 9), 3), ((6, 5), 1)):
            expected = pictures.read_pictures(paths, size, channels)
            assert (pictures.read_pictures(paths, size, channels, pool) == expected).all()
        Image.fromarray(draw.integers(0, 256, (6, 5, 3), dtype=np.uint8)).save(paths[-1])
        assert pictures.read_pictures(paths, None, None, pool).shape == (300, 6, 5, 3)
        for bad in (paths[200], paths[40]):
            bad.write_bytes(b"none")
        with pytest.raises(DataError, match=rf"{paths[40].name} is not a picture"):
            pictures.read_pictures(paths, (6, 5), 1, pool)
