// Philox-4x32-10 draws on the CPU: uniform, normal, dropout, stochastic rounding, for one tile of a tensor; and codes of 8 bits by them.
//
// The definition is in docs/randomness.md; meshc/ops/random.py (torch) and meshc/ops/philox_triton.py hold the same arithmetic.
// Compile with -ffp-contract=off: normals are bit-equal everywhere because only IEEE + - * / sqrt are used, never a fused multiply-add.
// Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(MESHC_NO_CLONES)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;  // counters at a time
constexpr int WORDS = 4 * LANES;
constexpr int MAX_DIMS = 16;
constexpr int64_t SHORT_ROW = 16;  // shorter rows take one counter an element; longer ones one counter for four
constexpr int64_t ELEMENTS_PER_THREAD = 1 << 16;

enum Kind { UNIFORM32, UNIFORM64, NORMAL32, NORMAL64, MASK, DROPOUT32, DROPOUT64, BACKWARD32, BACKWARD64, ROUND16 };

struct Call {
  int kind;
  uint32_t key[2], call, step;
  int64_t dims, base, size[MAX_DIMS], stride[MAX_DIMS];  // element (i0, ...) has global index base + sum i_k * stride_k
  uint32_t threshold;                                    // keep where (word >> 8) >= threshold
  double scale;
  const void* x;
  void* out;
  uint8_t* mask;
};

// word[w][l] is word w of the block whose counter is (low[l], high[l], call, step).
INLINE void philox(const uint32_t* low, const uint32_t* high, const Call& c, uint32_t word[4][LANES]) {
  for (int l = 0; l < LANES; ++l) {
    uint32_t c0 = low[l], c1 = high[l], c2 = c.call, c3 = c.step, k0 = c.key[0], k1 = c.key[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      uint64_t a = uint64_t(c0) * 0xD2511F53u, b = uint64_t(c2) * 0xCD9E8D57u;
      c0 = uint32_t(b >> 32) ^ c1 ^ k0;
      c1 = uint32_t(b);
      c2 = uint32_t(a >> 32) ^ c3 ^ k1;
      c3 = uint32_t(a);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    word[0][l] = c0, word[1][l] = c1, word[2][l] = c2, word[3][l] = c3;
  }
}

// Coefficients: fdlibm e_log.c, e_logf.c, k_sin.c, k_cos.c; single sine and cosine: Cephes sinf.c.
struct Single {
  using Float = float;
  using Word = uint32_t;
  using Int = int32_t;
  static constexpr int bits = 24, mantissa = 23, bias = 127;
  static constexpr Word one = 0x3f800000, sqrt_half = 0x3f3504f3;
  static constexpr Float ln2_high = 6.9313812256e-01f, ln2_low = 9.0580006145e-06f;
  static constexpr Float turn = float(6.283185307179586 / 16777216.0);  // 2 pi / 2^bits
  static constexpr int log_terms = 4, sin_terms = 3, cos_terms = 3;
  static constexpr Float log[] = {6.6666662693e-01f, 4.0000972152e-01f, 2.8498786688e-01f, 2.4279078841e-01f};
  static constexpr Float sin[] = {-1.6666654611e-1f, 8.3321608736e-3f, -1.9515295891e-4f};
  static constexpr Float cos[] = {4.166664568298827e-2f, -1.388731625493765e-3f, 2.443315711809948e-5f};
};
struct Double {
  using Float = double;
  using Word = uint64_t;
  using Int = int64_t;
  static constexpr int bits = 53, mantissa = 52, bias = 1023;
  static constexpr Word one = 0x3ff0000000000000, sqrt_half = 0x3fe6a09e667f3bcd;
  static constexpr Float ln2_high = 6.93147180369123816490e-01, ln2_low = 1.90821492927058770002e-10;
  static constexpr Float turn = 6.283185307179586 / 9007199254740992.0;
  static constexpr int log_terms = 7, sin_terms = 6, cos_terms = 6;
  static constexpr Float log[] = {6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
                                  1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01};
  static constexpr Float sin[] = {-1.66666666666666324348e-01, 8.33333333332248946124e-03,  -1.98412698298579493134e-04,
                                  2.75573137070700676789e-06,  -2.50507602534068634195e-08, 1.58969099521155010221e-10};
  static constexpr Float cos[] = {4.16666666666666019037e-02,  -1.38888888888741095749e-03, 2.48015872894767294178e-05,
                                  -2.75573143513906633035e-07, 2.08757232129817482790e-09,  -1.13596475577881948265e-11};
};
constexpr float Single::log[], Single::sin[], Single::cos[];
constexpr double Double::log[], Double::sin[], Double::cos[];

template <class F>
INLINE F horner(F x, const F* c, int terms) {
  F y = c[terms - 1];
  for (int i = terms - 2; i >= 0; --i) y = y * x + c[i];
  return y;
}

// Box-Muller: sqrt(-2 ln((a + 1) / 2^bits)) * cos(2 pi (b - odd / 4) / 2^bits), for integers a, b in [0, 2^bits).
template <class P>
INLINE typename P::Float normal(typename P::Word a, typename P::Word b, typename P::Word odd) {
  using F = typename P::Float;
  using W = typename P::Word;
  using I = typename P::Int;
  F n = F(I(a + 1));
  W ix;
  std::memcpy(&ix, &n, sizeof n);
  ix += P::one - P::sqrt_half;
  F e = F(int32_t(ix >> P::mantissa) - P::bias - P::bits);
  ix = (ix & ((W(1) << P::mantissa) - 1)) + P::sqrt_half;
  F m;
  std::memcpy(&m, &ix, sizeof m);
  F f = m - F(1), s = f / (F(2) + f), z = s * s;
  F tail = z * horner(z, P::log, P::log_terms), half = F(0.5) * (f * f);
  F ln = e * P::ln2_high - ((half - (s * (half + tail) + e * P::ln2_low)) - f);

  W turn = (b - (odd << (P::bits - 2))) & ((W(1) << P::bits) - 1);
  W quarter = ((turn + (W(1) << (P::bits - 3))) >> (P::bits - 2)) & 3;
  I r = I(turn) - I(quarter << (P::bits - 2));
  r = r >= (I(1) << (P::bits - 1)) ? r - (I(1) << P::bits) : r;
  F angle = F(r) * P::turn, q = angle * angle;
  F sine = angle + (angle * q) * horner(q, P::sin, P::sin_terms);
  F cosine = (F(1) - F(0.5) * q) + (q * q) * horner(q, P::cos, P::cos_terms);
  F c = (quarter & 1) ? sine : cosine;
  c = ((quarter + 1) & 2) ? -c : c;
  return std::sqrt(F(-2) * ln) * c;
}

// Walks the rows (innermost dim) of a tile; index() is the global index of the current element.
struct Cursor {
  const Call& c;
  int64_t at[MAX_DIMS], row;  // row: global index of the current row's first element
  Cursor(const Call& call, int64_t element) : c(call), row(call.base) {
    for (int64_t d = c.dims - 1; d >= 0; --d) {
      at[d] = element % c.size[d];
      element /= c.size[d];
      if (d < c.dims - 1) row += at[d] * c.stride[d];
    }
  }
  int64_t left() const { return c.size[c.dims - 1] - at[c.dims - 1]; }
  int64_t index() const { return row + at[c.dims - 1] * c.stride[c.dims - 1]; }
  void advance(int64_t n) {  // n <= left()
    int64_t d = c.dims - 1;
    if ((at[d] += n) < c.size[d]) return;
    at[d] = 0;
    while (--d >= 0) {
      row += c.stride[d];
      if (++at[d] < c.size[d]) return;
      row -= c.stride[d] * c.size[d];
      at[d] = 0;
    }
  }
};

template <class F>
INLINE void dropout(const Call& c, int64_t to, const uint32_t* w, int n) {
  const F* x = static_cast<const F*>(c.x) + to;
  F* out = static_cast<F*>(c.out) + to;
  uint8_t* mask = c.mask + to;
  const F scale = F(c.scale);
  for (int i = 0; i < n; ++i) out[i] = (w[i] >> 8) >= c.threshold ? x[i] * scale : F(0);
  for (int i = 0; i < n; ++i) mask[i] = (w[i] >> 8) >= c.threshold;
}

// Kinds that need one word an element: w[i] belongs to local element to + i.
INLINE void emit_words(const Call& c, int64_t to, const uint32_t* w, int n) {
  if (c.kind == UNIFORM32) {
    float* out = static_cast<float*>(c.out) + to;
    for (int i = 0; i < n; ++i) out[i] = float(int32_t(w[i] >> 8)) * 0x1p-24f;
  } else if (c.kind == MASK) {
    for (int i = 0; i < n; ++i) c.mask[to + i] = (w[i] >> 8) >= c.threshold;
  } else if (c.kind == ROUND16) {  // float32 to bfloat16: up where what is cut off is more than the draw leaves
    const uint32_t* x = static_cast<const uint32_t*>(c.x) + to;
    uint16_t* out = static_cast<uint16_t*>(c.out) + to;
    for (int i = 0; i < n; ++i) {
      const uint32_t rounded = (x[i] + (w[i] >> 16)) >> 16;
      out[i] = (x[i] & 0x7fffffffu) > 0x7f800000u ? uint16_t(0x7fc0) : uint16_t(rounded);  // NaN stays one
    }
  } else if (c.kind == DROPOUT32) {
    dropout<float>(c, to, w, n);
  } else {
    dropout<double>(c, to, w, n);
  }
}

// One counter an element: any row, any kind.
INLINE void emit_lanes(const Call& c, int64_t to, const int64_t* index, int n) {
  const bool wide = c.kind == UNIFORM64 || c.kind == NORMAL64;
  const int shift = wide ? 1 : 2;
  uint32_t low[LANES], high[LANES], word[4][LANES];
  for (int l = 0; l < LANES; ++l) low[l] = uint32_t(index[l] >> shift), high[l] = uint32_t(uint64_t(index[l] >> shift) >> 32);
  philox(low, high, c, word);
  if (c.kind == UNIFORM64) {
    for (int l = 0; l < n; ++l) {
      int w = 2 * (index[l] & 1);
      static_cast<double*>(c.out)[to + l] = double(int64_t((uint64_t(word[w][l]) << 32 | word[w + 1][l]) >> 11)) * 0x1p-53;
    }
  } else if (c.kind == NORMAL64) {
    double out[LANES];
    for (int l = 0; l < LANES; ++l) {
      uint64_t a = (uint64_t(word[0][l]) << 32 | word[1][l]) >> 11, b = (uint64_t(word[2][l]) << 32 | word[3][l]) >> 11;
      out[l] = normal<Double>(a, b, index[l] & 1);
    }
    std::memcpy(static_cast<double*>(c.out) + to, out, n * sizeof(double));
  } else if (c.kind == NORMAL32) {
    float out[LANES];
    for (int l = 0; l < LANES; ++l) {
      uint32_t i = uint32_t(index[l]);
      uint32_t a = i & 2 ? word[2][l] : word[0][l], b = i & 2 ? word[3][l] : word[1][l];
      out[l] = normal<Single>(a >> 8, b >> 8, i & 1);
    }
    std::memcpy(static_cast<float*>(c.out) + to, out, n * sizeof(float));
  } else {
    uint32_t w[LANES];
    for (int l = 0; l < LANES; ++l) {
      uint32_t i = uint32_t(index[l]);
      uint32_t even = i & 2 ? word[2][l] : word[0][l], odd = i & 2 ? word[3][l] : word[1][l];
      w[l] = i & 1 ? odd : even;
    }
    emit_words(c, to, w, n);
  }
}

CLONES void draw_rows(const Call& c, int64_t begin, int64_t end) {
  Cursor at(c, begin);
  while (begin < end) {
    const int64_t length = std::min(at.left(), end - begin), first = at.index();
    for (int64_t done = 0; done < length;) {
      const uint64_t block = uint64_t(first + done) >> 2;
      const int skip = (first + done) & 3, n = int(std::min<int64_t>(WORDS - skip, length - done));
      uint32_t low[LANES], high[LANES], word[4][LANES], w[WORDS];
      for (int l = 0; l < LANES; ++l) low[l] = uint32_t(block) + l, high[l] = uint32_t(block >> 32) + (low[l] < uint32_t(block));
      philox(low, high, c, word);
      for (int l = 0; l < LANES; ++l)
        for (int k = 0; k < 4; ++k) w[4 * l + k] = word[k][l];
      emit_words(c, begin + done, w + skip, n);
      done += n;
    }
    at.advance(length);
    begin += length;
  }
}

CLONES void draw_elements(const Call& c, int64_t begin, int64_t end) {
  Cursor at(c, begin);
  const int64_t stride = c.stride[c.dims - 1];
  int64_t index[LANES] = {};
  while (begin < end) {
    const int n = int(std::min<int64_t>(LANES, end - begin));
    for (int filled = 0; filled < n;) {
      const int length = int(std::min<int64_t>(at.left(), n - filled));
      const int64_t first = at.index();
      for (int j = 0; j < length; ++j) index[filled + j] = first + j * stride;
      filled += length;
      at.advance(length);
    }
    emit_lanes(c, begin, index, n);
    begin += n;
  }
}

template <class F>
INLINE void backward(const Call& c, int64_t begin, int64_t end) {
  const F* grad = static_cast<const F*>(c.x);
  F* out = static_cast<F*>(c.out);
  const F scale = F(c.scale);
  for (int64_t i = begin; i < end; ++i) {
    const F value = grad[i] * scale;
    out[i] = c.mask[i] ? value : F(0);
  }
}
CLONES void backward32(const Call& c, int64_t begin, int64_t end) { backward<float>(c, begin, end); }
CLONES void backward64(const Call& c, int64_t begin, int64_t end) { backward<double>(c, begin, end); }

void part(const Call& c, int64_t begin, int64_t end) {
  const bool one_word = c.kind == UNIFORM32 || c.kind == MASK || c.kind == DROPOUT32 || c.kind == DROPOUT64 || c.kind == ROUND16;
  if (c.kind == BACKWARD32) {
    backward32(c, begin, end);
  } else if (c.kind == BACKWARD64) {
    backward64(c, begin, end);
  } else if (one_word && c.size[c.dims - 1] >= SHORT_ROW && c.stride[c.dims - 1] == 1) {
    draw_rows(c, begin, end);
  } else {
    draw_elements(c, begin, end);
  }
}

struct Coding {
  const float *x, *scale, *drawn, *known;  // drawn may be null: to the nearest
  const int64_t* block;                    // of each column
  const uint8_t* first;                    // by a magnitude's upper 16 bits, a code that is not above it
  int64_t count, columns, blocks;
  bool sign;
  uint8_t* codes;
};

// Of rows begin to end; the arithmetic is that of meshc/ops/coded.py, operation by operation.
void encode(const Coding& c, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float *x = c.x + row * c.columns, *scale = c.scale + row * c.blocks;
    const float* drawn = c.drawn ? c.drawn + row * c.columns : nullptr;
    uint8_t* codes = c.codes + row * c.columns;
    for (int64_t i = 0; i < c.columns; ++i) {
      float wide = x[i] / scale[c.block[i]];
      if (wide != wide) wide = 0.0f;  // 0 / 0, and blocks that are not finite
      const float size = std::min(c.sign ? std::fabs(wide) : std::max(wide, 0.0f), 1.0f);
      uint32_t bits;
      std::memcpy(&bits, &size, 4);
      int64_t lower = c.first[bits >> 16];
      while (lower < c.count - 2 && c.known[lower + 1] <= size) ++lower;
      const float share = (size - c.known[lower]) / (c.known[lower + 1] - c.known[lower]);
      int64_t code = lower + (drawn ? drawn[i] < share : share > 0.5f);
      if (c.sign)
        code += wide < 0 && code > 0 ? 128 : 0;
      else
        code += wide > 0 && code == 0;
      codes[i] = uint8_t(code);
    }
  }
}

}  // namespace

extern "C" {

// State in 8 bits: x [rows, columns] as codes, in units of scale [rows, blocks]. known: `count` magnitudes; first: 0x3F81 entries.
// Returns 0, or 1 if these do not fit together; then nothing is written.
int meshc_encode(const float* x, const float* scale, const float* drawn, const int64_t* block, const float* known, const uint8_t* first,
                 int64_t count, int64_t rows, int64_t columns, int64_t blocks, int sign, uint8_t* codes, int64_t max_threads) {
  if (!x || !scale || !block || !known || !first || !codes || count < 2 || count > (sign ? 128 : 256) || rows < 0 || columns < 0) return 1;
  for (int64_t i = 0; i < columns; ++i)
    if (block[i] < 0 || block[i] >= blocks) return 1;
  const Coding c{x, scale, drawn, known, block, first, count, columns, blocks, sign != 0, codes};
  int64_t threads = std::min({max_threads, rows, rows * columns / ELEMENTS_PER_THREAD});
  if (threads < 1) threads = 1;
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) {
    const int64_t begin = rows * t / threads, end = rows * (t + 1) / threads;
    try {
      others.emplace_back(encode, std::cref(c), begin, end);
    } catch (const std::system_error&) {  // no thread to be had: do its part here
      encode(c, begin, end);
    }
  }
  encode(c, 0, rows / threads);
  for (auto& other : others) other.join();
  return 0;
}

// One tile. seed_step: two int64; size, stride: `dims` int64 each (at most 16); pointers that the kind does not use may be null.
// Returns 0, or 1 if these do not fit together; then nothing is written.
int meshc_draw(int kind, const int64_t* seed_step, int64_t call, int64_t dims, int64_t base, const int64_t* size, const int64_t* stride,
                int64_t threshold, double scale, const void* x, void* out, void* mask, int64_t elements, int64_t max_threads) {
  if (kind < UNIFORM32 || kind > ROUND16 || dims < 1 || dims > MAX_DIMS || elements < 0) return 1;
  const bool backward = kind == BACKWARD32 || kind == BACKWARD64, dropout = kind == DROPOUT32 || kind == DROPOUT64;
  const bool reads = backward || dropout || kind == ROUND16;
  if ((!seed_step && !backward) || (!x && reads) || (!out && kind != MASK)) return 1;
  if (!mask && (backward || dropout || kind == MASK)) return 1;
  int64_t room = 1;
  for (int64_t d = 0; d < dims; ++d)
    if (size[d] < 0 || __builtin_mul_overflow(room, size[d], &room)) return 1;
  if (room != elements) return 1;
  Call c{};
  c.kind = kind;
  if (seed_step) {
    c.key[0] = uint32_t(seed_step[0]), c.key[1] = uint32_t(uint64_t(seed_step[0]) >> 32);
    c.step = uint32_t(seed_step[1]);
  }
  c.call = uint32_t(call), c.dims = dims, c.base = base, c.threshold = uint32_t(threshold), c.scale = scale;
  for (int64_t d = 0; d < dims; ++d) c.size[d] = size[d], c.stride[d] = stride[d];
  c.x = x, c.out = out, c.mask = static_cast<uint8_t*>(mask);
  int64_t threads = std::min(max_threads, elements / ELEMENTS_PER_THREAD);
  if (threads < 1) threads = 1;
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) {
    const int64_t begin = elements * t / threads, end = elements * (t + 1) / threads;
    try {
      others.emplace_back(part, std::cref(c), begin, end);
    } catch (const std::system_error&) {  // no thread to be had: do its part here
      part(c, begin, end);
    }
  }
  part(c, 0, elements / threads);
  for (auto& other : others) other.join();
  return 0;
}

// One block, for tests: counter[4], key[2] -> out[4].
void meshc_block(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  Call c{};
  c.key[0] = key[0], c.key[1] = key[1], c.call = counter[2], c.step = counter[3];
  uint32_t low[LANES], high[LANES], word[4][LANES];
  for (int l = 0; l < LANES; ++l) low[l] = counter[0], high[l] = counter[1];
  philox(low, high, c, word);
  for (int k = 0; k < 4; ++k) out[k] = word[k][0];
}
}
