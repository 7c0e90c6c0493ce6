// Decoding rows against a paged cache [block, head, slot, dim] of float32, bfloat16 or float16, computed in float32.
//
// One task is a part of one row's context for one key head and its group of query heads: every key and value is read
// once, scores never leave the first cache level, and slots beyond a context are never read. A row's parts are joined by
// rescaling partial softmaxes (FlashAttention, arXiv 2205.14135, section 3.1; split over keys: Flash-Decoding).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 8;
constexpr int64_t kLine = 64, kAhead = 64 * kLine;  // bytes of the next block to ask for early
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVector __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint16_t ShortVector __attribute__((vector_size(kLanes * sizeof(uint16_t))));

inline Vector load(const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

enum BFloat16 : uint16_t {};
enum Float16 : uint16_t {};

inline IntVector load_bits(const void* from) {
  ShortVector narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  return __builtin_convertvector(narrow, IntVector);
}

inline Vector load(const BFloat16* from) { return (Vector)(load_bits(from) << 16); }

#ifdef __F16C__
inline Vector load(const Float16* from) {
  return (Vector)(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
#else
// The exponent is 112 too small once the bits are in place; infinities and NaN have the largest.
inline Vector load(const Float16* from) {
  const IntVector bits = load_bits(from), magnitude = (bits & 0x7fff) << 13, special = magnitude >= 0x7c00 << 13;
  const IntVector finite = (IntVector)((Vector)magnitude * 0x1p112f);
  return (Vector)((special ? magnitude | 0x7f800000 : finite) | (bits & 0x8000) << 16);
}
#endif

inline void store(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

inline Vector splat(float x) { return Vector{} + x; }

inline float sum(Vector v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

// exp(x) for x <= 0: x = n ln 2 + r, exp(r) by its Taylor polynomial of degree 6 on |r| <= ln 2 / 2 (error below 2e-7),
// 2^n by writing the exponent. Below -87 the result is 0.
inline Vector exp(Vector x) {
  const Vector low = splat(-87.0f);
  const IntVector vanishes = x < low;
  x = vanishes ? low : x;
  const Vector scaled = x * 1.44269504088896341f - 0.5f;
  const IntVector n = __builtin_convertvector(scaled, IntVector);
  const Vector whole = __builtin_convertvector(n, Vector);
  const Vector r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vector p = splat(1.0f / 720);
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const IntVector exponent = (n + 127) << 23;
  return vanishes ? Vector{} : p * (Vector)exponent;
}

// The sums of four vectors.
typedef float Quad __attribute__((vector_size(4 * sizeof(float))));

#if defined(__clang__) || __GNUC__ >= 12
#define OCTAVO_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define OCTAVO_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVector{__VA_ARGS__})
#endif

inline Quad sums(Vector a, Vector b, Vector c, Vector d) {
  const Vector ab = OCTAVO_SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + OCTAVO_SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  const Vector cd = OCTAVO_SHUFFLE(c, d, 0, 8, 2, 10, 4, 12, 6, 14) + OCTAVO_SHUFFLE(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
  const Vector halves =
      OCTAVO_SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + OCTAVO_SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  Quad low, high;
  std::memcpy(&low, &halves, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&halves) + sizeof low, sizeof high);
  return low + high;
}

// scores[g][t] = query[g] . key[t] for `count` keys; query and keys have `size` elements a row. Four keys at a time: one
// alone leaves the multipliers waiting for each other's sums.
template <int kGroup, typename T>
void dot(const float* query, const T* keys, int count, int size, int stride, float* scores) {
  int t = 0;
  for (; t + 4 <= count; t += 4, keys += 4 * size) {
    Vector acc[kGroup][4] = {};
    for (int d = 0; d < size; d += kLanes) {
      Vector key[4];
      for (int k = 0; k < 4; ++k) key[k] = load(keys + k * size + d);
      for (int g = 0; g < kGroup; ++g) {
        const Vector q = load(query + g * size + d);
        for (int k = 0; k < 4; ++k) acc[g][k] += q * key[k];
      }
    }
    for (int g = 0; g < kGroup; ++g) {
      const Quad four = sums(acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
      std::memcpy(scores + g * stride + t, &four, sizeof four);
    }
  }
  for (; t < count; ++t, keys += size)
    for (int g = 0; g < kGroup; ++g) {
      Vector acc = {};
      for (int d = 0; d < size; d += kLanes) acc += load(query + g * size + d) * load(keys + d);
      scores[g * stride + t] = sum(acc);
    }
}

// out[g] += sum over t of weights[g][t] * value[t].
template <int kGroup, typename T>
void accumulate(const float* weights, const T* values, int count, int size, int stride, float* out) {
  int d = 0;
  const auto columns = [&](auto wide) {
    constexpr int width = decltype(wide)::value;
    for (; d + width * kLanes <= size; d += width * kLanes) {
      Vector acc[kGroup][width];
      for (int g = 0; g < kGroup; ++g)
        for (int w = 0; w < width; ++w) acc[g][w] = load(out + g * size + d + w * kLanes);
      for (int t = 0; t < count; ++t) {
        Vector value[width];
        for (int w = 0; w < width; ++w) value[w] = load(values + t * size + d + w * kLanes);
        for (int g = 0; g < kGroup; ++g)
          for (int w = 0; w < width; ++w) acc[g][w] += value[w] * weights[g * stride + t];
      }
      for (int g = 0; g < kGroup; ++g)
        for (int w = 0; w < width; ++w) store(out + g * size + d + w * kLanes, acc[g][w]);
    }
  };
  columns(std::integral_constant<int, 4>{});
  columns(std::integral_constant<int, 1>{});
}

// Calls f with the group in pieces whose size the compiler knows: so many query heads fill 32 registers, or 16.
#if defined(__AVX512VL__) || defined(__aarch64__)
constexpr int kPiece = 4;
#else
constexpr int kPiece = 3;
#endif

template <typename F>
void in_pieces(int group, F f) {
  int g = 0;
  for (; g + kPiece <= group; g += kPiece) f(std::integral_constant<int, kPiece>{}, g);
  if (group - g == 3) f(std::integral_constant<int, 3>{}, g);
  if (group - g == 2) f(std::integral_constant<int, 2>{}, g);
  if (group - g == 1) f(std::integral_constant<int, 1>{}, g);
}

// scores[0 .. count) -> weights relative to `peak`; returns their sum. `count` may be any, the rest up to lanes is scratch.
float exponentiate(float* scores, int count, float peak) {
  Vector total = {};
  int t = 0;
  for (; t + kLanes <= count; t += kLanes) {
    const Vector w = exp(load(scores + t) - peak);
    store(scores + t, w);
    total += w;
  }
  if (t == count) return sum(total);
  float rest[kLanes], left = 0;
  store(rest, exp(load(scores + t) - peak));
  for (; t < count; ++t) left += scores[t] = rest[t % kLanes];
  return sum(total) + left;
}

float largest(const float* line, int count) {
  float peak = line[0];
  int t = 0;
  if (count >= kLanes) {
    Vector most = load(line);
    for (t = kLanes; t + kLanes <= count; t += kLanes) {
      const Vector next = load(line + t);
      most = next > most ? next : most;
    }
    for (int lane = 0; lane < kLanes; ++lane) peak = std::max(peak, most[lane]);
  }
  for (; t < count; ++t) peak = std::max(peak, line[t]);
  return peak;
}

// Floats for one query head's scores of a block: whole vectors, and one to spare.
inline int64_t line_floats(int64_t block_size) { return (block_size + 2 * kLanes - 1) / kLanes * kLanes; }

}  // namespace

struct Shape {
  int64_t heads, kv_heads, size, block_size, width;  // width: of the block table
  float scale, softcap;                              // softcap 0: none
  int64_t window;                                    // 0: none
  int64_t element;                                   // of the cache: 0 float32, 1 bfloat16, 2 float16
};

// Floats of scratch for one part of one (row, key head): for each query head its peak, its sum and its weighted values,
// which the join reads; then its scaled query and one block's scores, which it does not.
extern "C" int64_t part_floats(const Shape* s) {
  return (s->heads / s->kv_heads) * (2 + 2 * s->size + line_floats(s->block_size));
}

template <typename T>
static void decode_from(const Shape& s, const float* query, int64_t row_stride, int64_t head_stride, const T* keys,
                        const T* values, const int32_t* table, const int32_t* contexts, int64_t rows, int64_t parts,
                        const float* sinks, const float* slopes, float* scratch, float* out) {
  const int group = static_cast<int>(s.heads / s.kv_heads), size = static_cast<int>(s.size);
  const int block = static_cast<int>(s.block_size), stride = static_cast<int>(line_floats(block));
  const int64_t slab = part_floats(&s), tasks = rows * s.kv_heads * parts;
  constexpr float kNone = -std::numeric_limits<float>::infinity();

#pragma omp parallel for schedule(dynamic)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t part = task % parts, head = task / parts % s.kv_heads, row = task / parts / s.kv_heads;
    float* peaks = scratch + task * slab;
    float* totals = peaks + group;
    float* acc = totals + group;
    float* scaled = acc + group * size;
    float* scores = scaled + group * size;
    std::fill(peaks, peaks + group, kNone);
    std::fill(totals, totals + group + group * size, 0.0f);
    const int64_t context = contexts[row], oldest = s.window > 0 ? std::max<int64_t>(0, context - s.window) : 0;
    const int64_t first = oldest / block, last = (context + block - 1) / block;
    const int64_t from = first + (last - first) * part / parts, to = first + (last - first) * (part + 1) / parts;
    if (from >= to) continue;
    for (int g = 0; g < group; ++g) {
      const float* mine = query + row * row_stride + (head * group + g) * head_stride;
      for (int d = 0; d < size; ++d) scaled[g * size + d] = mine[d] * s.scale;
    }
    for (int64_t number = from; number < to; ++number) {
      const int begin = static_cast<int>(std::max<int64_t>(oldest - number * block, 0));
      const int count = static_cast<int>(std::min<int64_t>(context - number * block, block)) - begin;
      const int64_t at = ((table[row * s.width + number] * s.kv_heads + head) * block + begin) * size;
      if (number + 1 < to) {
        // The next block lies elsewhere: no hardware prefetcher follows a block table.
        const int64_t next = (table[row * s.width + number + 1] * s.kv_heads + head) * block * size;
        for (int64_t i = 0; i < std::min<int64_t>(block * size * sizeof(T), kAhead); i += kLine) {
          __builtin_prefetch(reinterpret_cast<const char*>(keys + next) + i);
          __builtin_prefetch(reinterpret_cast<const char*>(values + next) + i);
        }
      }
      in_pieces(group, [&](auto piece, int g) {
        dot<decltype(piece)::value>(scaled + g * size, keys + at, count, size, stride, scores + g * stride);
      });
      for (int g = 0; g < group; ++g) {
        float* line = scores + g * stride;
        if (s.softcap > 0)
          for (int t = 0; t < count; ++t) line[t] = s.softcap * std::tanh(line[t] / s.softcap);
        if (slopes != nullptr) {
          const float slope = slopes[head * group + g];
          const int64_t behind = context - 1 - number * block - begin;  // the first of these keys, behind the query
          for (int t = 0; t < count; ++t) line[t] -= slope * static_cast<float>(behind - t);
        }
        const float peak = std::max(peaks[g], largest(line, count));
        const float shrink = std::exp(peaks[g] - peak);
        if (shrink != 1.0f)
          for (int d = 0; d < size; ++d) acc[g * size + d] *= shrink;
        totals[g] = totals[g] * shrink + exponentiate(line, count, peak);
        peaks[g] = peak;
      }
      in_pieces(group, [&](auto piece, int g) {
        accumulate<decltype(piece)::value>(scores + g * stride, values + at, count, size, stride, acc + g * size);
      });
    }
  }

  for (int64_t row = 0; row < rows; ++row)
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t g = h % group;
      const float* first = scratch + (row * s.kv_heads + h / group) * parts * slab;
      float peak = sinks == nullptr ? kNone : sinks[h];
      for (int64_t part = 0; part < parts; ++part) peak = std::max(peak, first[part * slab + g]);
      float* to = out + (row * s.heads + h) * size;
      std::fill(to, to + size, 0.0f);
      if (peak == kNone) continue;
      float total = sinks == nullptr ? 0.0f : std::exp(sinks[h] - peak);
      for (int64_t part = 0; part < parts; ++part)
        total += first[part * slab + group + g] * std::exp(first[part * slab + g] - peak);
      for (int64_t part = 0; part < parts; ++part) {
        const float share = std::exp(first[part * slab + g] - peak) / total;
        const float* acc = first + part * slab + 2 * group + g * size;
        for (int d = 0; d < size; ++d) to[d] += share * acc[d];
      }
    }
}

// query: rows of heads of size elements, with strides between rows and between heads; out: the same, packed; scratch: rows *
// kv_heads * parts * part_floats. A row of context 0 gives zeros. sinks, slopes (ALiBi's): heads, or null.
extern "C" void decode(const Shape* shape, const float* query, int64_t row_stride, int64_t head_stride, const void* keys,
                       const void* values, const int32_t* table, const int32_t* contexts, int64_t rows, int64_t parts,
                       const float* sinks, const float* slopes, float* scratch, float* out) {
  const auto from = [&](auto element) {
    using T = decltype(element);
    decode_from(*shape, query, row_stride, head_stride, static_cast<const T*>(keys), static_cast<const T*>(values), table,
                contexts, rows, parts, sinks, slopes, scratch, out);
  };
  if (shape->element == 0) from(float{});
  if (shape->element == 1) from(BFloat16{});
  if (shape->element == 2) from(Float16{});
}
