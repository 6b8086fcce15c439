// Functions that translated kernels call. Floating-point values of 16 bits are kept as float and rounded explicitly.
// Choices are made by bits: GCC 12 vectorises loops with branches wrongly in places, so it gets none to vectorise.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_f32(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float f32_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE uint64_t bits_f64(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
INLINE double f64_bits(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }

INLINE float select_f32(int32_t c, float a, float b) {
  uint32_t m = -(uint32_t)c;
  return f32_bits((bits_f32(a) & m) | (bits_f32(b) & ~m));
}
INLINE double select_f64(int32_t c, double a, double b) {
  uint64_t m = -(uint64_t)c;
  return f64_bits((bits_f64(a) & m) | (bits_f64(b) & ~m));
}
INLINE int32_t select_i32(int32_t c, int32_t a, int32_t b) { return (a & -c) | (b & ~-c); }
INLINE int64_t select_i64(int32_t c, int64_t a, int64_t b) { return (a & -(int64_t)c) | (b & ~-(int64_t)c); }

INLINE float load_bf16(uint16_t h) { return f32_bits((uint32_t)h << 16); }
INLINE uint16_t store_bf16(float x) { return bits_f32(x) >> 16; }
INLINE float round_bf16(float x) {
  uint32_t u = bits_f32(x), r = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
  return select_f32(x == x, f32_bits(r), x);
}
INLINE float load_f16(uint16_t h) {
  uint32_t m = h & 0x7fffu;
  float x = f32_bits(m << 13) * 0x1p112f;
  uint32_t u = select_i32(m >= 0x7c00u, 0x7f800000u | m << 13, bits_f32(x));
  return f32_bits(u | (uint32_t)(h & 0x8000u) << 16);
}
INLINE uint16_t store_f16(float x) {
  uint32_t u = bits_f32(x), a = u & 0x7fffffffu;
  uint32_t h = bits_f32(f32_bits(a) * 0x1p-112f) >> 13;
  h = select_i32(a >= 0x7f800000u, 0x7c00u | (uint32_t)(a > 0x7f800000u) << 9, h);
  return h | (u >> 16 & 0x8000u);
}
INLINE float round_f16(float x) {
  uint32_t u = bits_f32(x), a = u & 0x7fffffffu, s = u & 0x80000000u;
  float y = f32_bits(a);
  float small = (y + 0.75f) - 0.75f;
  uint32_t r = (a + 0xfff + (a >> 13 & 1)) & ~0x1fffu;
  r = select_i32(r >= 0x47800000u, 0x7f800000u, r);
  r = select_i32(a < 0x38800000u, bits_f32(small), r);
  return select_f32(x == x, f32_bits(r | s), x);
}

// Where the result is 0, also a factor is: products that underflow take four times as long, and padding is -infinity.
INLINE float exp2_f32(float x) {
  int32_t zero = x < -150.f;
  x = select_f32(x > 129.f, 129.f, x);
  x = select_f32(x < -151.f, -151.f, x);
  float n = (x + 12582912.f) - 12582912.f, f = x - n;
  float p = (1.52527338e-5f * f + 1.54035304e-4f) * f + 1.33335581e-3f;
  p = ((p * f + 9.61812911e-3f) * f + 5.55041087e-2f) * f + 2.40226507e-1f;
  p = select_f32(zero, 0.f, (p * f + 6.93147181e-1f) * f + 1.f);
  int32_t e = (int32_t)n, half = e >> 1;
  return p * f32_bits((uint32_t)(half + 127) << 23) * f32_bits((uint32_t)(e - half + 127) << 23);
}
INLINE float exp_f32(float x) {
  int32_t zero = x < -103.98f;
  x = select_f32(x > 89.f, 89.f, x);
  x = select_f32(x < -105.f, -105.f, x);
  float n = (x * 1.44269504f + 12582912.f) - 12582912.f;
  float f = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  float p = (1.98412698e-4f * f + 1.38888889e-3f) * f + 8.33333333e-3f;
  p = ((p * f + 4.16666667e-2f) * f + 1.66666667e-1f) * f + 0.5f;
  p = select_f32(zero, 0.f, (p * f + 1.f) * f + 1.f);
  int32_t e = (int32_t)n, half = e >> 1;
  return p * f32_bits((uint32_t)(half + 127) << 23) * f32_bits((uint32_t)(e - half + 127) << 23);
}
// As fdlibm's log: k ln 2 + log(1 + f).
INLINE float log_f32(float x) {
  int32_t small = x < 1.17549435e-38f;
  float tiny = select_f32(small, 8388608.f, 1.f);
  uint32_t u = bits_f32(x * tiny) - 0x3f3504f3u;
  int32_t k = ((int32_t)u >> 23) - 23 * small;
  float f = f32_bits((u & 0x7fffffu) + 0x3f3504f3u) - 1.f, s = f / (2.f + f), z = s * s, h = 0.5f * f * f;
  float r = z * (0.666666627f + z * (0.400009722f + z * (0.284987867f + z * 0.242790788f)));
  float y = (float)k * 0.693138123f - ((h - (s * (h + r) + (float)k * 9.05800061e-6f)) - f);
  y = select_f32(x == 0.f, -INFINITY, select_f32(x < 0.f, NAN, y));
  return select_f32((x == INFINITY) | (x != x), x, y);
}
INLINE float log2_f32(float x) { return log_f32(x) * 1.44269504f; }

INLINE int32_t div_i32(int32_t a, int32_t b) { return b == 0 ? 0 : b == -1 ? (int32_t)(0u - (uint32_t)a) : a / b; }
INLINE int64_t div_i64(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? (int64_t)(0ull - (uint64_t)a) : a / b; }
INLINE int32_t rem_i32(int32_t a, int32_t b) { return b == 0 || b == -1 ? 0 : a % b; }
INLINE int64_t rem_i64(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }

// Vectors of products.
#ifdef __AVX512F__
#define BYTES 64
#else
#define BYTES 32
#endif
typedef float vector_f32 __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef double vector_f64 __attribute__((vector_size(BYTES), aligned(8), may_alias));
typedef float half_f32 __attribute__((vector_size(BYTES / 2), aligned(4), may_alias));
typedef double half_f64 __attribute__((vector_size(BYTES / 2), aligned(8), may_alias));
