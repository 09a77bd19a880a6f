// Products of a few rows, and the small operations of a layer: razor_dist.kernels.linear and
// razor_dist.kernels.fused say what they compute.
//
// torch's products are made for many rows. Of a few, what bounds them is how fast the weights are
// read: here a vector of these is read for up to eight rows, whose sums stay in registers. The
// small operations each cost more in torch's dispatch than in arithmetic.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "vectors.h"

namespace razor_dist {

using at::Tensor;
using std::optional;

// Bytes of the weights that are fetched ahead: for the next calls of `product`, while this one adds
// up its sums.
constexpr int AHEAD = 8192;

// out[m, o] += x[m] . w[o] over inputs [begin, end), for M rows and O outputs
template <int M, int O, class W>
void product(const float* x, const W* w, float* out, int64_t inputs, int64_t outputs, int64_t begin,
             int64_t end) {
  Floats sums[M * O] = {};
  int64_t i = begin;
  for (; i + WIDTH <= end; i += WIDTH) {
    Floats weights[O];
    for (int o = 0; o < O; ++o) {
      const W* from = w + o * inputs + i;
      weights[o] = load(from);
      __builtin_prefetch(reinterpret_cast<const char*>(from) + AHEAD);
    }
    for (int m = 0; m < M; ++m) {
      const Floats row = load(x + m * inputs + i);
      for (int o = 0; o < O; ++o) sums[m * O + o] += row * weights[o];
    }
  }
  float totals[(M * O + 3) / 4 * 4];
  for (int at = 0; at < M * O; at += 4) {
    auto of = [&](int n) { return n < M * O ? quarter(sums[n]) : Four{}; };
    const Four four = sums_of(of(at), of(at + 1), of(at + 2), of(at + 3));
    std::memcpy(totals + at, &four, sizeof four);
  }
  if (i < end)
    for (int m = 0; m < M; ++m)
      for (int o = 0; o < O; ++o)
        for (int64_t rest = i; rest < end; ++rest)
          totals[m * O + o] += x[m * inputs + rest] * w[o * inputs + rest];
  for (int m = 0; m < M; ++m)
    for (int o = 0; o < O; ++o) out[m * outputs + o] += totals[m * O + o];
}

constexpr int64_t ROWS = 8;      // of x in one call of `products`
constexpr int64_t INPUTS = 576;  // of these rows, which then stay in the nearest cache
constexpr int64_t TILE = 48;     // outputs, whose weights all rows read from a cache

// The same for outputs [from, to).
template <int M, class W>
void products(const float* x, const W* w, float* out, int64_t inputs, int64_t outputs, int64_t from,
              int64_t to) {
  // As many sums as there are registers for.
  constexpr int O = WIDTH == 16 ? (M > 4 ? 3 : 4) : (M > 4 ? 1 : M > 2 ? 2 : 4);
  const int64_t parts = (inputs + INPUTS - 1) / INPUTS;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * inputs / parts / WIDTH * WIDTH;
    const int64_t end = part + 1 == parts ? inputs : (part + 1) * inputs / parts / WIDTH * WIDTH;
    int64_t o = from;
    for (; o + O <= to; o += O)
      product<M, O, W>(x, w + o * inputs, out + o, inputs, outputs, begin, end);
    for (; o < to; ++o) product<M, 1, W>(x, w + o * inputs, out + o, inputs, outputs, begin, end);
  }
}

// x [..., I] and bias [O], float32, w [O, I] of type W, all contiguous, to [..., O]
template <class W>
Tensor product_of(const Tensor& any_x, const Tensor& w, const optional<Tensor>& bias) {
  constexpr decltype(&products<1, W>) of_rows[ROWS] = {
      products<1, W>, products<2, W>, products<3, W>, products<4, W>,
      products<5, W>, products<6, W>, products<7, W>, products<8, W>};
  const Tensor x = any_x.contiguous();
  const int64_t inputs = w.size(1), outputs = w.size(0), rows = x.numel() / inputs;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = outputs;
  Tensor out = at::empty(shape, x.options());
  const float *of_x = x.const_data_ptr<float>(), *of_bias = nullptr;
  const W* of_w = w.const_data_ptr<W>();
  if (bias) of_bias = bias->const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  const int64_t calls = (rows + ROWS - 1) / ROWS;
  at::parallel_for(0, (outputs + TILE - 1) / TILE, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t o = tile * TILE, last = std::min(o + TILE, outputs);
      for (int64_t m = 0; m < rows; ++m)
        for (int64_t at = o; at < last; ++at) to[m * outputs + at] = of_bias ? of_bias[at] : 0;
      for (int64_t call = 0; call < calls; ++call) {
        // Calls of rows as even as can be: nine are four and five.
        const int64_t m = call * rows / calls, count = (call + 1) * rows / calls - m;
        of_rows[count - 1](of_x + m * inputs, of_w, to + m * outputs, inputs, outputs, o, last);
      }
    }
  });
  return out;
}

inline Tensor linear(const Tensor& x, const Tensor& w, const optional<Tensor>& bias) {
  return product_of<float>(x, w, bias);
}

// So many numbers are worth a thread of their own.
constexpr int64_t GRAIN = 1 << 14;

// to = from / step, rounded to whole numbers, of which the largest is `most`, and `zero` added;
// return step, NaN if a number is NaN or infinite.
template <class T>
float round_row(const float* from, int64_t count, float most, float zero, T* to) {
  const float least = std::numeric_limits<float>::min() * most;
  const float step = largest_size(from, count, least) / most;
  round_by(from, count, step, zero, to);
  return step;
}

// x [n, I], float32, to 8 bits without a sign, and each row's step [n, 1]
inline std::tuple<Tensor, Tensor> round_rows(const Tensor& any_x, double most, double zero) {
  const Tensor x = any_x.contiguous();
  const int64_t rows = x.size(0), inputs = x.size(1);
  const Tensor codes = at::empty(x.sizes(), x.options().dtype(at::kByte)),
               steps = at::empty({rows, 1}, x.options());
  const int64_t grain = std::max<int64_t>(1, GRAIN / inputs);
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      steps.data_ptr<float>()[row] =
          round_row<uint8_t>(x.const_data_ptr<float>() + row * inputs, inputs, most, zero,
                             codes.data_ptr<uint8_t>() + row * inputs);
  });
  return {codes, steps};
}

// x [..., I] and bias [O], float32, w [O, I] of 8 bits with the scales [O]: each row of x is
// divided by its step, so that its largest number is `most`, and rounded. Parts of INPUTS are added
// up without rounding, as 127 * 127 * 576 is less than 2^24.
inline Tensor linear_int8(const Tensor& any_x, const Tensor& w, const Tensor& scales,
                          const optional<Tensor>& bias, double most) {
  const Tensor x = any_x.contiguous(), codes = at::empty(x.sizes(), x.options());
  const int64_t inputs = w.size(1), outputs = w.size(0), rows = x.numel() / inputs;
  std::vector<float> steps(rows);
  for (int64_t row = 0; row < rows; ++row)
    steps[row] = round_row(x.const_data_ptr<float>() + row * inputs, inputs, most, 0,
                           codes.data_ptr<float>() + row * inputs);
  const Tensor out = product_of<int8_t>(codes, w, {});
  const float *of_scales = scales.const_data_ptr<float>(), *of_bias = nullptr;
  if (bias) of_bias = bias->const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row, to += outputs) {
    for (int64_t o = 0; o < outputs; ++o) to[o] = to[o] * of_scales[o] * steps[row];
    // By itself, so that it is rounded twice, as where there are more rows.
    for (int64_t o = 0; of_bias && o < outputs; ++o) to[o] += of_bias[o];
  }
  return out;
}

// x [..., D] and weight [D], float32
inline Tensor rms_norm(const Tensor& any_x, const Tensor& weight, double eps) {
  const Tensor x = any_x.contiguous();
  const int64_t dim = weight.size(0), rows = x.numel() / dim;
  Tensor out = at::empty(x.sizes(), x.options());
  const float* of = weight.const_data_ptr<float>();
  at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x.const_data_ptr<float>() + row * dim;
      float* to = out.data_ptr<float>() + row * dim;
      Floats squares = {};
      int64_t d = 0;
      for (; d + WIDTH <= dim; d += WIDTH) squares += load(from + d) * load(from + d);
      float total = sum(squares);
      for (; d < dim; ++d) total += from[d] * from[d];
      const float factor = 1 / std::sqrt(total / dim + static_cast<float>(eps));
      for (d = 0; d < dim; ++d) to[d] = of[d] * (from[d] * factor);
    }
  });
  return out;
}

// x [1, H, T, D], cos and sin [1, T, R], float32
inline Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  TORCH_CHECK(x.stride(3) == 1 && cos.stride(2) == 1 && sin.stride(2) == 1,
              "rows must be contiguous");
  Tensor out = at::empty_strided(x.sizes(), x.strides(), x.options());
  const int64_t heads = x.size(1), tokens = x.size(2), dim = x.size(3), half = cos.size(2) / 2;
  auto rotate_token = [&](int64_t t) {
    const float* c = cos.const_data_ptr<float>() + t * cos.stride(1);
    const float* s = sin.const_data_ptr<float>() + t * sin.stride(1);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = h * x.stride(1) + t * x.stride(2);
      const float* from = x.const_data_ptr<float>() + at;
      float* to = out.data_ptr<float>() + at;
      // A loop for each, of strides that the compiler knows.
      if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
          const float a = from[2 * i], b = from[2 * i + 1];
          to[2 * i] = a * c[i] - b * s[i];
          to[2 * i + 1] = b * c[i] + a * s[i];
        }
      } else {
        for (int64_t i = 0; i < half; ++i) {
          const float a = from[i], b = from[half + i];
          to[i] = a * c[i] - b * s[i];
          to[half + i] = b * c[i] + a * s[i];
        }
      }
      std::copy(from + 2 * half, from + dim, to + 2 * half);
    }
  };
  const int64_t grain = std::max<int64_t>(1, GRAIN / (heads * dim));
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) rotate_token(t);
  });
  return out;
}

inline std::tuple<Tensor, Tensor> rotate(const Tensor& q, const Tensor& k, const Tensor& cos,
                                         const Tensor& sin, bool interleaved) {
  return {rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)};
}

}  // namespace razor_dist
