"""Folders of pictures: read as torchvision's ImageFolder reads them, and what is left out is counted."""

import os
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from minidl.data import DataError, load_images, picture_folders, read_labelled_pictures
from minidl.data.picture_cache import PictureCache
from minidl.data.picture_folders import class_folders, left_out, picture_files


def write(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        seed = np.frombuffer(str(name).encode(), np.uint8)
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 6), np.uint8)).save(path)
    return folder


def image_folder(folder):
    """torchvision's make_dataset for one class."""
    found = []
    for root, _, names in sorted(os.walk(folder, followlinks=True)):
        found += [f"{root}/{name}" for name in sorted(names) if name.lower().endswith((".png", ".jpg"))]
    return found


def test_the_order_is_that_of_image_folder(tmp_path):
    write(
        tmp_path / "cat", "b.png", "a.PNG.png", "sub/1.png", "sub-1/0.png", "sub/deep/er/x.png", "Sub/z.png", "a/y.png"
    )
    write(tmp_path / "elsewhere", "linked.png", "below/more.png")
    (tmp_path / "cat" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "cat" / "one.jpg").symlink_to(tmp_path / "elsewhere" / "linked.png")
    assert list(map(str, picture_files(tmp_path / "cat"))) == image_folder(tmp_path / "cat")
    assert len(picture_files(tmp_path / "cat")) == 10


def test_links_that_lead_back_end(tmp_path):
    write(tmp_path / "cat", "a.png", "sub/b.png")
    (tmp_path / "cat" / "sub" / "back").symlink_to(tmp_path / "cat")
    (tmp_path / "cat" / "sub" / "self").symlink_to(tmp_path / "cat" / "sub")
    (tmp_path / "cat" / "loop.png").symlink_to(tmp_path / "cat" / "loop.png")
    assert [path.name for path in picture_files(tmp_path / "cat")] == ["a.png", "b.png"]


def test_pictures_below_a_class_are_of_it(tmp_path):
    names = [f"{name}/{sub}{i}.png" for name in "ab" for sub in ("", "more/", "more/deep/") for i in range(4)]
    write(tmp_path, *names)
    found = load_images(tmp_path)
    assert sum(len(part) for part in (found.train, found.validation, found.test)) == 24
    assert "notes" not in found.source
    images, source = read_labelled_pictures(tmp_path, ["a", "b"], (6, 6), 1)
    assert (images.labels.tolist(), source) == ([0] * 12 + [1] * 12, {"name": str(tmp_path)})


def test_what_is_left_out_is_counted_by_suffix(tmp_path):
    write(tmp_path, *(f"{name}/{i}.png" for name in "ab" for i in range(6)), "above.png")
    for name in ("a/x.heic", "a/y.HEIC", "a/sub/z.heic", "b/note.txt", "b/README", "b/.hidden", "b/.git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    os.mkfifo(tmp_path / "b" / "pipe.png")
    note = f"{tmp_path}: left out: 3 .heic, 1 outside of its folders, 1 .txt, 1 .png, 1 without a suffix"
    kinds = sorted(load_images(tmp_path).source["notes"][0].split(": ")[-1].split(", "))
    assert kinds == sorted(note.split(": ")[-1].split(", "))
    assert sorted(read_labelled_pictures(tmp_path, ["a", "b"], (6, 6), 1)[1]["notes"][0]) == sorted(note)
    other = write(tmp_path / "other", *(f"{name}/{i}.png" for name in "ab" for i in range(3)))
    (other / "a" / "x.psd").write_bytes(b"")
    train = write(tmp_path / "train", *(f"{name}/{i}.png" for name in "ab" for i in range(3)))
    assert load_images(train, test=other, validation=0.3).source["notes"] == [f"{other}: left out: 1 .psd"]
    assert left_out("x", Counter({f".{i}": 1 for i in range(9)})).endswith("1 .7 and others")


def test_splits_are_no_classes(tmp_path):
    splits = ("Test", "train", "val")
    write(tmp_path, *(f"{split}/{name}/{i}.png" for split in splits for name in "ab" for i in range(4)))
    with pytest.raises(DataError, match=r"'Test', 'train', 'val', which are splits, not classes: use .*/train as"):
        load_images(tmp_path)
    write(tmp_path, "train/0.png")
    assert [name for name, _ in class_folders(tmp_path, Counter())] == ["Test", "train", "val"]


def test_the_cache_knows_pictures_in_subfolders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write(tmp_path / "photos", *(f"{name}/{sub}/{i}.png" for name in "ab" for sub in "xy" for i in range(4)))
    told = []
    first = load_images(folder, cache=PictureCache(told.append))
    again = load_images(folder, cache=PictureCache(told.append))
    assert (len(told), again.train.pixels.tobytes()) == (1, first.train.pixels.tobytes())
    (folder / "a" / "x" / "0.png").rename(folder / "a" / "y" / "9.png")
    changed = load_images(folder, cache=PictureCache(told.append))
    assert len(told) == 2
    assert len(changed.train) == len(first.train)


def test_pictures_directly_in_a_folder_come_before_those_in_its_folders(tmp_path):
    write(tmp_path, "b/1.png", "a/2.png", "a/sub/3.png")
    skipped = Counter()
    assert [path.name for path in picture_folders.pictures_in(tmp_path, skipped)] == ["2.png", "3.png", "1.png"]
    assert not skipped
    write(tmp_path, "own.png")
    assert [path.name for path in picture_folders.pictures_in(tmp_path, skipped)] == ["own.png"]
    assert left_out(tmp_path, skipped) == f"{tmp_path}: left out: 3 pictures in its folders"
