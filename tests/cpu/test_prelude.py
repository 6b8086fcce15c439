"""Functions of prelude.h against torch and NumPy, for every number of 16 bits and many floats."""

import ctypes

import numpy as np
import pytest
import torch

from minidl.cpu import build, translate

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler")

_SOURCE = """
void round_16(const float *x, float *f16, float *bf16, int64_t n) {
  for (int64_t i = 0; i < n; i++) { f16[i] = round_f16(x[i]); bf16[i] = round_bf16(x[i]); }
}
void load_16(const uint16_t *x, float *f16, float *bf16, uint16_t *back, uint16_t *bback, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    f16[i] = load_f16(x[i]); bf16[i] = load_bf16(x[i]); back[i] = store_f16(f16[i]); bback[i] = store_bf16(bf16[i]);
  }
}
void functions(const float *x, float *e, float *e2, float *l, float *l2, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    e[i] = exp_f32(x[i]); e2[i] = exp2_f32(x[i]); l[i] = log_f32(x[i]); l2[i] = log2_f32(x[i]);
  }
}
"""


@pytest.fixture(scope="module")
def library():
    return build.library("test_prelude", translate.PRELUDE.read_text() + _SOURCE)


def call(function, *arrays):
    function(*(ctypes.c_void_p(array.ctypes.data) for array in arrays), ctypes.c_int64(len(arrays[0])))


@pytest.fixture(scope="module")
def floats():
    bits = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = halves.view(np.uint32) + np.uint32(0x1000)  # ties, and what lies beside them
    return np.concatenate([bits, halves.view(np.uint32), between, between - 1, between + 1]).view(np.float32)


def test_rounding_to_16_bits_is_torchs(library, floats):
    f16, bf16 = np.empty_like(floats), np.empty_like(floats)
    call(library.round_16, floats, f16, bf16)
    for result, dtype in ((f16, torch.float16), (bf16, torch.bfloat16)):
        expected = torch.from_numpy(floats).to(dtype).float().numpy()
        np.testing.assert_array_equal(result, expected)
        assert (np.signbit(result) == np.signbit(expected))[~np.isnan(expected)].all()


def test_every_number_of_16_bits_is_loaded_and_stored(library):
    x = np.arange(2**16, dtype=np.uint16)
    f16, bf16 = np.empty(2**16, np.float32), np.empty(2**16, np.float32)
    back, bback = np.empty_like(x), np.empty_like(x)
    call(library.load_16, x, f16, bf16, back, bback)
    np.testing.assert_array_equal(f16, x.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(bf16, torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).float().numpy())
    is_number = ~np.isnan(f16)
    np.testing.assert_array_equal(back[is_number], x[is_number])
    assert (back[~is_number] & 0x7FFF > 0x7C00).all()
    np.testing.assert_array_equal(bback, x)


def test_exponentials_and_logarithms_are_within_three_units(library, floats):
    near = np.linspace(-110, 100, 2**18, dtype=np.float32)
    x = np.concatenate([floats, near, np.linspace(0, 4, 2**18, dtype=np.float32), -near])
    results = [np.empty_like(x) for _ in range(4)]
    call(library.functions, x, *results)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        expected = np.exp(wide), np.exp2(wide), np.log(wide), np.log2(wide)
        for name, result, exact in zip(("exp", "exp2", "log", "log2"), results, expected, strict=True):
            rounded = exact.astype(np.float32)
            finite = np.isfinite(rounded)
            np.testing.assert_array_equal(result[~finite], rounded[~finite], err_msg=name)
            unit = np.spacing(np.maximum(np.abs(rounded[finite]), np.finfo(np.float32).tiny))
            worst = (np.abs(result[finite] - exact[finite]) / unit).max()
            assert worst < 3, f"{name}: {worst}"
