// Few rows times a weight whose float32 elements are bfloat16 numbers, as those of most checkpoints are: kept as
// bfloat16, made float32 in a register, multiplied and added as float32. Nothing is rounded that float32 weights would not
// round, and half the bytes are read; a few rows read every weight for so few multiplications that memory sets the pace.
//
// Weights lie in panels of 32 outputs: for each input one cache line of 16 words, word k with output k in its low half and
// output 16 + k in its high half. A panel is one contiguous run: [panel, input, word].

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16, kRows = 12;  // rows at once: more do not fit into the registers
constexpr int64_t kMost = 128;          // rows up to which it was measured to be no slower than oneDNN
#else
constexpr int kLanes = 8, kRows = 4;
constexpr int64_t kMost = 16;
#endif
constexpr int kWords = 16, kOutputs = 2 * kWords;
constexpr int kAhead = 64;  // inputs, 4 KB: no hardware prefetcher looks beyond the end of a page
constexpr int kMostThreads = 256;
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline Words load(const uint32_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

inline Vector as_float(Words bits) {
  Vector v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// sums[row][output] of one panel. One row has two chains of sums, so that an addition need not wait for the last.
template <int rows>
void multiply(const float* x, int64_t in, const uint32_t* panel, float (*sums)[kOutputs]) {
  constexpr int chains = rows == 1 ? 2 : 1, vectors = kWords / kLanes;
  Vector low[chains][rows][vectors] = {}, high[chains][rows][vectors] = {};
  const auto add = [&](int64_t i, int chain) {
    __builtin_prefetch(panel + (i + kAhead) * kWords);
    for (int v = 0; v < vectors; ++v) {
      const Words words = load(panel + i * kWords + v * kLanes);
      const Vector first = as_float(words << 16), second = as_float(words & 0xffff0000u);
      for (int r = 0; r < rows; ++r) {
        low[chain][r][v] += first * x[r * in + i];
        high[chain][r][v] += second * x[r * in + i];
      }
    }
  };
  int64_t i = 0;
  for (; i + chains <= in; i += chains)
    for (int chain = 0; chain < chains; ++chain) add(i + chain, chain);
  for (; i < in; ++i) add(i, 0);
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v) {
      Vector one = low[0][r][v], two = high[0][r][v];
      if (chains == 2) one += low[chains - 1][r][v], two += high[chains - 1][r][v];
      std::memcpy(sums[r] + v * kLanes, &one, sizeof one);
      std::memcpy(sums[r] + kWords + v * kLanes, &two, sizeof two);
    }
}

// As multiply, with a number of rows that only the caller knows.
template <int rows = kRows>
void multiply_some(const float* x, int some, int64_t in, const uint32_t* panel, float (*sums)[kOutputs]) {
  if (some == rows) return multiply<rows>(x, in, panel, sums);
  if constexpr (rows > 1) multiply_some<rows - 1>(x, some, in, panel, sums);
}

// The panels that one thread begins with; a line of its own, so that no other thread's count moves it.
struct alignas(64) Share {
  std::atomic<int64_t> next;
};

// one(p) for each panel. Threads begin with equal shares, and who is done takes over from the others: a thread whose core
// does something else for a moment, such as the server's work, holds up none but the panel in its hands.
template <typename One>
void for_panels(int64_t count, const One& one) {
  const int threads = std::min(omp_get_max_threads(), kMostThreads);
  Share shares[kMostThreads];
  for (int t = 0; t < threads; ++t) shares[t].next.store(count * t / threads, std::memory_order_relaxed);
#pragma omp parallel num_threads(threads)
  for (int k = 0; k < threads; ++k) {
    const int of = (omp_get_thread_num() + k) % threads;
    const int64_t end = count * (of + 1) / threads;
    for (int64_t p; (p = shares[of].next.fetch_add(1, std::memory_order_relaxed)) < end;) one(p);
  }
}

}  // namespace

extern "C" {

// x: rows of `in` floats; panels: ceil(out / 32); y: rows of `out` floats.
void few_rows(const float* x, int64_t rows, const uint32_t* panels, int64_t in, int64_t out, float* y) {
  const int64_t count = (out + kOutputs - 1) / kOutputs;
  for_panels(count, [&](int64_t p) {
    const uint32_t* panel = panels + p * in * kWords;
    const int64_t first = p * kOutputs, width = std::min<int64_t>(kOutputs, out - first);
    for (int64_t row = 0; row < rows; row += kRows) {
      float sums[kRows][kOutputs];
      const int64_t some = std::min<int64_t>(kRows, rows - row);
      multiply_some(x + row * in, static_cast<int>(some), in, panel, sums);
      for (int64_t r = 0; r < some; ++r) std::memcpy(y + (row + r) * out + first, sums[r], width * sizeof(float));
    }
  });
}

int64_t most_rows() { return kMost; }

// weight: [out, in] floats. Returns 0 and leaves panels undefined if one of them is no bfloat16 number.
int64_t pack(const float* weight, int64_t in, int64_t out, uint32_t* panels) {
  const int64_t count = (out + kOutputs - 1) / kOutputs;
  uint32_t lost = 0;
#pragma omp parallel for schedule(static) reduction(| : lost)
  for (int64_t p = 0; p < count; ++p)
    for (int64_t i = 0; i < in; ++i)
      for (int64_t k = 0; k < kWords; ++k) {
        uint32_t bits[2] = {};
        for (int64_t half = 0; half < 2; ++half) {
          const int64_t row = p * kOutputs + half * kWords + k;
          if (row < out) std::memcpy(&bits[half], weight + row * in + i, sizeof bits[half]);
        }
        lost |= (bits[0] | bits[1]) & 0xffffu;
        panels[(p * in + i) * kWords + k] = bits[0] >> 16 | bits[1];
      }
  return lost == 0;
}
}
