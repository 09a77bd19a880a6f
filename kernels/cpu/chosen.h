// Attention of many queries to blocks of keys that each of them chooses: razor_dist.kernels.chosen
// has the rule.
//
// Keys of one block are adjacent, from edges[b] to edges[b + 1]. A query does not pay for blocks
// that its neighbours choose: the rows that read a block are gathered, multiplied, and put back.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "many.h"

namespace razor_dist {

// The bytes of WIDTH whole numbers that fit into 8 bits.
inline void write_bytes(Ints from, int8_t* to) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)from));
#elif defined(__AVX2__)
  const __m256i lowest = _mm256_shuffle_epi8(
      (__m256i)from, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                      0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const int32_t halves[] = {_mm256_extract_epi32(lowest, 0), _mm256_extract_epi32(lowest, 4)};
  std::memcpy(to, halves, sizeof halves);
#else
  for (int i = 0; i < WIDTH; ++i) to[i] = static_cast<int8_t>(from[i]);
#endif
}

// Round `count` numbers, a multiple of WIDTH, to whole numbers of 8 bits; return their scale.
inline float round_to_8_bits(const float* from, int64_t count, int8_t* to) {
  const float step = largest_size(from, count, 0) / 127;
  const Floats by = Floats{} + std::max(step, std::numeric_limits<float>::min());
  for (int64_t i = 0; i < count; i += WIDTH)
    write_bytes(__builtin_convertvector(rounded(load(from + i) / by), Ints), to + i);
  return step;
}

// Keys' numbers in the dimensions `slow`, in 8 bits; the rest of a row of `width` is zeros.
template <class T>
void take_slow(Rows<T> from, const int64_t* slow, int64_t dims, int64_t width, int64_t count,
               float* wide, int8_t* codes, float* scales) {
  for (int64_t j = 0; j < count; ++j, codes += width) {
    const T* row = from.at(j);
    if constexpr (std::is_same_v<T, int8_t>) {
      for (int64_t d = 0; d < dims; ++d) codes[d] = row[slow[d]];
      scales[j] = from.scale[j];
    } else {
      for (int64_t d = 0; d < dims; ++d) wide[d] = static_cast<float>(row[slow[d]]);
      scales[j] = round_to_8_bits(wide, width, codes);
    }
  }
}

// q: float32 [K, G, T, W], scaled; k: [K, S, D] with contiguous rows, their scales [K, S].
// largest[K, B, G, T]: the largest product of a query with a key of the block, both in the
// dimensions `slow` and in 8 bits; NOTHING for block 0, and from recent[t] on.
template <class T>
Tensor block_largest_of(const Tensor& q, const Tensor& k, const optional<Tensor>& k_scale,
                        const Tensor& slow, const Tensor& edges, const Tensor& recent) {
  const int64_t heads = q.size(0), group = q.size(1), tokens = q.size(2), dims = q.size(3),
                blocks = edges.size(0) - 1, rows = group * tokens,
                width = (dims + 2 * WIDTH - 1) / (2 * WIDTH) * (2 * WIDTH), inner = width / 2;
  const Tensor largest = at::empty({heads, blocks, group, tokens}, q.options());
  const int64_t *edge = edges.const_data_ptr<int64_t>(), *first = recent.const_data_ptr<int64_t>();
  std::vector<int32_t> codes(heads * rows * inner);  // of pairs of 16 bits
  std::vector<float> factors(heads * rows);
  at::parallel_for(0, heads * rows, 64, [&](int64_t begin, int64_t end) {
    std::vector<float> wide(width);
    std::vector<int8_t> bytes(width);
    for (int64_t row = begin; row < end; ++row) {
      std::copy_n(q.const_data_ptr<float>() + row * dims, dims, wide.data());
      factors[row] = round_to_8_bits(wide.data(), width, bytes.data());
      auto* to = reinterpret_cast<int16_t*>(codes.data() + row * inner);
      std::copy_n(bytes.data(), width, to);
    }
  });
  at::parallel_for(0, heads * blocks, 1, [&](int64_t begin, int64_t end) {
    Workspace<int32_t> w(ROW_BLOCK, width);
    std::vector<float> wide(width), scales(KEY_BLOCK);
    std::vector<int8_t> bytes(KEY_BLOCK * width);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t head = unit / blocks, block = unit % blocks,
                    keys = edge[block + 1] - edge[block],
                    padded = (keys + WIDTH - 1) / WIDTH * WIDTH;
      float* to = largest.data_ptr<float>() + unit * rows;
      // Later queries choose from more blocks.
      const int64_t t0 = block ? std::upper_bound(first, first + tokens, block) - first : tokens;
      for (int64_t g = 0; g < group; ++g) std::fill_n(to + g * tokens, keys ? t0 : tokens, NOTHING);
      if (!keys || t0 == tokens) continue;
      take_slow(rows_of<T>(k, k_scale, head, edge[block]), slow.const_data_ptr<int64_t>(), dims,
                width, keys, wide.data(), bytes.data(), scales.data());
      turn_keys(w, Rows<int8_t>{bytes.data(), width, scales.data()}, keys, padded);
      for (int64_t g = 0; g < group; ++g)
        for (int64_t t = t0; t < tokens; t += ROW_BLOCK) {
          const int64_t count = std::min(ROW_BLOCK, tokens - t), row = head * rows + g * tokens + t;
          multiply<false>(Matrix<int32_t>{codes.data() + row * inner, inner},
                          Matrix<int32_t>{w.keys, KEY_BLOCK}, w.scores, KEY_BLOCK, count, padded,
                          inner, factors.data() + row, w.key_factor);
          for (int64_t r = 0; r < count; ++r) {
            float* scores = w.scores + r * KEY_BLOCK;
            std::fill(scores + keys, scores + padded, NOTHING);
            to[g * tokens + t + r] = largest_of(scores, padded);
          }
        }
    }
  });
  return largest;
}

// q, k, v as of attend_many. chosen: bool [K, B, T], rows of T contiguous. Query t, at position
// at[t], sees of the blocks that it has chosen the keys at `places` [S] up to its own.
template <class T>
std::tuple<Tensor, Tensor> attend_chosen_of(const Tensor& q, const Tensor& k, const Tensor& v,
                                            const optional<Tensor>& k_scale,
                                            const optional<Tensor>& v_scale, const Tensor& chosen,
                                            const Tensor& edges, const Tensor& places,
                                            const Tensor& at, double scale) {
  using N = std::conditional_t<sizeof(T) == 1, int32_t, float>;
  constexpr int64_t PAIR = std::is_same_v<N, float> ? 1 : 2;
  const int64_t heads = q.size(0), group = q.size(1), tokens = q.size(2), dim = q.size(3),
                blocks = edges.size(0) - 1, threads = at::get_num_threads();
  const Tensor out = at::empty(q.sizes(), q.options());
  const Tensor lse = at::empty({heads, group, tokens}, q.options());
  const int64_t *edge = edges.const_data_ptr<int64_t>(), *place = places.const_data_ptr<int64_t>(),
                *position = at.const_data_ptr<int64_t>();
  const int64_t step = queries_at_once(heads, group, tokens, threads),
                parts = (tokens + step - 1) / step, units = heads * parts;
  const float factor = static_cast<float>(scale) * LOG2_E;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min(units, threads), 1, [&](int64_t, int64_t) {
    // The rows that read a block are put together in `w`; what all have found is in `found`.
    Workspace<N> w(step * group, dim), found(step * group, dim);
    std::vector<int64_t> read(step * group);
    for (int64_t unit; (unit = next++) < units;) {
      const int64_t head = unit % heads, t0 = (parts - 1 - unit / heads) * step;
      const int64_t count = std::min(step, tokens - t0), rows = count * group;
      for (int64_t r = 0; r < rows; ++r)
        take_query(found, r,
                   q.const_data_ptr<float>() + head * q.stride(0) + r / count * q.stride(1) +
                       (t0 + r % count) * q.stride(2),
                   factor);
      std::fill_n(found.sums, rows * dim, 0.0f);
      std::fill_n(found.most, rows, NOTHING);
      std::fill_n(found.total, rows, 0.0f);
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t begin = edge[block], keys = edge[block + 1] - begin,
                      padded = (keys + WIDTH - 1) / WIDTH * WIDTH;
        const bool* wanted =
            chosen.const_data_ptr<bool>() + head * chosen.stride(0) + block * tokens + t0;
        if (!keys || !std::memchr(wanted, 1, count)) continue;
        int64_t n = 0;
        for (int64_t r = 0; r < rows; ++r)
          if (wanted[r % count] && position[t0 + r % count] >= place[begin]) read[n++] = r;
        if (!n) continue;
        for (int64_t i = 0; i < n; ++i) {
          const int64_t r = read[i];
          std::copy_n(found.rows + r * w.inner, w.inner, w.rows + i * w.inner);
          std::copy_n(found.sums + r * dim, dim, w.sums + i * dim);
          w.most[i] = found.most[r], w.total[i] = found.total[r];
          w.row_factor[i] = found.row_factor[r];
        }
        turn_keys(w, rows_of<T>(k, k_scale, head, begin), keys, padded);
        const Matrix<N> values = take_values(w, rows_of<T>(v, v_scale, head, begin), keys);
        multiply<false>(Matrix<N>{w.rows, w.inner}, Matrix<N>{w.keys, KEY_BLOCK}, w.scores,
                        KEY_BLOCK, n, padded, w.inner, w.row_factor, w.key_factor);
        for (int64_t i = 0; i < n; ++i) {
          const int64_t own = position[t0 + read[i] % count];
          int64_t last = keys;
          if (place[begin + keys - 1] > own)
            last = std::upper_bound(place + begin, place + begin + keys, own) - (place + begin);
          weigh(w, i, 0, last, padded);
        }
        Matrix<N> weights{w.weights, KEY_BLOCK};
        if constexpr (std::is_same_v<N, float>) weights.data = w.scores;
        multiply<true>(weights, values, w.sums, dim, n, dim, (keys + PAIR - 1) / PAIR,
                       w.weight_factor);
        for (int64_t i = 0; i < n; ++i) {
          std::copy_n(w.sums + i * dim, dim, found.sums + read[i] * dim);
          found.most[read[i]] = w.most[i], found.total[read[i]] = w.total[i];
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t to = (head * group + r / count) * tokens + t0 + r % count;
        const float total = found.total[r];
        lse.data_ptr<float>()[to] = found.most[r] / LOG2_E + std::log(total);  // log 0 is -inf
        for (int64_t d = 0; d < dim; ++d)
          out.data_ptr<float>()[to * dim + d] = total == 0 ? 0 : found.sums[r * dim + d] / total;
      }
    }
  });
  return {out, lse};
}

// What both are given of keys: how many, of which blocks, with which scales.
inline void check_blocks(const Tensor& k, const optional<Tensor>& scale, const Tensor& edges) {
  const int64_t* edge = edges.const_data_ptr<int64_t>();
  TORCH_CHECK(edges.is_contiguous() && edges.size(0) > 0 && edge[0] == 0 &&
                  edge[edges.size(0) - 1] == k.size(1) && k.stride(2) == 1,
              "blocks do not end where keys of ", k.sizes(), " do");
  for (int64_t b = 1; b < edges.size(0); ++b)
    TORCH_CHECK(edge[b] >= edge[b - 1] && edge[b] - edge[b - 1] <= KEY_BLOCK, "no block of ",
                edge[b] - edge[b - 1], " keys");
  TORCH_CHECK((k.scalar_type() == at::kChar) == scale.has_value() &&
                  (!scale || (scale->sizes() == k.sizes().slice(0, 2) &&
                              (scale->stride(1) == 1 || scale->size(1) == 1))),
              "8-bit keys have scales in a row, others none");
}

template <class Function>
auto for_type(at::ScalarType dtype, Function of) {
  if (dtype == at::kFloat) return of(float());
  if (dtype == at::kBFloat16) return of(c10::BFloat16());
  TORCH_CHECK(dtype == at::kChar, "no keys of ", dtype);
  return of(int8_t());
}

inline Tensor block_largest(const Tensor& q, const Tensor& k, const optional<Tensor>& k_scale,
                            const Tensor& slow, const Tensor& edges, const Tensor& recent) {
  check_blocks(k, k_scale, edges);
  TORCH_CHECK(q.scalar_type() == at::kFloat && q.is_contiguous() && q.size(0) == k.size(0) &&
                  slow.is_contiguous() && slow.size(0) == q.size(3) && q.size(3) <= k.size(2) &&
                  recent.is_contiguous() && recent.size(0) == q.size(2),
              "queries of ", q.sizes(), " do not go with keys of ", k.sizes());
  return for_type(k.scalar_type(), [&](auto type) {
    return block_largest_of<decltype(type)>(q, k, k_scale, slow, edges, recent);
  });
}

inline std::tuple<Tensor, Tensor> attend_chosen(const Tensor& q, const Tensor& k, const Tensor& v,
                                                const optional<Tensor>& k_scale,
                                                const optional<Tensor>& v_scale,
                                                const Tensor& chosen, const Tensor& edges,
                                                const Tensor& places, const Tensor& at,
                                                double scale) {
  check_blocks(k, k_scale, edges), check_blocks(v, v_scale, edges);
  const int64_t width = k.scalar_type() == at::kChar ? 2 * WIDTH : WIDTH;
  TORCH_CHECK(q.scalar_type() == at::kFloat && q.stride(3) == 1 && q.size(3) % width == 0 &&
                  q.size(0) == k.size(0) && q.size(3) == k.size(2) && q.size(3) <= 512 &&
                  v.sizes() == k.sizes() && v.scalar_type() == k.scalar_type(),
              "queries of ", q.sizes(), " do not go with keys of ", k.sizes());
  TORCH_CHECK(chosen.scalar_type() == at::kBool && chosen.size(0) == q.size(0) &&
                  chosen.size(1) == edges.size(0) - 1 && chosen.size(2) == q.size(2) &&
                  chosen.stride(2) == 1 && chosen.stride(1) == q.size(2) && at.is_contiguous() &&
                  at.size(0) == q.size(2) && places.is_contiguous() && places.size(0) == k.size(1),
              "what is chosen, ", chosen.sizes(), ", is not of queries of ", q.sizes());
  return for_type(k.scalar_type(), [&](auto type) {
    return attend_chosen_of<decltype(type)>(q, k, v, k_scale, v_scale, chosen, edges, places, at,
                                            scale);
  });
}

}  // namespace razor_dist
