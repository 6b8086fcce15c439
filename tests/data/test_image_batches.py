"""Batches of pictures: orders and moves are functions of seed and epoch, and any tail can be had without its head."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidl.data import Augment, ImageBatches, Pictures
from minidl.data.augmenting import epoch_mixes, epoch_moves, epoch_parts


def pictures(count=23, size=4, channels=1):
    """Picture i has the value i everywhere."""
    pixels = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, size, size, channels))
    return Pictures(pixels, (0.0,) * channels, (1.0,) * channels)


@given(st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_an_epoch_visits_every_picture_once(batch_size, epoch, shuffle):
    batches = ImageBatches(pictures(), np.arange(23), batch_size, seed=3, shuffle=shuffle)
    seen = list(batches.epoch(epoch))
    assert len(seen) == len(batches)
    labels = torch.cat([y for _, y in seen]).cpu()
    assert sorted(labels.tolist()) == list(range(23))
    assert torch.equal(torch.cat([x for x, _ in seen])[:, 0, 0, 0].cpu(), labels.float())
    if not shuffle:
        assert labels.tolist() == list(range(23))


@given(st.integers(0, 6))
def test_a_tail_is_what_the_whole_epoch_ends_with(start):
    batches = ImageBatches(pictures(), np.arange(23), 4, seed=1, augment=Augment(shift=1, flip=True))
    whole, tail = list(batches.epoch(2)), list(batches.epoch(2, start))
    assert len(tail) == len(whole) - start
    for (x, y), (z, w) in zip(whole[start:], tail, strict=True):
        assert torch.equal(x, z)
        assert torch.equal(y, w)


@pytest.mark.parametrize("augment", [None, Augment(shift=1, flip=True)])
def test_pictures_that_stay_on_the_host_give_the_same_batches(augment):
    draw = np.random.default_rng(0)
    some = Pictures(draw.integers(0, 256, (23, 5, 6, 3), dtype=np.uint8), (100.0,) * 3, (50.0,) * 3)
    there, here = (
        ImageBatches(some, np.arange(23), 4, seed=4, augment=augment, resident=resident) for resident in (True, False)
    )
    for epoch, start in ((0, 0), (2, 3), (1, 6)):
        pairs = list(zip(there.epoch(epoch, start), here.epoch(epoch, start), strict=True))
        assert len(pairs) == 6 - start
        for (x, y), (z, w) in pairs:
            assert torch.equal(x, z)
            assert torch.equal(y, w)


def test_moves_never_change():
    # Changed moves would make a resumed run differ from the uninterrupted one.
    assert epoch_moves(4, Augment(2, flip=True), seed=0, epoch=0).tolist() == [
        [1, 1, 0],
        [0, -1, 1],
        [1, -1, 0],
        [1, 2, 1],
    ]
    assert epoch_moves(3, Augment(1), seed=5, epoch=7).tolist() == [[-1, 1, 0], [1, -1, 0], [-1, 1, 0]]


def test_moves_fill_their_range_evenly():
    moves = epoch_moves(30_000, Augment(2, flip=True), 1, 1)
    for column in (0, 1):
        values, counts = np.unique(moves[:, column], return_counts=True)
        assert values.tolist() == [-2, -1, 0, 1, 2]
        assert np.abs(counts - 6000).max() < 5 * np.sqrt(6000)
    assert abs(int(moves[:, 2].sum()) - 15_000) < 5 * np.sqrt(7500)
    assert np.abs(np.corrcoef(moves.T) - np.eye(3)).max() < 0.03
    assert not epoch_moves(100, Augment(0, flip=False), 1, 1).any()


def test_a_move_belongs_to_the_picture_not_to_its_place():
    """The same picture in another order is moved alike: moves depend on seed, epoch and index."""
    draw = np.random.default_rng(0)
    some = Pictures(draw.integers(0, 256, (9, 6, 6, 1), dtype=np.uint8), (0.0,), (1.0,))
    augment = Augment(shift=2, flip=True)
    shuffled, straight = (
        ImageBatches(some, np.arange(9), 9, seed=4, shuffle=shuffle, augment=augment) for shuffle in (True, False)
    )
    (x, order), (z, _) = next(shuffled.epoch(3)), next(straight.epoch(3))
    assert torch.equal(x, z[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pixels_are_standardised_in_the_dtype(dtype):
    few = Pictures(np.array([0, 64, 128], dtype=np.uint8).reshape(3, 1, 1, 1), (64.0,), (32.0,))
    x, _ = next(ImageBatches(few, [0, 1, 2], 3, shuffle=False, dtype=dtype).epoch(0))
    assert x.dtype == dtype
    assert x.flatten().tolist() == [-2.0, 0.0, 2.0]


def test_bad_arguments():
    with pytest.raises(ValueError, match="23 inputs and targets of shape"):
        ImageBatches(pictures(), np.arange(22), 4)
    with pytest.raises(ValueError, match="batch size must be positive"):
        ImageBatches(pictures(), np.arange(23), 0)
    with pytest.raises(ValueError, match="the seed must be from 0"):
        ImageBatches(pictures(), np.arange(23), 4, seed=-1)
    with pytest.raises(ValueError, match="the shift must be 0 or more, the crop above 0 to 1"):
        ImageBatches(pictures(), np.arange(23), 4, augment=Augment(shift=-1))
    with pytest.raises(TypeError, match=r"expected a floating dtype for the batches, got torch\.int32"):
        ImageBatches(pictures(), np.arange(23), 4, dtype=torch.int32)
    for mean, std in (((0.0,), (0.0,)), ((float("nan"),), (1.0,)), ((0.0,), (float("inf"),))):
        with pytest.raises(ValueError, match="expected finite means and deviations above 0"):
            ImageBatches(Pictures(pictures().pixels, mean, std), np.arange(23), 4)


def test_parts_and_mixes_never_change():
    # As the moves: a resumed run has them again.
    cut = Augment(crop=0.08, flip=True)
    assert epoch_parts(3, (20, 30), cut, seed=0, epoch=0).tolist() == [
        [0, 3, 20, 24, 0],
        [1, 18, 9, 12, 1],
        [0, 6, 18, 21, 0],
    ]
    found = epoch_mixes(3, (20, 30), Augment(mixup=0.4, cutmix=1.0), seed=0, epoch=0)
    assert found.box.tolist() == [[0, 0, 0, 0], [0, 12, 16, 30], [8, 6, 20, 30]]
    assert found.part.tolist() == pytest.approx([0.304599, 0.520000, 0.520000], abs=1e-6)


def test_parts_lie_in_the_picture_and_have_the_areas_and_ratios_asked_for():
    parts = epoch_parts(20_000, (50, 50), Augment(crop=0.25), 1, 2)
    top, left, rows, columns, flips = parts.T
    assert (parts[:, :2] >= 0).all()
    assert (top + rows <= 50).all()
    assert (left + columns <= 50).all()
    assert not flips.any()
    area, ratio = rows * columns / 2500, columns / rows
    assert 0.23 < area.min() < area.max() <= 1
    # Sides are rounded to pixels, of 21 or more.
    assert 0.75 * 21.5 / 22.5 < ratio.min() < ratio.max() < 4 / 3 * 22.5 / 21.5
    assert abs(np.log(ratio).mean()) < 0.03
    assert min(np.ptp(top), np.ptp(left)) > 20


def test_shares_have_their_distribution():
    """Of beta(a, a) the variance is 1 / (8 a + 4); a box has the area that is not the picture's own."""
    mixed = epoch_mixes(20_000, (30, 30), Augment(mixup=0.5), 1, 0)
    assert abs(mixed.part.mean() - 0.5) < 0.02
    assert abs(mixed.part.var() - 1 / 8) < 0.01
    assert not mixed.box.any()
    both = epoch_mixes(20_000, (30, 30), Augment(mixup=1.0, cutmix=1.0), 1, 0)
    cut = both.share == 1
    assert 0.48 < cut.mean() < 0.52
    area = (both.box[:, 2] - both.box[:, 0]) * (both.box[:, 3] - both.box[:, 1]) / 900
    assert np.allclose(both.part[cut], 1 - area[cut], atol=1e-6)
    assert (both.box[:, :2] >= 0).all()
    assert (both.box[:, 2:] <= 30).all()


@pytest.mark.parametrize("augment", [Augment(crop=0.3, flip=True, mixup=0.3, cutmix=1.0), Augment(shift=2)])
def test_resized_and_mixed_batches_have_their_tails_and_their_host(augment):
    draw = np.random.default_rng(0)
    some = Pictures(draw.integers(0, 256, (10, 8, 6, 3), dtype=np.uint8), (100.0,) * 3, (50.0,) * 3)
    there, here = (
        ImageBatches(
            some,
            np.arange(10) % 4,
            4,
            4,
            augment=augment,
            resident=resident,
            sizes=((0, (4, 3)), (1, (6, 5))),
            classes=5,
        )
        for resident in (True, False)
    )
    assert [there.size(epoch) for epoch in range(3)] == [(4, 3), (6, 5), (6, 5)]
    for epoch, start in ((0, 0), (1, 2)):
        for (x, y), (z, w) in zip(list(there.epoch(epoch))[start:], here.epoch(epoch, start), strict=True):
            assert x.shape[1:] == (3, *there.size(epoch))
            assert torch.equal(x, z)
            assert torch.equal(y, w)
            if augment.mixup:
                assert y.shape[1] == 5
                assert torch.allclose(y.sum(1), torch.ones(len(y), device=y.device))
