// Attention of many queries, as in a prompt: razor_dist.kernels.many_cpu says what it computes.
//
// Arithmetic bounds it. A block of queries goes through the keys block by block; both products of a
// block, scores and weighted values, keep their sums in registers, and everything else that it
// touches stays in the second-level cache.
//
// Codes are multiplied as integers of 8 bits, two products and their sum by one instruction: twice
// as fast as float32. Queries are rounded to 16 bits, relative to a row's largest number, and so
// are the weights of a row in a block: the error is 2^-16 of the largest.
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
#include <utility>
#include <vector>

#include "vectors.h"

namespace razor_dist {

using at::Tensor;
using std::optional;

// Rows and vectors of a tile, whose sums stay in registers.
constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = WIDTH == 16 ? 4 : 2;
constexpr int64_t KEY_BLOCK = 128;
constexpr int64_t ROW_BLOCK = 192;  // queries times their group, unless one query has more

// Operands of products: float32, or pairs of 16-bit integers whose two products are added up. Sums
// of integers still have to be multiplied by the scale of each row and each column.
template <class N>
struct Matrix {
  const N* data;
  int64_t row;
};

inline Floats add_product(Floats sum, Floats b, float a) { return fused(b, all(a), sum); }
inline Ints add_product(Ints sum, Ints b, int32_t a) { return add_pairs(sum, b, Ints{} + a); }

// c[r, j] = sum over i of a[r, i] b[i, j], added to c if ADD, for R rows and C vectors of columns.
// Sums of integers are multiplied by by_row[r], and by by_column[j] if it is there.
template <int R, int C, bool ADD, class N>
inline void multiply_tile(Matrix<N> a, Matrix<N> b, float* c, int64_t c_row, int64_t inner,
                          const float* by_row, const float* by_column) {
  using Vector = std::conditional_t<std::is_same_v<N, float>, Floats, Ints>;
  Vector sums[R][C] = {};
  for (int64_t i = 0; i < inner; ++i) {
    Vector row[C];
    for (int v = 0; v < C; ++v) row[v] = read<Vector>(b.data + i * b.row + v * WIDTH);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < C; ++v)
        sums[r][v] = add_product(sums[r][v], row[v], a.data[r * a.row + i]);
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < C; ++v) {
      float* to = c + r * c_row + v * WIDTH;
      Floats found;
      if constexpr (std::is_same_v<N, float>) {
        found = sums[r][v];
      } else {
        found = __builtin_convertvector(sums[r][v], Floats) * by_row[r];
        if (by_column) found *= load(by_column + v * WIDTH);
      }
      if (ADD) found += load(to);
      std::memcpy(to, &found, sizeof found);
    }
  }
}

template <int C, bool ADD, class N>
void multiply_columns(Matrix<N> a, Matrix<N> b, float* c, int64_t c_row, int64_t rows,
                      int64_t inner, const float* by_row, const float* by_column) {
  auto tile = [&](auto count, int64_t r) {
    multiply_tile<count, C, ADD, N>({a.data + r * a.row, a.row}, b, c + r * c_row, c_row, inner,
                                    by_row + r, by_column);
  };
  int64_t r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS) tile(std::integral_constant<int, TILE_ROWS>(), r);
  for (; r + 2 <= rows; r += 2) tile(std::integral_constant<int, 2>(), r);
  if (r < rows) tile(std::integral_constant<int, 1>(), r);
}

// The same for any number of rows, and of columns a multiple of WIDTH.
template <bool ADD, class N>
void multiply(Matrix<N> a, Matrix<N> b, float* c, int64_t c_row, int64_t rows, int64_t columns,
              int64_t inner, const float* by_row, const float* by_column = nullptr) {
  constexpr int C = TILE_VECTORS;
  auto from = [&](int64_t j) { return Matrix<N>{b.data + j, b.row}; };
  auto factors = [&](int64_t j) { return by_column ? by_column + j : nullptr; };
  int64_t j = 0;
  for (; j + C * WIDTH <= columns; j += C * WIDTH)
    multiply_columns<C, ADD>(a, from(j), c + j, c_row, rows, inner, by_row, factors(j));
  for (; j < columns; j += WIDTH)
    multiply_columns<1, ADD>(a, from(j), c + j, c_row, rows, inner, by_row, factors(j));
}

// One KV head's keys or values, row by row.
template <class T>
struct Rows {
  const T* data;
  int64_t row;
  const float* scale;  // of each row, if rows are codes

  const T* at(int64_t index) const { return data + index * row; }
};

// A thread's memory for one block of queries. N is the type of operands; a row of `dim` numbers is
// `inner` of these.
template <class N>
struct Workspace {
  int64_t dim, inner;
  std::vector<N> numbers;
  std::vector<float> memory, query;
  std::vector<int8_t> widened;
  N *rows, *keys, *values, *weights;
  float *sums, *scores, *most, *total, *row_factor, *weight_factor, *key_factor, *value_factor;

  Workspace(int64_t count, int64_t dim)
      : dim(dim),
        inner(std::is_same_v<N, float> ? dim : dim / 2),
        numbers(count * (inner + KEY_BLOCK) + KEY_BLOCK * (inner + dim)),
        memory(count * (dim + KEY_BLOCK + 4) + 2 * KEY_BLOCK),
        query(dim),
        widened(KEY_BLOCK * dim) {
    auto take = [](auto*& at, int64_t size) { return std::exchange(at, at + size); };
    N* of = numbers.data();
    rows = take(of, count * inner), weights = take(of, count * KEY_BLOCK);
    keys = take(of, KEY_BLOCK * inner), values = take(of, KEY_BLOCK * dim);
    float* at = memory.data();
    sums = take(at, count * dim), scores = take(at, count * KEY_BLOCK);
    most = take(at, count), total = take(at, count);
    row_factor = take(at, count), weight_factor = take(at, count);
    key_factor = take(at, KEY_BLOCK), value_factor = take(at, KEY_BLOCK);
  }
};

// A query's numbers times `factor` become row r. What is not finite makes all scores NaN.
inline void take_query(const Workspace<float>& w, int64_t r, const float* from, float factor) {
  for (int64_t d = 0; d < w.dim; ++d) w.rows[r * w.dim + d] = from[d] * factor;
}

inline void take_query(const Workspace<int32_t>& w, int64_t r, const float* from, float factor) {
  const float step =
      round_to_16_bits(from, w.dim, reinterpret_cast<int16_t*>(w.rows + r * w.inner));
  w.row_factor[r] = step * factor;
}

// keys[i, j] = number i of key j; columns without a key are zeros.
template <class N, class T>
void turn_keys(const Workspace<N>& w, Rows<T> from, int64_t count, int64_t padded) {
  for (int64_t j = 0; j < padded; j += WIDTH) {
    for (int64_t i = 0; i < w.inner; i += WIDTH) {
      Floats square[WIDTH];  // of whatever 32 bits
      for (int row = 0; row < WIDTH; ++row) {
        if (j + row >= count) {
          square[row] = Floats{};
        } else if constexpr (std::is_same_v<N, float>) {
          square[row] = load(from.at(j + row) + i);
        } else {
          square[row] = (Floats)pairs_of(from.at(j + row) + 2 * i);
        }
      }
      transpose(square);
      for (int row = 0; row < WIDTH; ++row)
        std::memcpy(w.keys + (i + row) * KEY_BLOCK + j, &square[row], sizeof(Floats));
    }
  }
  if (!from.scale) return;
  std::copy_n(from.scale, count, w.key_factor);
  std::fill(w.key_factor + count, w.key_factor + padded, 0.0f);
}

// Values as operands; those of two keys are side by side if they are integers.
template <class T>
Matrix<float> take_values(const Workspace<float>& w, Rows<T> from, int64_t count) {
  if constexpr (std::is_same_v<T, float>) return {from.data, from.row};
  for (int64_t j = 0; j < count; ++j)
    for (int64_t d = 0; d < w.dim; d += WIDTH) {
      const Floats value = load(from.at(j) + d);
      std::memcpy(w.values + j * w.dim + d, &value, sizeof value);
    }
  return {w.values, w.dim};
}

inline Matrix<int32_t> take_values(const Workspace<int32_t>& w, Rows<int8_t> from, int64_t count) {
  for (int64_t j = 0; j < count; j += 2)
    for (int64_t d = 0; d < w.dim; d += WIDTH) {
      const Ints even = integers_of(from.at(j) + d);
      const Ints odd = j + 1 < count ? integers_of(from.at(j + 1) + d) : Ints{};
      const Ints both = (even & 0xffff) | (odd << 16);
      std::memcpy(w.values + j / 2 * w.dim + d, &both, sizeof both);
    }
  std::copy_n(from.scale, count, w.value_factor);
  std::fill(w.value_factor + count, w.value_factor + KEY_BLOCK, 0.0f);
  return {w.values, w.dim};
}

// A block of keys or values in the form that is multiplied: codes of 4 bits become 8.
template <class N, class T>
auto block_of(Workspace<N>& w, Rows<T> from, int64_t count) {
  if constexpr (PARTS<T> == 1) {
    return from;
  } else {
    for (int64_t j = 0; j < count; ++j) widen(from.at(j), w.dim, w.widened.data() + j * w.dim);
    return Rows<int8_t>{w.widened.data(), w.dim, from.scale};
  }
}

// Turn row r's scores, of which [begin, end) are of keys that it sees, into weights relative to the
// largest so far: exp2, since log2 e is in the queries. Earlier sums are multiplied accordingly.
template <class N>
void weigh(const Workspace<N>& w, int64_t r, int64_t begin, int64_t end, int64_t padded) {
  float *row = w.scores + r * KEY_BLOCK, *sums = w.sums + r * w.dim;
  begin = std::clamp<int64_t>(begin, 0, padded), end = std::clamp<int64_t>(end, begin, padded);
  std::fill(row, row + begin, NOTHING);
  std::fill(row + end, row + padded, NOTHING);
  const float top = begin == end ? w.most[r] : std::max(w.most[r], largest_of(row, padded));
  if (top == NOTHING && begin == end) {  // it has seen nothing yet
    std::fill(row, row + padded, 0.0f);
  } else {
    Floats total = {};
    for (int64_t j = 0; j < padded; j += WIDTH) {
      const Floats weight = exp2_of_negative(load(row + j) - top);
      std::memcpy(row + j, &weight, sizeof weight);
      total += weight;
    }
    const float before = std::exp2(w.most[r] - top);
    w.most[r] = top;
    w.total[r] = w.total[r] * before + sum(total);
    if (before != 1)
      for (int64_t d = 0; d < w.dim; ++d) sums[d] *= before;
  }
  if constexpr (!std::is_same_v<N, float>) {
    for (int64_t j = 0; j < padded; ++j) row[j] *= w.value_factor[j];
    w.weight_factor[r] =
        round_to_16_bits(row, padded, reinterpret_cast<int16_t*>(w.weights + r * KEY_BLOCK));
  }
}

// A head's keys or values from a token on.
template <class T>
Rows<T> rows_of(const Tensor& x, const optional<Tensor>& scales, int64_t head, int64_t from) {
  const T* data = x.const_data_ptr<T>() + head * x.stride(0) + from * x.stride(1);
  const float* own = nullptr;
  if (scales) own = scales->const_data_ptr<float>() + head * scales->stride(0) + from;
  return Rows<T>{data, x.stride(1), own};
}

// Queries of a head that a thread takes at once: fewer while threads have too few such blocks to
// share evenly.
inline int64_t queries_at_once(int64_t heads, int64_t group, int64_t tokens, int64_t threads) {
  int64_t step = std::max<int64_t>(1, ROW_BLOCK / group);
  while (step > 1 && heads * ((tokens + step - 1) / step) < 4 * threads &&
         step * group >= 8 * TILE_ROWS)
    step = (step + 1) / 2;
  return step;
}

// q: float32 [K, G, T, D]; k, v: [K, S, D / PARTS<T>] with contiguous rows, their scales [K, S].
// Query t sees the keys from first[t], or 0, to S - T + t if causal, else to S - 1.
template <class T>
std::tuple<Tensor, Tensor> attend_many_of(const Tensor& q, const Tensor& k, const Tensor& v,
                                          const optional<Tensor>& k_scale,
                                          const optional<Tensor>& v_scale,
                                          const optional<Tensor>& first, bool causal,
                                          double scale) {
  using N = std::conditional_t<sizeof(T) == 1, int32_t, float>;
  constexpr int64_t PAIR = std::is_same_v<N, float> ? 1 : 2;
  const int64_t heads = q.size(0), group = q.size(1), tokens = q.size(2), dim = q.size(3),
                stored = k.size(1), threads = at::get_num_threads();
  const Tensor out = at::empty(q.sizes(), q.options());
  const Tensor lse = at::empty({heads, group, tokens}, q.options());
  if (!q.numel()) return {out, lse};
  const int64_t* begins = first ? first->const_data_ptr<int64_t>() : nullptr;
  auto begin_of = [&](int64_t t) { return begins ? begins[t] : 0; };
  auto end_of = [&](int64_t t) { return causal ? stored - tokens + t + 1 : stored; };
  const int64_t step = queries_at_once(heads, group, tokens, threads),
                blocks = (tokens + step - 1) / step, units = heads * blocks;
  const float factor = static_cast<float>(scale) * LOG2_E;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min(units, threads), 1, [&](int64_t, int64_t) {
    Workspace<N> w(step * group, dim);
    for (int64_t unit; (unit = next++) < units;) {
      // The last queries first: where they are causal they take longest.
      const int64_t head = unit % heads, t0 = (blocks - 1 - unit / heads) * step;
      const int64_t count = std::min(step, tokens - t0), rows = count * group;
      for (int64_t r = 0; r < rows; ++r) {
        const float* from = q.const_data_ptr<float>() + head * q.stride(0) +
                            r / count * q.stride(1) + (t0 + r % count) * q.stride(2);
        if (PARTS<T> > 1) {
          std::copy_n(from, dim, w.query.data());
          hadamard(w.query.data(), dim);
          from = w.query.data();
        }
        take_query(w, r, from, factor);
      }
      std::fill_n(w.sums, rows * dim, 0.0f);
      std::fill_n(w.most, rows, -std::numeric_limits<float>::infinity());
      std::fill_n(w.total, rows, 0.0f);
      const int64_t end = end_of(t0 + count - 1);
      // Windows begin in the queries' order.
      for (int64_t begin = std::max<int64_t>(0, begin_of(t0)); begin < end; begin += KEY_BLOCK) {
        const int64_t keys = std::min(KEY_BLOCK, end - begin),
                      padded = (keys + WIDTH - 1) / WIDTH * WIDTH;
        turn_keys(w, block_of(w, rows_of<T>(k, k_scale, head, begin), keys), keys, padded);
        const auto of_values = block_of(w, rows_of<T>(v, v_scale, head, begin), keys);
        const Matrix<N> values = take_values(w, of_values, keys);
        multiply<false>(Matrix<N>{w.rows, w.inner}, Matrix<N>{w.keys, KEY_BLOCK}, w.scores,
                        KEY_BLOCK, rows, padded, w.inner, w.row_factor, w.key_factor);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t t = t0 + r % count, last = std::min(keys, end_of(t) - begin);
          weigh(w, r, begin_of(t) - begin, last, padded);
        }
        Matrix<N> weights{w.weights, KEY_BLOCK};
        if constexpr (std::is_same_v<N, float>) weights.data = w.scores;
        multiply<true>(weights, values, w.sums, dim, rows, dim, (keys + PAIR - 1) / PAIR,
                       w.weight_factor);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (head * group + r / count) * tokens + t0 + r % count;
        const float total = w.total[r];
        lse.data_ptr<float>()[at] = w.most[r] / LOG2_E + std::log(total);  // log 0 is -inf
        float* to = out.data_ptr<float>() + at * dim;
        for (int64_t d = 0; d < dim; ++d) to[d] = total == 0 ? 0 : w.sums[r * dim + d] / total;
        if (PARTS<T> > 1) hadamard(to, dim);
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
  const at::ScalarType dtype = k.scalar_type();
  const bool integers = dtype == at::kChar || dtype == at::kByte;
  const int64_t parts = dtype == at::kByte ? 2 : 1;
  // Of 512 dimensions the sum of products of 16 and of 8 bits is less than 2^31.
  TORCH_CHECK(q.scalar_type() == at::kFloat && q.size(3) % WIDTH == 0 &&
                  (!integers || (q.size(3) % (2 * WIDTH) == 0 && q.size(3) <= 512)),
              "no queries of ", q.scalar_type(), " and ", q.size(3), " dimensions");
  TORCH_CHECK(q.stride(3) == 1 && k.stride(2) == 1 && v.stride(2) == 1, "rows must be contiguous");
  TORCH_CHECK(k.size(0) == q.size(0) && k.size(2) * parts == q.size(3) && v.sizes() == k.sizes() &&
                  v.scalar_type() == k.scalar_type(),
              "queries of ", q.sizes(), " do not go with keys of ", k.sizes(), " and values of ",
              v.sizes());
  TORCH_CHECK(!first || (first->scalar_type() == at::kLong && first->is_contiguous() &&
                         first->size(0) == q.size(2)),
              "a beginning must be there for every query");
  auto of = [&](auto type) {
    return attend_many_of<decltype(type)>(q, k, v, k_scale, v_scale, first, causal, scale);
  };
  if (dtype == at::kFloat) return of(float());
  if (dtype == at::kBFloat16) return of(c10::BFloat16());
  auto in_a_row = [&](const optional<Tensor>& x) {
    return x && x->sizes() == k.sizes().slice(0, 2) && (x->stride(1) == 1 || x->size(1) == 1);
  };
  TORCH_CHECK(integers && in_a_row(k_scale) && in_a_row(v_scale), "no keys of ", dtype,
              " or no scales of theirs");
  if (dtype == at::kByte) return of(uint8_t());
  return of(int8_t());
}

// razor_dist.kernels.partial.merge of two: float32 outs [K, G, T, D] and lses [K, G, T].
inline std::tuple<Tensor, Tensor> merge(const Tensor& out_a, const Tensor& lse_a,
                                        const Tensor& out_b, const Tensor& lse_b) {
  for (const Tensor* x : {&out_a, &out_b})
    TORCH_CHECK(x->scalar_type() == at::kFloat && x->sizes() == out_a.sizes() && x->stride(3) == 1,
                "results of ", x->sizes(), " beside ", out_a.sizes());
  for (const Tensor* x : {&lse_a, &lse_b})
    TORCH_CHECK(x->scalar_type() == at::kFloat && x->sizes() == out_a.sizes().slice(0, 3),
                "lse of ", x->sizes(), " for results of ", out_a.sizes());
  const int64_t group = out_a.size(1), tokens = out_a.size(2), dim = out_a.size(3),
                rows = out_a.size(0) * group * tokens;
  const Tensor out = at::empty(out_a.sizes(), out_a.options());
  const Tensor lse = at::empty(lse_a.sizes(), lse_a.options());
  at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at[] = {row / tokens / group, row / tokens % group, row % tokens};
      auto place = [&](const Tensor& x) {
        const float* data = x.const_data_ptr<float>();
        for (int i = 0; i < 3; ++i) data += at[i] * x.stride(i);
        return data;
      };
      const float a = *place(lse_a), b = *place(lse_b);
      const float top = a > b || a != a ? a : b;  // NaN stays
      // Where both are -inf the differences would be NaN; any finite reference gives weight 0.
      const float from = top == NOTHING ? 0 : top;
      float by_a = std::exp(a - from), by_b = std::exp(b - from);
      const float total = by_a + by_b;
      if (total != 0) by_a /= total, by_b /= total;
      const float *of_a = place(out_a), *of_b = place(out_b);
      float* to = out.data_ptr<float>() + row * dim;
      for (int64_t d = 0; d < dim; ++d) to[d] = by_a * of_a[d] + by_b * of_b[d];
      lse.data_ptr<float>()[row] = from + std::log(total);  // log 0 is -inf
    }
  });
  return {out, lse};
}

}  // namespace razor_dist
