import numpy as np
import pytest
from scipy import stats

import minidl
from minidl.data import DataError
from minidl.generation import latents


def test_a_row_depends_on_its_seed_alone():
    rows = latents.from_seeds([5, 0, 2**40], 100)
    again = latents.from_seeds([2**40, 7, 5], 100)
    assert (rows[0] == again[2]).all()
    assert (rows[2] == again[0]).all()
    assert (rows[1] == minidl.randn(100, seed=0).data.cpu().numpy()).all()
    assert rows.dtype == np.float32
    assert latents.from_seeds([], 3).shape == (0, 3)


def test_latents_are_standard_normal():
    z = latents.from_seeds(range(50), 200).ravel()
    assert stats.kstest(z, "norm").pvalue > 1e-3


def test_truncation_shortens_long_latents_and_keeps_their_direction():
    z = latents.from_seeds(range(50), 200)
    lengths = np.linalg.norm(z, axis=1)
    for limit in (0.3, 1.0, 2.5):
        short = latents.from_seeds(range(50), 200, limit)
        assert np.allclose(np.linalg.norm(short, axis=1), np.minimum(lengths, limit * 200**0.5), rtol=1e-6)
        assert np.allclose(short / np.linalg.norm(short, axis=1)[:, None], z / lengths[:, None], rtol=1e-6)
    assert (latents.shorten(z, 50.0) == z).all()
    assert (latents.shorten(np.zeros((1, 2), dtype=np.float32), 1.0) == 0).all()
    with pytest.raises(ValueError, match="expected a number above 0"):
        latents.shorten(z, 0.0)


def test_a_walk_begins_and_ends_at_its_ends_and_keeps_the_length():
    a, b = latents.from_seeds([3, 17], 100)
    rows = latents.slerp(a, b, 9)
    assert (rows[0] == a).all()
    assert (rows[-1] == b).all()
    lengths = np.linalg.norm(rows, axis=1)
    assert min(np.linalg.norm(a), np.linalg.norm(b)) * 0.99 < lengths.min()
    assert lengths.max() < max(np.linalg.norm(a), np.linalg.norm(b)) * 1.02
    assert np.linalg.norm((a + b) / 2) < 0.8 * lengths[4], "a straight line comes nearer to the middle"
    steps = np.linalg.norm(np.diff(rows, axis=0), axis=1)
    assert steps.max() / steps.min() < 1.2


def test_a_walk_on_the_unit_circle():
    rows = latents.slerp(np.array([1.0, 0.0]), np.array([0.0, 1.0]), 4)
    angles = np.arange(4) * np.pi / 6
    assert np.allclose(rows, np.stack([np.cos(angles), np.sin(angles)], axis=1), atol=1e-7)


@pytest.mark.parametrize("end", [[2.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
def test_a_walk_without_an_angle_is_straight(end):
    rows = latents.slerp(np.array([1.0, 0.0]), np.array(end), 3)
    assert np.allclose(rows[1], (np.array([1.0, 0.0]) + end) / 2)
    assert np.isfinite(rows).all()


def test_files_of_latents(tmp_path):
    z = latents.from_seeds(range(3), 4)
    text = tmp_path / "z.txt"
    text.write_text("\n".join(" ".join(map(str, row)) for row in z.tolist()))
    assert (latents.read(text, 4) == z).all()
    text.write_text("\ufeff" + "\n".join(map(repr, z.ravel().tolist())) + "\n\n")
    assert (latents.read(text, 4) == z).all(), "where lines end does not matter"
    for array in (z, z.astype(np.float64), z[:, :, None, None], z.astype(">f4"), np.asfortranarray(z)):
        np.save(tmp_path / "z.npy", array)
        assert (latents.read(tmp_path / "z.npy", 4) == z).all()
    np.save(tmp_path / "z.npy", z[0])
    assert (latents.read(tmp_path / "z.npy", 4) == z[:1]).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: expected 4 numbers for each picture (shape [N, 4])"),
        (b"1 2 3", "has 3 numbers, which is not a multiple of 4: expected 4 numbers for each picture"),
        (b"1 2 x 4", "'x' (value 3) is not a number"),
        (b"1 2 nan 4", "value 3 of latent 1 is nan, expected finite numbers"),
        (b"1 2 3 4 5 6 7 1e39", "value 4 of latent 2 is 1e+39, expected finite numbers"),
        (b"\xff\xfe\x00", "is not text"),
    ],
)
def test_text_that_is_no_latents(tmp_path, content, message):
    path = tmp_path / "z.txt"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        latents.read(path, 4)
    assert message in str(caught.value)


def test_arrays_that_are_no_latents(tmp_path):
    path = tmp_path / "z.npy"
    for array, message in (
        (np.zeros((2, 3)), r"has shape \[2, 3\], expected 4 numbers for each picture \(shape \[N, 4\]\)"),
        (np.zeros(5), r"has shape \[5\]"),
        (np.zeros((0, 4)), r"has shape \[0, 4\]"),
        (np.zeros((2, 4), dtype=complex), "has values of type complex128"),
        (np.array([[1, 2, np.inf, 4]]), "value 3 of latent 1 is inf"),
    ):
        np.save(path, array)
        with pytest.raises(DataError, match=message):
            latents.read(path, 4)
    np.save(path, np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="is not a NumPy array file"):
        latents.read(path, 4)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%s, 4), }"
    huge, odd, open_end = header % (b"9" * 30), header % b"True", header[:-4]
    damaged = [b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text for text in (huge, odd, open_end)]
    for content in (b"\x93NUMPY\x01", b"PK\x03\x04 no archive", b"PK\x05\x06" + bytes(18), damaged[2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not a NumPy array file"):
            latents.read(path, 4)
    path.write_bytes(damaged[1].replace(b"True", b"Trve"))
    with pytest.raises(DataError, match=r"is not a NumPy array file: its header cannot be read$"):
        latents.read(path, 4)
    # Told before the memory is taken, which there may be.
    less = damaged[0].replace(b"9" * 30, b"9" * 9 + b" " * 21)
    for content, size in ((damaged[0], "15,999,999,999,999"), (less, "15,999,999,984"), (damaged[1], "16")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"is truncated: its header has shape .*, {size}.* bytes, and it has 0"):
            latents.read(path, 4)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        latents.read(tmp_path / "none.npy", 4)
    with pytest.raises(DataError, match=r"give a \.txt or \.npy file"):
        latents.read(tmp_path / "z.csv", 4)
