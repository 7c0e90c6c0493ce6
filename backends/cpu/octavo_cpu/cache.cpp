// Into a paged cache [block, head, slot, dim] and out of it, in whole rows of a head, whose elements do not matter here.

#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" {

struct Geometry {
  int64_t heads, block_size, bytes;  // bytes: of one head's key or value
};

// key, value: tokens of heads, with strides in bytes between tokens and between heads; slot -1 writes nothing.
void write(const Geometry* geometry, const char* key, int64_t key_stride, int64_t key_head_stride, const char* value,
           int64_t value_stride, int64_t value_head_stride, const int64_t* slots, int64_t tokens, char* keys, char* values) {
  const Geometry g = *geometry;
  for (int64_t token = 0; token < tokens; ++token) {
    if (slots[token] < 0) continue;
    const int64_t block = slots[token] / g.block_size, offset = slots[token] % g.block_size;
    for (int64_t head = 0; head < g.heads; ++head) {
      const int64_t at = ((block * g.heads + head) * g.block_size + offset) * g.bytes;
      std::memcpy(keys + at, key + token * key_stride + head * key_head_stride, g.bytes);
      std::memcpy(values + at, value + token * value_stride + head * value_head_stride, g.bytes);
    }
  }
}

// What a row's blocks hold of its first `context` tokens, packed as [head, token, dim]; no slot beyond them is read.
void gather(const Geometry* geometry, const char* keys, const char* values, const int64_t* blocks, int64_t context, char* key,
            char* value) {
  const Geometry g = *geometry;
#pragma omp parallel for
  for (int64_t head = 0; head < g.heads; ++head)
    for (int64_t first = 0; first < context; first += g.block_size) {
      const int64_t from = (blocks[first / g.block_size] * g.heads + head) * g.block_size * g.bytes;
      const int64_t to = (head * context + first) * g.bytes, size = std::min(g.block_size, context - first) * g.bytes;
      std::memcpy(key + to, keys + from, size);
      std::memcpy(value + to, values + from, size);
    }
}
}
