"""Random words of Philox4x32-10, and uniform and normal numbers of them: helpers of the kernels in `random`."""

import triton
import triton.language as tl

HALF_PI = tl.constexpr(1.5707963267948966)


@triton.jit
def halves(p_key, seed_low, seed_high, stream_low, stream_high):
    """Return seed and stream in 32-bit halves: the arguments, or with a key its seed, and its stream plus stream."""
    if p_key is not None:
        seed = tl.load(p_key)
        stream = tl.load(p_key + 1) + (stream_high.to(tl.int64) << 32)
        stream += stream_low.to(tl.uint32, bitcast=True).to(tl.int64)
        seed_low = (seed & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        seed_high = (seed >> 32).to(tl.int32)
        stream_low = (stream & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        stream_high = (stream >> 32).to(tl.int32)
    return seed_low, seed_high, stream_low, stream_high


@triton.jit
def words(seed_low, seed_high, stream_low, stream_high, o):
    """The four words (uint32) of the groups numbered o (int64); seed and stream in halves, as the bits of int32."""
    low = (o & 0xFFFFFFFF).to(tl.uint32)
    high = ((o >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox_impl(
        low, high,
        tl.zeros_like(low) + stream_low.to(tl.uint32, bitcast=True),
        tl.zeros_like(low) + stream_high.to(tl.uint32, bitcast=True),
        seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True),
    )  # fmt: skip


@triton.jit
def interleave_4(a, b, c, d):
    """a_0 b_0 c_0 d_0 a_1 ..."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def from_bits(bits):
    """The float64 whose bits an integer holds: a Python float would arrive as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def unit_24(word):
    """[0, 1) in steps of 2^-24, float32."""
    return (word >> 8).to(tl.float32) * (2.0**-24)


@triton.jit
def bits_53(word, next_word):
    """53 bits as a float64 below 2^53."""
    return (word >> 5).to(tl.float64) * 67108864.0 + (next_word >> 6).to(tl.float64)


@triton.jit
def quarter_turns(word):
    """An angle of the circle as (quarter 0 to 3, rest in units of 2^-32 quarters, from -2^31 to below 2^31)."""
    return word >> 30, (word << 2).to(tl.int32, bitcast=True)


@triton.jit
def sin_cos(quarter, rest):
    """(sin, cos) of (quarter + rest) * pi / 2, rest in [-1/2, 1/2]: Taylor series, below half an ulp from their end."""
    TERMS: tl.constexpr = 10 if rest.dtype == tl.float64 else 6
    x = rest * HALF_PI
    x2 = x * x
    s = tl.full(rest.shape, 1.0, rest.dtype)
    c = s
    for k in tl.static_range(2 * TERMS - 2, 0, -2):
        s = 1.0 - x2 * s * (1.0 / (k * (k + 1)))
        c = 1.0 - x2 * c * (1.0 / (k * (k - 1)))
    s = s * x
    odd = (quarter & 1) != 0
    sine = tl.where(odd, c, s)
    cosine = tl.where(odd, s, c)
    sine = tl.where(quarter >= 2, sine * -1.0, sine)
    return sine, tl.where((quarter == 1) | (quarter == 2), cosine * -1.0, cosine)


@triton.jit
def normal_pair(unit, quarter, rest):
    """Two normal numbers from a number in (0, 1] and an angle."""
    if unit.dtype == tl.float32:
        radius = tl.sqrt_rn(-2.0 * tl.log(unit))
    else:
        radius = tl.sqrt(-2.0 * tl.log(unit))
    sine, cosine = sin_cos(quarter, rest)
    return radius * cosine, radius * sine


@triton.jit
def normals_32(word, next_word):
    """Two float32 normal numbers from two words."""
    quarter, rest = quarter_turns(next_word)
    return normal_pair((word.to(tl.float32) + 1.0) * (2.0**-32), quarter, rest.to(tl.float32) * (2.0**-32))


@triton.jit
def normals_64(a, b, c, d):
    """Two float64 normal numbers from four words."""
    quarter, rest = quarter_turns(c)
    rest = (rest.to(tl.float64) + d.to(tl.float64) * (2.0**-30)) * (2.0**-32)
    return normal_pair((bits_53(a, b) + 1.0) * (2.0**-53), quarter, rest)
