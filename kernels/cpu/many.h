// Attention of many queries, as in a prompt: razor_dist.kernels.many_cpu says what it computes.
//
// What bounds it is arithmetic. A block of queries goes through the keys a block at a time; both
// products of a block, scores and weighted values, keep their sums in registers, and everything
// else that it touches stays in the second cache.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace razor_dist {

using at::Tensor;
using std::optional;

// Rows and vectors of a tile, whose sums stay in registers.
constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = WIDTH == 16 ? 4 : 2;
constexpr int64_t KEY_BLOCK = 128;
constexpr int64_t ROW_BLOCK = 192;  // queries times their group, at most

// c[r, j] = sum over i of a[r, i] b[i, j], added to c if ADD, for R rows and C vectors of columns
template <int R, int C, bool ADD>
inline void multiply_tile(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                          int64_t c_row, int64_t inner) {
  Floats sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < C; ++v) sums[r][v] = ADD ? load(c + r * c_row + v * WIDTH) : Floats{};
  for (int64_t i = 0; i < inner; ++i) {
    Floats row[C];
    for (int v = 0; v < C; ++v) row[v] = load(b + i * b_row + v * WIDTH);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < C; ++v) sums[r][v] += row[v] * a[r * a_row + i];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < C; ++v) std::memcpy(c + r * c_row + v * WIDTH, &sums[r][v], sizeof(Floats));
}

template <int C, bool ADD>
void multiply_columns(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                      int64_t c_row, int64_t rows, int64_t inner) {
  auto tile = [&](auto count, int64_t r) {
    multiply_tile<count, C, ADD>(a + r * a_row, a_row, b, b_row, c + r * c_row, c_row, inner);
  };
  int64_t r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS) tile(std::integral_constant<int, TILE_ROWS>(), r);
  for (; r + 2 <= rows; r += 2) tile(std::integral_constant<int, 2>(), r);
  if (r < rows) tile(std::integral_constant<int, 1>(), r);
}

// The same for any number of rows, and of columns a multiple of WIDTH.
template <bool ADD>
void multiply(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c, int64_t c_row,
              int64_t rows, int64_t columns, int64_t inner) {
  constexpr int C = TILE_VECTORS;
  int64_t j = 0;
  for (; j + C * WIDTH <= columns; j += C * WIDTH)
    multiply_columns<C, ADD>(a, a_row, b + j, b_row, c + j, c_row, rows, inner);
  for (; j < columns; j += WIDTH)
    multiply_columns<1, ADD>(a, a_row, b + j, b_row, c + j, c_row, rows, inner);
}

// One KV head's keys or values from some place on: rows of dim numbers, perhaps with a scale each.
template <class T>
struct Rows {
  const T* data;
  int64_t row;
  const float* scale;

  Floats vector(int64_t at, int64_t d) const {
    const Floats x = load(data + at * row + d);
    return scale ? x * scale[at] : x;
  }
};

// to[d, j] = from[j, d] of `count` keys; those that are missing in KEY_BLOCK are zeros.
template <class T>
void turn(const Rows<T>& from, int64_t count, int64_t dim, float* to) {
  const int64_t padded = (count + WIDTH - 1) / WIDTH * WIDTH;
  for (int64_t j = 0; j < padded; j += WIDTH) {
    for (int64_t d = 0; d < dim; d += WIDTH) {
      Floats square[WIDTH];
      for (int i = 0; i < WIDTH; ++i) square[i] = j + i < count ? from.vector(j + i, d) : Floats{};
      transpose(square);
      for (int i = 0; i < WIDTH; ++i)
        std::memcpy(to + (d + i) * KEY_BLOCK + j, &square[i], sizeof(Floats));
    }
  }
}

// What a thread needs for one block of queries.
struct Workspace {
  std::vector<float> memory;
  float *rows, *sums, *scores, *keys, *values, *most, *total;

  explicit Workspace(int64_t dim)
      : memory(2 * ROW_BLOCK * dim + ROW_BLOCK * KEY_BLOCK + 2 * KEY_BLOCK * dim + 2 * ROW_BLOCK) {
    float* at = memory.data();
    auto take = [&](int64_t count) { return std::exchange(at, at + count); };
    rows = take(ROW_BLOCK * dim), sums = take(ROW_BLOCK * dim);
    scores = take(ROW_BLOCK * KEY_BLOCK);
    keys = take(KEY_BLOCK * dim), values = take(KEY_BLOCK * dim);
    most = take(ROW_BLOCK), total = take(ROW_BLOCK);
  }
};

// Turn scores of one row, of which [begin, end) are of keys that it sees, into weights relative to
// the largest so far: exp2, since log2 e is in the queries. Return what earlier sums are to be
// multiplied with.
inline float weigh(float* row, int64_t begin, int64_t end, int64_t padded, float& most,
                   float& total) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  begin = std::clamp<int64_t>(begin, 0, padded), end = std::clamp<int64_t>(end, 0, padded);
  std::fill(row, row + begin, NONE);
  std::fill(row + end, row + padded, NONE);
  Floats largest = load(row);
  for (int64_t j = WIDTH; j < padded; j += WIDTH) {
    const Floats next = load(row + j);
    largest = next > largest ? next : largest;
  }
  const float top = std::max(most, largest_of(largest));
  if (top == NONE && begin >= end) {  // it has seen nothing yet
    std::fill(row, row + padded, 0.0f);
    return 1;
  }
  Floats weights = {};
  for (int64_t j = 0; j < padded; j += WIDTH) {
    const Floats weight = exp2_of_negative(load(row + j) - top);
    std::memcpy(row + j, &weight, sizeof weight);
    weights += weight;
  }
  const float before = std::exp2(most - top);
  most = top;
  total = total * before + sum(weights);
  return before;
}

// q: float32 [K, G, T, D]; k, v: [K, S, D] of type T with contiguous rows, their scales [K, S].
// Query t sees the keys from first[t], or 0, to S - T + t if causal, else to S - 1.
template <class T>
std::tuple<Tensor, Tensor> attend_many_of(const Tensor& q, const Tensor& k, const Tensor& v,
                                          const optional<Tensor>& k_scale,
                                          const optional<Tensor>& v_scale,
                                          const optional<Tensor>& first, bool causal,
                                          double scale) {
  const int64_t heads = q.size(0), group = q.size(1), tokens = q.size(2), dim = q.size(3),
                stored = k.size(1), threads = at::get_num_threads();
  const Tensor out = at::empty(q.sizes(), q.options());
  const Tensor lse = at::empty({heads, group, tokens}, q.options());
  const int64_t* begins = first ? first->const_data_ptr<int64_t>() : nullptr;
  auto begin_of = [&](int64_t t) { return begins ? begins[t] : 0; };
  auto end_of = [&](int64_t t) { return causal ? stored - tokens + t + 1 : stored; };
  auto rows_of = [&](const Tensor& x, const optional<Tensor>& scales, int64_t head, int64_t at) {
    const T* data = x.const_data_ptr<T>() + head * x.stride(0) + at * x.stride(1);
    const float* own =
        scales ? scales->const_data_ptr<float>() + head * scales->stride(0) + at : nullptr;
    return Rows<T>{data, x.stride(1), own};
  };
  // Blocks are halved while threads have too few of them to share evenly.
  int64_t step = std::max<int64_t>(1, ROW_BLOCK / group);
  auto blocks = [&] { return (tokens + step - 1) / step; };
  while (heads * blocks() < 4 * threads && step * group >= 8 * TILE_ROWS) step = (step + 1) / 2;
  const int64_t units = heads * blocks();
  const float factor = static_cast<float>(scale * LOG2_E);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min(units, threads), 1, [&](int64_t, int64_t) {
    const Workspace w(dim);
    for (int64_t unit; (unit = next++) < units;) {
      // The last queries first: where they are causal they take longest.
      const int64_t head = unit % heads, t0 = (blocks() - 1 - unit / heads) * step;
      const int64_t count = std::min(step, tokens - t0), rows = count * group;
      for (int64_t r = 0; r < rows; ++r) {
        const float* from = q.const_data_ptr<float>() + head * q.stride(0) +
                            r / count * q.stride(1) + (t0 + r % count) * q.stride(2);
        for (int64_t d = 0; d < dim; ++d) w.rows[r * dim + d] = from[d] * factor;
      }
      std::fill_n(w.sums, rows * dim, 0.0f);
      std::fill_n(w.most, rows, -std::numeric_limits<float>::infinity());
      std::fill_n(w.total, rows, 0.0f);
      int64_t begin = begin_of(t0);  // windows begin in the queries' order
      const int64_t end = end_of(t0 + count - 1);
      for (; begin < end; begin += KEY_BLOCK) {
        const int64_t keys = std::min(KEY_BLOCK, end - begin),
                      padded = (keys + WIDTH - 1) / WIDTH * WIDTH;
        turn(rows_of(k, k_scale, head, begin), keys, dim, w.keys);
        multiply<false>(w.rows, dim, w.keys, KEY_BLOCK, w.scores, KEY_BLOCK, rows, padded, dim);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t t = t0 + r % count, last = std::min(keys, end_of(t) - begin);
          const float before = weigh(w.scores + r * KEY_BLOCK, begin_of(t) - begin, last, padded,
                                     w.most[r], w.total[r]);
          if (before != 1)
            for (int64_t d = 0; d < dim; ++d) w.sums[r * dim + d] *= before;
        }
        const Rows<T> values = rows_of(v, v_scale, head, begin);
        const float* of_values = w.values;
        int64_t row = dim;
        if constexpr (std::is_same_v<T, float>) {
          of_values = values.data, row = values.row;
        } else {
          for (int64_t j = 0; j < keys; ++j)
            for (int64_t d = 0; d < dim; d += WIDTH) {
              const Floats value = values.vector(j, d);
              std::memcpy(w.values + j * dim + d, &value, sizeof value);
            }
        }
        multiply<true>(w.scores, KEY_BLOCK, of_values, row, w.sums, dim, rows, dim, keys);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (head * group + r / count) * tokens + t0 + r % count;
        const float total = w.total[r];
        lse.data_ptr<float>()[at] =
            static_cast<float>(w.most[r] / LOG2_E) + std::log(total);  // log 0 is -inf
        float* to = out.data_ptr<float>() + at * dim;
        for (int64_t d = 0; d < dim; ++d) to[d] = total == 0 ? 0 : w.sums[r * dim + d] / total;
      }
    }
  });
  return {out, lse};
}

inline std::tuple<Tensor, Tensor> attend_many(const Tensor& q, const Tensor& k, const Tensor& v,
                                              const optional<Tensor>& k_scale,
                                              const optional<Tensor>& v_scale,
                                              const optional<Tensor>& first, bool causal,
                                              double scale) {
  TORCH_CHECK(q.scalar_type() == at::kFloat && q.size(3) % WIDTH == 0,
              "queries must be float32, and head dimensions a multiple of ", WIDTH);
  TORCH_CHECK(q.stride(3) == 1 && k.stride(2) == 1 && v.stride(2) == 1, "rows must be contiguous");
  TORCH_CHECK(!first || (first->is_contiguous() && first->size(0) == q.size(2)),
              "a beginning must be there for every query");
  auto of = [&](auto type) {
    return attend_many_of<decltype(type)>(q, k, v, k_scale, v_scale, first, causal, scale);
  };
  if (k.scalar_type() == at::kFloat) return of(float());
  if (k.scalar_type() == at::kBFloat16) return of(c10::BFloat16());
  return of(int8_t());
}

}  // namespace razor_dist
