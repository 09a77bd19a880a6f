// Attention of one token of each of several sequences to pages and windows:
// razor_dist.kernels.decode says what `store` and `attend` compute.
//
// The speed of reading keys and values, each once, bounds it. So a vector of them is read for all
// queries that need it, and the next vectors are fetched meanwhile.
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
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace razor_dist {

using at::Tensor;
using std::optional;

// Keys that one call of `Unit::attend` sees at most: its parts are merged afterwards, so that
// threads share a long sequence. It goes through them by blocks, whose values are in the nearest
// cache still when the weights are known.
constexpr int64_t UNIT = 512;
constexpr int BLOCK = 64;
constexpr int QUERIES = WIDTH == 16 ? 4 : 2;  // that share a load with SCORED keys
constexpr int SCORED = 4;

// scores[r, j] = q[r] . k[j] for SCORED keys; their values are fetched meanwhile
template <int R, class T>
inline void score(const float* q, const T* const* k, const T* const* v, int dim, float* scores) {
  constexpr int P = PARTS<T>;
  const int width = dim / P;
  Floats sums[R][SCORED] = {};
  int d = 0;
  for (; d + WIDTH <= width; d += WIDTH) {
    Floats keys[SCORED][P];
    for (int j = 0; j < SCORED; ++j) {
      load_parts(k[j] + d, keys[j]);
      __builtin_prefetch(v[j] + d);
    }
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < P; ++p) {
        const Floats of = load(q + r * dim + p * width + d);
        for (int j = 0; j < SCORED; ++j) sums[r][j] = fused(of, keys[j][p], sums[r][j]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    Four<float> four =
        sums_of(quarter(sums[r][0]), quarter(sums[r][1]), quarter(sums[r][2]), quarter(sums[r][3]));
    for (int p = 0; p < P; ++p)
      for (int rest = d; rest < width; ++rest)
        for (int j = 0; j < SCORED; ++j)
          four[j] = fused(q[r * dim + p * width + rest], load_part(k[j][rest], p), four[j]);
    std::memcpy(scores + r * BLOCK, &four, sizeof four);
  }
}

// out[r, d] += sum over j of weights[r, j] v[j, d], for C vectors of each part of a row from d on.
// The next block's keys, which mostly lie behind this one's, are fetched meanwhile.
template <int R, int C, class T>
inline void add_values(const float* weights, const T* const* k, const T* const* v, int count, int d,
                       float* out, int dim) {
  constexpr int P = PARTS<T>;
  const int width = dim / P;
  Floats sums[R][C][P];
  auto each = [&](auto f) {
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c)
        for (int p = 0; p < P; ++p) f(sums[r][c][p], out + r * dim + p * width + d + c * WIDTH);
  };
  each([](Floats& own, float* at) { own = load(at); });
  for (int j = 0; j < count; ++j) {
    for (int c = 0; c < C; ++c) {
      Floats values[P];
      load_parts(v[j] + d + c * WIDTH, values);
      __builtin_prefetch(k[j] + BLOCK * width + d + c * WIDTH);
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
          sums[r][c][p] = fused(values[p], all(weights[r * BLOCK + j]), sums[r][c][p]);
    }
  }
  each([](const Floats& own, float* at) { std::memcpy(at, &own, sizeof own); });
}

template <int R, class T>
void add_all_values(const float* weights, const T* const* k, const T* const* v, int count,
                    float* out, int dim) {
  constexpr int P = PARTS<T>, C = (WIDTH == 16 ? 4 : 2) / P;  // as many sums as there is room for
  const int width = dim / P;
  int d = 0;
  for (; d + C * WIDTH <= width; d += C * WIDTH)
    add_values<R, C>(weights, k, v, count, d, out, dim);
  for (; d + WIDTH <= width; d += WIDTH) add_values<R, 1>(weights, k, v, count, d, out, dim);
  for (; d < width; ++d)
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p)
        for (int j = 0; j < count; ++j) {
          float& sum = out[r * dim + p * width + d];
          sum = fused(weights[r * BLOCK + j], load_part(v[j][d], p), sum);
        }
}

// One layer's cache of KV heads, [rows, places, dim]; the rows may be of a larger one.
struct Cache {
  const void *k, *v;
  // float32, bfloat16, or 8 or (two in a byte) 4 bits: then scales, [rows, places], belong to it
  at::ScalarType dtype;
  const float *k_scale = nullptr, *v_scale = nullptr;
  int64_t row, scale_row = 0;

  Cache(const Tensor& keys, const Tensor& values, const optional<Tensor>& keys_scale,
        const optional<Tensor>& values_scale)
      : k(keys.const_data_ptr()),
        v(values.const_data_ptr()),
        dtype(keys.scalar_type()),
        row(keys.stride(0)) {
    TORCH_CHECK(keys.stride(2) == 1 && keys.stride(1) == keys.size(2), "rows must be contiguous");
    TORCH_CHECK(keys.strides() == values.strides(), "keys and values must lie alike");
    TORCH_CHECK(
        dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kChar || dtype == at::kByte,
        dtype, " is no dtype of keys");
    if (!keys_scale) return;
    k_scale = keys_scale->const_data_ptr<float>();
    v_scale = values_scale->const_data_ptr<float>();
    scale_row = keys_scale->stride(0);
  }

  bool transformed() const { return dtype == at::kByte; }
};

// Up to BLOCK keys: where they are in a cache, what is added to their scores, and how far they
// stand.
struct Keys {
  int count = 0;
  int64_t place[BLOCK];
  float bias[BLOCK], far[BLOCK];

  void add(int64_t at, float added, float distance) {
    place[count] = at, bias[count] = added, far[count] = distance;
    ++count;
  }
};

// The pages of n sequences.
struct Pages {
  Cache cache;
  int64_t page_size, row;  // of the table
  const int32_t* table;
  const int64_t *stored, *position, *places;  // places: for ALiBi, else null

  int64_t extent(int64_t b) const { return stored[b]; }

  // Add keys from index i of sequence b on, before end; return the index after them.
  int64_t see(int64_t b, int64_t i, int64_t end, Keys& keys) const {
    while (i < end && keys.count < BLOCK) {
      const int64_t begin = i % page_size,
                    first = table[b * row + i / page_size] * page_size + begin;
      const int64_t run = std::min({page_size - begin, end - i, int64_t{BLOCK} - keys.count});
      for (int64_t at = first; at < first + run; ++at)
        keys.add(at, 0, places ? static_cast<float>(places[at] - position[b]) : 0);
      i += run;
    }
    return i;
  }
};

// The slots of n sequences: [ compensation token | sinks | ring ].
struct Windows {
  Cache cache;
  int64_t sinks, width;
  bool compensation;
  const int64_t *position, *start, *offset, *capacity;

  int64_t extent(int64_t b) const {  // places that a token can have been written to
    const int64_t used = std::min(capacity[b], position[b] + 1);
    return capacity[b] ? std::min(width, 1 + sinks + used) : 0;
  }

  int64_t see(int64_t b, int64_t i, int64_t end, Keys& keys) const {
    const int64_t at = position[b], room = capacity[b], first = std::max(start[b], sinks);
    const int64_t own = at % room;  // the query's own index in the ring
    for (; i < end && keys.count < BLOCK; ++i) {
      if (!i) {  // it stands in the middle of what was dropped
        if (compensation && first > sinks) {
          const float count = static_cast<float>(first - sinks),
                      middle = (first + sinks - 1) / 2.0f;
          keys.add(offset[b], std::log(count), middle - at);
        }
        continue;
      }
      int64_t token = i - 1;
      if (token >= sinks) {
        // The last token, up to the query's own, that the ring has at this index.
        const int64_t index = token - sinks;
        token = at - own + index - (index > own ? room : 0);
        if (token < first) continue;
      } else if (token > at) {
        continue;
      }
      keys.add(offset[b] + i, 0, static_cast<float>(token - at));
    }
    return i;
  }
};

// The queries of one KV head for one sequence, float32 [group, dim], and how they score keys.
struct Queries {
  const float* q;
  int group, dim;
  float scale;
  const float* slopes;  // [group], ALiBi's; else null
};

// A running softmax of one KV head's queries: maximum, sum of weights, weighted values.
struct Partial {
  float *most, *total, *out;  // [group], [group], [group, dim]
};

// Call f with a number of rows up to QUERIES as a constant.
template <class F>
void by_rows(int rows, F f) {
  if (rows == 1) f(std::integral_constant<int, 1>());
  if (rows == 2) f(std::integral_constant<int, 2>());
  if constexpr (QUERIES > 2) {
    if (rows == 3) f(std::integral_constant<int, 3>());
    if (rows == 4) f(std::integral_constant<int, 4>());
  }
}

// Attention of one KV head's queries to the keys from index begin to end of sequence b.
template <class T, class Seen>
void attend_unit(const Seen& seen, int64_t head, int64_t b, int64_t begin, int64_t end,
                 const Queries& queries, Partial found) {
  const auto [q, group, dim, scale, slopes] = queries;
  const Cache& cache = seen.cache;
  const T* k = static_cast<const T*>(cache.k) + head * cache.row;
  const T* v = static_cast<const T*>(cache.v) + head * cache.row;
  const float* k_scale = cache.k_scale + head * cache.scale_row;
  const float* v_scale = cache.v_scale + head * cache.scale_row;
  std::fill_n(found.most, group, NOTHING);
  std::fill_n(found.total, group, 0.0f);
  std::fill_n(found.out, group * dim, 0.0f);
  constexpr bool CODES = PARTS<T> > 1;  // which are 2 (code - ZERO)
  constexpr float STEP = CODES ? 2 : 1;
  std::vector<float> zero(group);
  for (int g = 0; CODES && g < group; ++g) zero[g] = ZERO * sum_of(q + g * dim, dim);
  alignas(64) float scores[QUERIES * BLOCK];
  const T *key[BLOCK], *value[BLOCK];
  for (int64_t i = begin; i < end;) {
    Keys keys;
    i = seen.see(b, i, end, keys);
    if (!keys.count) continue;
    // Vectors are filled up with keys that are there, and then get no weight.
    const int padded = (keys.count + WIDTH - 1) / WIDTH * WIDTH;
    for (int j = 0; j < padded; ++j) {
      const int64_t place = keys.place[std::min(j, keys.count - 1)];
      key[j] = k + place * (dim / PARTS<T>), value[j] = v + place * (dim / PARTS<T>);
    }
    for (int g = 0; g < group; g += QUERIES) {
      const int rows = std::min(QUERIES, group - g);
      const float* of = q + g * dim;
      by_rows(rows, [&](auto count) {
        for (int j = 0; j < keys.count; j += SCORED)
          score<count>(of, key + j, value + j, dim, scores + j);
      });
      for (int r = 0; r < rows; ++r) {
        float* row = scores + r * BLOCK;
        if (cache.k_scale)
          for (int j = 0; j < keys.count; ++j)
            row[j] = (row[j] - zero[g + r]) * (STEP * k_scale[keys.place[j]]);
        for (int j = 0; j < keys.count; ++j) row[j] = row[j] * scale + keys.bias[j];
        if (slopes)
          for (int j = 0; j < keys.count; ++j) row[j] += slopes[g + r] * keys.far[j];
        std::fill(row + keys.count, row + padded, NOTHING);
        const float most = std::max(found.most[g + r], largest_of(row, padded));
        Floats total = {};
        for (int j = 0; j < padded; j += WIDTH) {
          // 2^-126 in place of 0 is a weight that no sum of float32 sees beside the largest, 1.
          const Floats weights = exp2_of_negative((load(row + j) - most) * LOG2_E);
          std::memcpy(row + j, &weights, sizeof weights);
          total += weights;
        }
        const float before = std::exp(found.most[g + r] - most);
        found.most[g + r] = most;
        found.total[g + r] = found.total[g + r] * before + sum(total);
        if (before != 1)
          for (int d = 0; d < dim; ++d) found.out[(g + r) * dim + d] *= before;
        if (cache.v_scale)
          for (int j = 0; j < keys.count; ++j) row[j] *= STEP * v_scale[keys.place[j]];
        if (CODES) {
          const float weights = ZERO * sum_of(row, keys.count);
          for (int d = 0; d < dim; ++d) found.out[(g + r) * dim + d] -= weights;
        }
      }
      float* out = found.out + g * dim;
      by_rows(rows,
              [&](auto count) { add_all_values<count>(scores, key, value, keys.count, out, dim); });
    }
  }
}

template <class Seen>
void attend_any(at::ScalarType dtype, const Seen& seen, int64_t head, int64_t b, int64_t begin,
                int64_t end, const Queries& queries, Partial found) {
  if (dtype == at::kFloat)
    attend_unit<float>(seen, head, b, begin, end, queries, found);
  else if (dtype == at::kBFloat16)
    attend_unit<c10::BFloat16>(seen, head, b, begin, end, queries, found);
  else if (dtype == at::kChar)
    attend_unit<int8_t>(seen, head, b, begin, end, queries, found);
  else
    attend_unit<uint8_t>(seen, head, b, begin, end, queries, found);
}

// Of the tensors of `Pages` and `Windows` of razor_dist.kernels.decode those that are read, in
// their order; none if there is none.
using Fields = c10::List<optional<Tensor>>;

template <class T>
const T* data(const Fields& fields, int64_t index) {
  const optional<Tensor> tensor = fields.get(index);
  if (!tensor) return nullptr;
  TORCH_CHECK(tensor->is_contiguous(), "field ", index, " must be contiguous");
  return tensor->const_data_ptr<T>();
}

inline Pages pages_of(const Fields& fields, int64_t page_size) {
  const Tensor k = *fields.get(0), v = *fields.get(1), table = *fields.get(2);
  return {Cache(k, v, fields.get(6), fields.get(7)),
          page_size,
          table.size(1),
          data<int32_t>(fields, 2),
          data<int64_t>(fields, 3),
          data<int64_t>(fields, 4),
          data<int64_t>(fields, 5)};
}

inline Windows windows_of(const Fields& fields, int64_t sinks, bool compensation, int64_t width) {
  const Tensor k = *fields.get(0), v = *fields.get(1);
  return {Cache(k, v, std::nullopt, std::nullopt),
          sinks,
          width,
          compensation,
          data<int64_t>(fields, 2),
          data<int64_t>(fields, 3),
          data<int64_t>(fields, 4),
          data<int64_t>(fields, 5)};
}

// Store new tokens' keys or values, of `dim` numbers, in a cache [rows, places, ...], rounded to
// its dtype; codes with scales [rows, places], as razor_dist.kernels.quantized has them.
struct Store {
  void* data;
  at::ScalarType dtype;
  int64_t dim, width, row, scale_row = 0;
  float* scale = nullptr;
  std::vector<float> own;

  Store(const Tensor& cache, const Tensor* scales, int64_t dim)
      : data(cache.data_ptr()),
        dtype(cache.scalar_type()),
        dim(dim),
        width(cache.size(2)),
        row(cache.stride(0)),
        own(dim) {
    TORCH_CHECK(cache.stride(2) == 1 && cache.stride(1) == width, "rows must be contiguous");
    TORCH_CHECK(width * (dtype == at::kByte ? 2 : 1) == dim, "a cache of ", width,
                " numbers of a key of ", dim);
    TORCH_CHECK((dtype == at::kChar || dtype == at::kByte) == (scales != nullptr),
                "scales belong to codes");
    if (!scales) return;
    TORCH_CHECK(scales->stride(1) == 1, "scales must be contiguous");
    scale = scales->data_ptr<float>(), scale_row = scales->stride(0);
  }

  void put(const float* from, int64_t head, int64_t place) {
    const int64_t at = head * row + place * width;
    if (dtype == at::kFloat) {
      std::copy_n(from, dim, static_cast<float*>(data) + at);
    } else if (dtype == at::kBFloat16) {
      std::copy_n(from, dim, static_cast<c10::BFloat16*>(data) + at);
    } else if (dtype == at::kByte) {
      std::copy_n(from, dim, own.data());
      scale[head * scale_row + place] =
          round_to_4_bits(own.data(), dim, static_cast<uint8_t*>(data) + at);
    } else {
      TORCH_CHECK(dtype == at::kChar, dtype, " is no dtype of keys");
      const float own = scale[head * scale_row + place] = largest_size(from, dim, 0) / 127;
      const float step =
          own < std::numeric_limits<float>::min() ? std::numeric_limits<float>::min() : own;
      round_by(from, dim, step, 0, static_cast<int8_t*>(data) + at);
    }
  }
};

// k and v: float32 [K, n, D] with contiguous rows; pages: k, v and `at`, and scales of both if they
// are codes; windows: k, v, `position`, `offset` and `capacity`; either may be empty. Slots are
// written one after the other: the dummy slot is that of several tokens.
inline void store(const Tensor& k, const Tensor& v, const Tensor& order, at::TensorList pages,
                  at::TensorList windows, int64_t sinks) {
  const int64_t* heads = order.const_data_ptr<int64_t>();
  const int64_t tokens = k.size(1), split = pages.empty() ? 0 : pages[0].size(0);
  TORCH_CHECK(k.scalar_type() == at::kFloat && v.scalar_type() == at::kFloat && k.stride(2) == 1 &&
                  v.stride(2) == 1,
              "new keys and values must be float32, their rows contiguous");
  auto put_both = [&](Store& keys, Store& values, int64_t row, int64_t head, int64_t b,
                      int64_t place) {
    keys.put(k.const_data_ptr<float>() + head * k.stride(0) + b * k.stride(1), row, place);
    values.put(v.const_data_ptr<float>() + head * v.stride(0) + b * v.stride(1), row, place);
  };
  auto numbers = [](const Tensor& tensor) {
    TORCH_CHECK(tensor.is_contiguous(), "indices must be contiguous");
    return tensor.const_data_ptr<int64_t>();
  };
  if (!pages.empty()) {
    const bool scaled = pages.size() == 5;
    Store keys(pages[0], scaled ? &pages[3] : nullptr, k.size(2)),
        values(pages[1], scaled ? &pages[4] : nullptr, k.size(2));
    const int64_t* at = numbers(pages[2]);
    for (int64_t row = 0; row < split; ++row)
      for (int64_t b = 0; b < tokens; ++b) put_both(keys, values, row, heads[row], b, at[b]);
  }
  if (!windows.empty()) {
    Store keys(windows[0], nullptr, k.size(2)), values(windows[1], nullptr, k.size(2));
    const int64_t *position = numbers(windows[2]), *offset = numbers(windows[3]),
                  *capacity = numbers(windows[4]);
    for (int64_t row = split; row < order.size(0); ++row) {
      for (int64_t b = 0; b < tokens; ++b) {
        if (!capacity[b]) continue;
        const int64_t at = position[b] < sinks ? position[b] : sinks + position[b] % capacity[b];
        put_both(keys, values, row - split, heads[row], b, offset[b] + 1 + at);
      }
    }
  }
}

// The row of a query head's result, by `places`, or -1 for none; without `places`, the head's
// index.
inline int64_t place_of(const optional<Tensor>& places, int64_t query_head) {
  return places ? places->const_data_ptr<int64_t>()[query_head] : query_head;
}

// q: float32 [K, G, n, D]; out: float32 [n, H, D], of which the heads in `order` are written, each
// query head to the row that `place_of` says;
// packed, if it is wanted: float32 [R, G, n, D + 1], written instead for the heads of `pages`.
inline void attend(const Tensor& q, const Tensor& order, const Fields& pages, int64_t page_size,
                   const Fields& windows, int64_t sinks, bool compensation, int64_t width,
                   const Tensor& out, double scale, const optional<Tensor>& slopes,
                   const optional<Tensor>& packed, const optional<Tensor>& places) {
  const int group = q.size(1), dim = q.size(3);
  const int64_t tokens = q.size(2);
  const int64_t split = pages.size() ? (*pages.get(0)).size(0) : 0;
  TORCH_CHECK(q.stride(3) == 1 && out.is_contiguous() && out.scalar_type() == at::kFloat &&
                  (!slopes || slopes->is_contiguous()),
              "queries, results and slopes must have contiguous rows");
  const int64_t* heads = order.const_data_ptr<int64_t>();
  optional<Pages> paged;
  optional<Windows> windowed;
  if (pages.size()) paged = pages_of(pages, page_size);
  if (windows.size()) windowed = windows_of(windows, sinks, compensation, width);

  // Units of one head and sequence follow each other; `first` says where these begin.
  struct Unit {
    int64_t j, b, begin, end;
  };
  std::vector<Unit> units;
  std::vector<int64_t> first;
  for (int64_t j = 0; j < order.size(0); ++j) {
    for (int64_t b = 0; b < tokens; ++b) {
      const int64_t end = j < split ? paged->extent(b) : windowed->extent(b);
      first.push_back(units.size());
      const int64_t parts = (end + UNIT - 1) / UNIT;
      for (int64_t part = 0; part < parts; ++part)
        units.push_back({j, b, part * end / parts, (part + 1) * end / parts});
    }
  }
  first.push_back(units.size());

  const int64_t room = group * (dim + 2);
  const Tensor found = at::empty({static_cast<int64_t>(units.size()), room}, q.options());
  float* const buffer = found.data_ptr<float>();
  auto partial = [&](int64_t unit) {
    float* at = buffer + unit * room;
    return Partial{at, at + group, at + 2 * group};
  };
  const float* const queries = q.const_data_ptr<float>();
  const float* const of_slopes = slopes ? slopes->const_data_ptr<float>() : nullptr;

  // Units differ in length, so that threads take one after the other instead of equal shares.
  const int64_t count = units.size();
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    std::vector<float> own(group * dim);
    for (int64_t u; (u = next++) < count;) {
      const auto [j, b, begin, end] = units[u];
      const int64_t head = heads[j];
      for (int64_t g = 0; g < group; ++g)
        std::copy_n(queries + head * q.stride(0) + g * q.stride(1) + b * q.stride(2), dim,
                    own.data() + g * dim);
      const bool transformed = j < split && paged->cache.transformed();
      for (int64_t g = 0; transformed && g < group; ++g) transform(own.data() + g * dim, dim);
      const Queries of{own.data(), group, dim, static_cast<float>(scale),
                       of_slopes ? of_slopes + head * group : nullptr};
      if (j < split)
        attend_any(paged->cache.dtype, *paged, j, b, begin, end, of, partial(u));
      else
        attend_any(windowed->cache.dtype, *windowed, j - split, b, begin, end, of, partial(u));
    }
  });

  // out = sum of e^(m_u - m) out_u / sum of e^(m_u - m) l_u, lse = m + log of the latter
  for (int64_t j = 0; j < order.size(0); ++j) {
    for (int64_t b = 0; b < tokens; ++b) {
      const int64_t from = first[j * tokens + b], to = first[j * tokens + b + 1];
      for (int64_t g = 0; g < group; ++g) {
        float most = NOTHING, total = 0;
        for (int64_t u = from; u < to; ++u) most = std::max(most, partial(u).most[g]);
        const bool packs = j < split && packed;
        const int64_t place = packs ? 0 : place_of(places, heads[j] * group + g);
        if (place < 0) continue;
        float* to_row = packs
                            ? packed->data_ptr<float>() + ((j * group + g) * tokens + b) * (dim + 1)
                            : out.data_ptr<float>() + (b * out.size(1) + place) * dim;
        std::fill_n(to_row, dim, 0.0f);
        for (int64_t u = from; u < to; ++u) {
          const Partial part = partial(u);
          if (part.most[g] == NOTHING && part.total[g] == 0) continue;  // it saw nothing
          const float weight = std::exp(part.most[g] - most);
          total += weight * part.total[g];
          for (int64_t d = 0; d < dim; ++d) to_row[d] += weight * part.out[g * dim + d];
        }
        if (total != 0)
          for (int64_t d = 0; d < dim; ++d) to_row[d] /= total;
        if (j < split && paged->cache.transformed()) transform_back(to_row, dim);
        if (packs) to_row[dim] = total == 0 ? NOTHING : most + std::log(total);
      }
    }
  }
}

// gathered: what `attend` packed, of all ranks, float32 [P, R, G, n, D + 1]; out: as there, of
// which the first R heads of `order` are written:
//   out = sum of e^(lse_p - m) out_p / sum of e^(lse_p - m), 0 where all lse are -inf
inline void merge_ranks(const Tensor& gathered, const Tensor& order, const Tensor& out,
                        const optional<Tensor>& places) {
  TORCH_CHECK(gathered.is_contiguous() && out.is_contiguous() && order.is_contiguous(),
              "results and heads must be contiguous");
  const int64_t ranks = gathered.size(0), heads = gathered.size(1), group = gathered.size(2),
                tokens = gathered.size(3), dim = gathered.size(4) - 1, stride = gathered.stride(0);
  const int64_t* const of = order.const_data_ptr<int64_t>();
  const float* from = gathered.const_data_ptr<float>();
  for (int64_t j = 0; j < heads; ++j) {
    for (int64_t g = 0; g < group; ++g) {
      for (int64_t b = 0; b < tokens; ++b, from += dim + 1) {
        float most = NOTHING, total = 0;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const float lse = from[rank * stride + dim];
          most = lse > most || lse != lse ? lse : most;  // NaN stays
        }
        const int64_t place = place_of(places, of[j] * group + g);
        if (place < 0) continue;
        float* const to = out.data_ptr<float>() + (b * out.size(1) + place) * dim;
        std::fill_n(to, dim, 0.0f);
        if (most == NOTHING) continue;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const float* const part = from + rank * stride;
          const float weight = std::exp(part[dim] - most);
          total += weight;
          for (int64_t d = 0; d < dim; ++d) to[d] += weight * part[d];
        }
        for (int64_t d = 0; d < dim; ++d) to[d] /= total;
      }
    }
  }
}

}  // namespace razor_dist
