"""Image data: the embedded digits, MNIST's four files, folders of class folders, and their statistics."""

import dataclasses
import gzip
import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from minidl.data import Augment, DataError, download, images, load_images

FOLDER = os.environ.get("MINIDL_DATA", "")


def file(folder, name, pixels):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def grey(seed, height=8, width=8):
    return np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)


def class_folders(folder, classes=("a", "b"), count=10, **options):
    for c, name in enumerate(classes):
        for i in range(count):
            file(folder, f"{name}/{i:02}.png", grey(100 * c + i, **options))
    return folder


def test_digits_are_split_in_fifths_by_class():
    dataset = load_images("digits")
    assert dataset.labels == [str(i) for i in range(10)]
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (1259, 179, 359)
    for part in (dataset.train, dataset.validation, dataset.test):
        assert part.pixels.shape[1:] == (8, 8, 1)
        assert part.pixels.dtype == np.uint8
        shares = np.bincount(part.labels) / len(part)
        assert 0.09 < shares.min() < shares.max() < 0.11
    assert dataset.train.pixels.max() == 255
    assert dataset.augment == Augment(shift=1)
    keys = [
        {picture.tobytes() for picture in part.pixels} for part in (dataset.train, dataset.validation, dataset.test)
    ]
    assert sum(map(len, keys)) == len(set().union(*keys))


def test_statistics_are_those_of_the_training_split():
    dataset = load_images("digits")
    assert dataset.mean == pytest.approx([dataset.train.pixels.mean()], rel=1e-12)
    assert dataset.std == pytest.approx([dataset.train.pixels.astype(np.float64).std()], rel=1e-12)


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(0, 255))
def test_statistics_are_exact(count, side, channels, least):
    pixels = np.random.default_rng(0).integers(least, 256, (count, side, 2, channels), dtype=np.uint8)
    mean, std = images._statistics(pixels)
    for channel in range(channels):
        values = [int(value) for value in pixels[..., channel].reshape(-1)]
        total, square = sum(values), sum(value * value for value in values)
        assert mean[channel] == total / len(values)
        expected = max(0.0, square / len(values) - mean[channel] * mean[channel]) ** 0.5
        assert std[channel] == (expected if expected > 1e-3 else 1.0)


def test_a_split_never_changes():
    # A changed split would make scores of different versions incomparable.
    dataset = load_images("digits")
    digest = hashlib.sha256(dataset.test.pixels.tobytes() + dataset.test.labels.tobytes()).hexdigest()
    assert digest == "07c54e0d8128dfcad4f28dca835df835a7713831044e4d252625e9a7412d6dfa"


def idx(array):
    return struct.pack(f">I{array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def four_files(tmp_path, monkeypatch):
    """A data set in MNIST's form with 24 and 10 pictures, below MINIDL_DATA; returns its arrays."""
    draw = np.random.default_rng(0)
    arrays = {}
    for half, count in (("train", 24), ("t10k", 10)):
        arrays[f"{half}-images-idx3"] = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{half}-labels-idx1"] = (np.arange(count) % 10).astype(np.uint8)
    monkeypatch.setenv("MINIDL_DATA", str(tmp_path))
    monkeypatch.setattr(images, "_COUNTS", {"train": 24, "t10k": 10})
    monkeypatch.setattr(download, "SYSTEM", tmp_path / "system")
    for folder, attribute in (("mnist", "MNIST"), ("fashion-mnist", "FASHION")):
        for name, array in arrays.items():
            path = tmp_path / folder / f"{name}-ubyte.gz"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress(idx(array)))
        checksums = {name: hashlib.sha256(idx(array)).hexdigest() for name, array in arrays.items()}
        monkeypatch.setattr(images, attribute, images._resources(folder, (), checksums))
    return arrays


@pytest.mark.parametrize(("name", "first", "flip"), [("mnist", "0", False), ("fashion-mnist", "T-shirt/top", True)])
def test_the_four_files_are_read(four_files, name, first, flip):
    dataset = load_images(name, progress=False)
    assert dataset.labels[0] == first
    assert np.array_equal(dataset.test.pixels[:, :, :, 0], four_files["t10k-images-idx3"])
    assert np.array_equal(dataset.test.labels, four_files["t10k-labels-idx1"])
    assert len(dataset.train) + len(dataset.validation) == 24
    assert dataset.augment == Augment(shift=2, flip=flip)
    assert dataset.source["origin"].endswith(name)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("level", [0, 1, 6])
def test_files_that_are_compressed_anew_are_the_same_data(four_files, tmp_path, name, level):
    for key, array in four_files.items():
        (tmp_path / name / f"{key}-ubyte.gz").write_bytes(gzip.compress(idx(array), level, mtime=7))
    assert np.array_equal(load_images(name, progress=False).test.pixels[:, :, :, 0], four_files["t10k-images-idx3"])


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_folder_of_a_package_of_the_system(four_files, tmp_path, monkeypatch, name):
    (tmp_path / "system").mkdir()
    (tmp_path / name).rename(tmp_path / "system" / name)
    options = {"mirrors": [], "cache": tmp_path / "cache", "progress": False}
    assert load_images(name, **options).source["origin"] == str(tmp_path / "system" / name)
    (tmp_path / "system" / name / "t10k-images-idx3-ubyte.gz").write_bytes(b"another file")
    with pytest.raises(DataError, match=f"{name}/t10k-images-idx3-ubyte.gz is not on this machine"):
        load_images(name, **options)


def test_the_published_checksums_are_those_of_debians_package():
    folder = download.SYSTEM / "fashion-mnist"
    if not folder.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    for resource in images.FASHION.values():
        content = gzip.decompress((download.SYSTEM / resource.path).read_bytes())
        assert hashlib.sha256(content).hexdigest() == resource.sha256


def test_a_wrong_file_is_told(four_files, tmp_path):
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(b"other"))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz does not hold the original data"):
        load_images("mnist")
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(DataError, match="is damaged: not a complete gzip file"):
        load_images("mnist")


def test_labels_and_pictures_must_be_as_many(four_files, monkeypatch):
    monkeypatch.setattr(images, "_COUNTS", {"train": 25, "t10k": 10})
    with pytest.raises(DataError, match="train has 24 pictures and 24 labels, expected 25 of both"):
        load_images("mnist")


def test_without_network_the_addresses_are_told(monkeypatch, tmp_path):
    monkeypatch.delenv("MINIDL_DATA", raising=False)
    with pytest.raises(DataError) as caught:
        load_images("mnist", mirrors=["file:///nowhere"], cache=tmp_path, progress=False)
    message = str(caught.value)
    assert "mnist/train-images-idx3-ubyte.gz is not on this machine" in message
    assert "file:///nowhere/train-images-idx3-ubyte.gz" in message
    assert "set MINIDL_DATA to a folder that holds mnist/train-images-idx3-ubyte.gz" in message


def test_every_resource_has_an_address_and_a_checksum():
    for resources in (images.MNIST, images.FASHION):
        assert len(resources) == 4
        for name, resource in resources.items():
            assert resource.path.endswith(f"{name}-ubyte.gz")
            assert len(resource.sha256) == 64
            assert len(resource.mirrors) >= 2
            assert all(address.endswith(f"/{name}-ubyte.gz") for address in resource.mirrors)


@pytest.mark.skipif(
    not (Path(FOLDER) / "mnist" / "train-images-idx3-ubyte.gz").is_file(),
    reason="needs mnist/train-images-idx3-ubyte.gz below MINIDL_DATA",
)
def test_mnist():
    dataset = load_images("mnist")
    assert len(dataset.train) + len(dataset.validation) == 60_000
    assert len(dataset.test) == 10_000
    assert 4_990 <= len(dataset.validation) <= 5_010
    # Published: mean 0.1307 and deviation 0.3081 of the training half.
    assert dataset.mean[0] / 255 == pytest.approx(0.1307, abs=3e-4)
    assert dataset.std[0] / 255 == pytest.approx(0.3081, abs=3e-4)


def test_a_folder_has_a_class_per_folder(tmp_path):
    class_folders(tmp_path, ("cat", "dog", "eel"))
    (tmp_path / "notes.txt").write_text("not a picture")
    (tmp_path / "cat" / "notes.txt").write_text("not a picture")
    (tmp_path / ".hidden").mkdir()
    dataset = load_images(tmp_path)
    assert dataset.labels == ["cat", "dog", "eel"]
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (21, 3, 6)
    assert dataset.train.pixels.shape[1:] == (8, 8, 1)
    # The pictures are what was written, whatever side they are on.
    classes = {grey(100 * c + i).tobytes(): c for c in range(3) for i in range(10)}
    for part in (dataset.train, dataset.validation, dataset.test):
        for picture, label in zip(part.pixels, part.labels, strict=True):
            assert classes[picture.tobytes()] == label
    assert load_images(tmp_path, split_seed=1).test.pixels.tobytes() != dataset.test.pixels.tobytes()


def test_equal_pictures_are_on_one_side(tmp_path):
    class_folders(tmp_path)
    for i in range(10):
        file(tmp_path, f"a/copy{i}.bmp", grey(i))
    dataset = load_images(tmp_path, test=0.4)
    sides = [
        {picture.tobytes() for picture in part.pixels} for part in (dataset.train, dataset.validation, dataset.test)
    ]
    assert sum(map(len, sides)) == len(set().union(*sides))


def test_the_most_common_size_is_taken(tmp_path):
    class_folders(tmp_path)
    file(tmp_path, "a/large.png", grey(1, 40, 60))
    assert load_images(tmp_path).train.pixels.shape[1:] == (8, 8, 1)
    assert load_images(tmp_path, size=(6, 5)).train.pixels.shape[1:] == (6, 5, 1)


def test_one_colour_picture_makes_all_colour(tmp_path):
    class_folders(tmp_path)
    file(tmp_path, "b/colour.png", np.full((8, 8, 3), (200, 10, 10), dtype=np.uint8))
    dataset = load_images(tmp_path)
    assert dataset.train.pixels.shape[1:] == (8, 8, 3)
    assert len(dataset.mean) == len(dataset.std) == 3


def test_folders_that_are_refused(tmp_path):
    with pytest.raises(DataError, match="unknown image data 'cats': neither one of digits, mnist, fashion-mnist nor a"):
        load_images("cats")
    with pytest.raises(DataError, match="is a file; expected a folder"):
        load_images(file(tmp_path, "one.png", grey(0)))
    with pytest.raises(DataError, match="digits has no option 'size'; its options are: none"):
        load_images("digits", size=(8, 8))
    class_folders(tmp_path, ("a",))
    with pytest.raises(DataError, match="holds one folder of pictures, expected one for each of at least two classes"):
        load_images(tmp_path)
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="b contains no picture"):
        load_images(tmp_path)
    file(tmp_path, "b/0.png", grey(0))
    with pytest.raises(DataError, match="b has 1 picture, expected at least 3"):
        load_images(tmp_path)
    for i in range(4):
        file(tmp_path, f"b/{i}.png", grey(i % 2))
    with pytest.raises(DataError, match="b has 2 different pictures, expected at least 3"):
        load_images(tmp_path)
    (tmp_path / "b" / "z.jpg").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"z\.jpg is not a picture of a known format"):
        load_images(tmp_path)


@pytest.mark.parametrize(("validation", "test"), [(0.6, 0.6), (0.5, 0.5), (0.0, 0.2), (0.1, 1.0)])
def test_shares_leave_pictures_for_training(tmp_path, validation, test):
    with pytest.raises(DataError, match="must lie between 0 and 1 and add up to less than 1"):
        load_images(class_folders(tmp_path), validation=validation, test=test)


def test_a_large_test_share_leaves_pictures_for_validation(tmp_path):
    dataset = load_images(class_folders(tmp_path, count=6), validation=0.05, test=0.9)
    for part in (dataset.train, dataset.validation, dataset.test):
        assert set(part.labels) == {0, 1}


def test_a_class_whose_name_is_no_text(tmp_path):
    class_folders(tmp_path)
    try:
        (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    except OSError:
        pytest.skip("this file system takes names of UTF-8 only")
    with pytest.raises(DataError, match=r"caf\\udce9' is not UTF-8 text; rename the folder"):
        load_images(tmp_path)


def test_records_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_images("digits").mean = (0.0,)


def test_a_constant_channel_has_deviation_1():
    mean, std = images._statistics(np.full((3, 4, 4, 2), 7, dtype=np.uint8))
    assert mean == (7.0, 7.0)
    assert std == (1.0, 1.0)
