// Products of a few rows, and the small operations of a layer: razor_dist.kernels.linear and
// razor_dist.kernels.fused say what they compute.
//
// torch's products are made for many rows. With a few, the speed of reading weights bounds them:
// here a vector of weights is read for up to eight rows, whose sums stay in registers. The small
// operations each cost more in torch's dispatch than in arithmetic.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

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

// Operands and their sums in a vector's places: float32, or 8-bit weights and rows rounded to 8
// bits, with two products in a place, which is twice as fast and exact.
struct Float32 {
  using Row = float;
  using Weight = float;
  using Sum = float;
  using Vector = Floats;
  static constexpr int STEP = WIDTH;
  static Vector weights(const float* from) { return load(from); }
  static Vector add(Vector sum, Vector row, Vector weights) { return fused(row, weights, sum); }
  static void add_one(float& sum, float row, float weight) { sum = fused(row, weight, sum); }
};

struct Int8 {
  using Row = int16_t;
  using Weight = int8_t;
  using Sum = int32_t;
  using Vector = Ints;
  static constexpr int STEP = 2 * WIDTH;
  static Vector weights(const int8_t* from) { return pairs_of(from); }
  static Vector add(Vector sum, Vector row, Vector weights) { return add_pairs(sum, row, weights); }
  static void add_one(int32_t& sum, int16_t row, int8_t weight) { sum += row * weight; }
};

// out[m, o] += x[m] . w[o] over inputs [begin, end), for M rows and O outputs
template <int M, int O, class Of>
void product(const typename Of::Row* x, const typename Of::Weight* w, typename Of::Sum* out,
             int64_t inputs, int64_t outputs, int64_t begin, int64_t end) {
  using Vector = typename Of::Vector;
  using Sum = typename Of::Sum;
  Vector sums[M * O] = {};
  int64_t i = begin;
  for (; i + Of::STEP <= end; i += Of::STEP) {
    Vector weights[O];
    for (int o = 0; o < O; ++o) {
      const auto* from = w + o * inputs + i;
      weights[o] = Of::weights(from);
      __builtin_prefetch(reinterpret_cast<const char*>(from) + AHEAD);
    }
    for (int m = 0; m < M; ++m) {
      const Vector row = read<Vector>(x + m * inputs + i);
      for (int o = 0; o < O; ++o) sums[m * O + o] = Of::add(sums[m * O + o], row, weights[o]);
    }
  }
  Sum totals[(M * O + 3) / 4 * 4];
  for (int at = 0; at < M * O; at += 4) {
    auto of = [&](int n) { return n < M * O ? quarter(sums[n]) : Four<Sum>{}; };
    const Four<Sum> four = sums_of(of(at), of(at + 1), of(at + 2), of(at + 3));
    std::memcpy(totals + at, &four, sizeof four);
  }
  if (i < end)
    for (int m = 0; m < M; ++m)
      for (int o = 0; o < O; ++o)
        for (int64_t rest = i; rest < end; ++rest)
          Of::add_one(totals[m * O + o], x[m * inputs + rest], w[o * inputs + rest]);
  for (int m = 0; m < M; ++m)
    for (int o = 0; o < O; ++o) out[m * outputs + o] += totals[m * O + o];
}

constexpr int64_t ROWS = 8;      // of x in one call of `products`
constexpr int64_t INPUTS = 576;  // of these rows, which then stay in the nearest cache
constexpr int64_t TILE = 48;     // outputs, whose weights all rows read from a cache

// The same for outputs [from, to).
template <int M, class Of>
void products(const typename Of::Row* x, const typename Of::Weight* w, typename Of::Sum* out,
              int64_t inputs, int64_t outputs, int64_t from, int64_t to) {
  // As many sums as there are registers for.
  constexpr int O = WIDTH == 16 ? (M > 4 ? 3 : 4) : (M > 4 ? 1 : M > 2 ? 2 : 4);
  const int64_t parts = (inputs + INPUTS - 1) / INPUTS;
  auto edge = [&](int64_t part) {
    return part == parts ? inputs : part * inputs / parts / Of::STEP * Of::STEP;
  };
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = edge(part), end = edge(part + 1);
    int64_t o = from;
    for (; o + O <= to; o += O)
      product<M, O, Of>(x, w + o * inputs, out + o, inputs, outputs, begin, end);
    for (; o < to; ++o) product<M, 1, Of>(x, w + o * inputs, out + o, inputs, outputs, begin, end);
  }
}

// out[m, o] = x[m] . w[o] of any rows, all contiguous. Before and after, `start` and `finish` are
// called with the range of outputs: they give sums to begin with, and are given the results.
template <class Of, class Start, class Finish>
void multiply_rows(const typename Of::Row* x, const typename Of::Weight* w, typename Of::Sum* out,
                   int64_t rows, int64_t inputs, int64_t outputs, Start start, Finish finish) {
  constexpr decltype(&products<1, Of>) of_rows[ROWS] = {
      products<1, Of>, products<2, Of>, products<3, Of>, products<4, Of>,
      products<5, Of>, products<6, Of>, products<7, Of>, products<8, Of>};
  const int64_t calls = (rows + ROWS - 1) / ROWS;
  at::parallel_for(0, (outputs + TILE - 1) / TILE, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t o = tile * TILE, last = std::min(o + TILE, outputs);
      start(o, last);
      for (int64_t call = 0; call < calls; ++call) {
        // Calls of rows as even as can be: nine are four and five.
        const int64_t m = call * rows / calls, count = (call + 1) * rows / calls - m;
        of_rows[count - 1](x + m * inputs, w, out + m * outputs, inputs, outputs, o, last);
      }
      finish(o, last);
    }
  });
}

inline Tensor empty_outputs(const Tensor& x, int64_t outputs) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = outputs;
  return at::empty(shape, x.options());
}

// Each operation has a form that writes to given tensors, which a recorded step repeats.

// x [..., I] and bias [O], w [O, I], all contiguous float32, to [..., O]
inline Tensor linear_to(const Tensor& any_x, const Tensor& w, const optional<Tensor>& bias,
                        const Tensor& out) {
  const Tensor x = any_x.contiguous();
  const int64_t inputs = w.size(1), outputs = w.size(0), rows = x.numel() / inputs;
  TORCH_CHECK(out.is_contiguous() && out.numel() == rows * outputs, "results of ", out.sizes());
  const float* of_bias = bias ? bias->const_data_ptr<float>() : nullptr;
  float* to = out.data_ptr<float>();
  auto start = [&](int64_t o, int64_t last) {
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t at = o; at < last; ++at) to[m * outputs + at] = of_bias ? of_bias[at] : 0;
  };
  multiply_rows<Float32>(x.const_data_ptr<float>(), w.const_data_ptr<float>(), to, rows, inputs,
                         outputs, start, [](int64_t, int64_t) {});
  return out;
}

inline Tensor linear(const Tensor& x, const Tensor& w, const optional<Tensor>& bias) {
  return linear_to(x, w, bias, empty_outputs(x, w.size(0)));
}

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
// divided by its step, so that its largest number is `most`, and rounded.
inline Tensor linear_int8_to(const Tensor& any_x, const Tensor& w, const Tensor& scales,
                             const optional<Tensor>& bias, double most, const Tensor& out) {
  const Tensor x = any_x.contiguous();
  const int64_t inputs = w.size(1), outputs = w.size(0), rows = x.numel() / inputs;
  TORCH_CHECK(out.is_contiguous() && out.numel() == rows * outputs, "results of ", out.sizes());
  const float *of_scales = scales.const_data_ptr<float>(),
              *of_bias = bias ? bias->const_data_ptr<float>() : nullptr;
  float* to = out.data_ptr<float>();
  std::vector<int16_t> codes(rows * inputs);
  std::vector<float> steps(rows);
  std::vector<int32_t> sums(rows * outputs);
  for (int64_t m = 0; m < rows; ++m)
    steps[m] = round_row(x.const_data_ptr<float>() + m * inputs, inputs, most, 0,
                         codes.data() + m * inputs);
  auto finish = [&](int64_t o, int64_t last) {
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t at = o; at < last; ++at) {
        const float found = static_cast<float>(sums[m * outputs + at]) * of_scales[at] * steps[m];
        to[m * outputs + at] = found;
      }
      // By itself, so that it is rounded twice, as where there are more rows.
      for (int64_t at = o; of_bias && at < last; ++at) to[m * outputs + at] += of_bias[at];
    }
  };
  multiply_rows<Int8>(
      codes.data(), w.const_data_ptr<int8_t>(), sums.data(), rows, inputs, outputs,
      [](int64_t, int64_t) {}, finish);
  return out;
}

inline Tensor linear_int8(const Tensor& x, const Tensor& w, const Tensor& scales,
                          const optional<Tensor>& bias, double most) {
  return linear_int8_to(x, w, scales, bias, most, empty_outputs(x, w.size(0)));
}

// out = weight * total / sqrt(mean(total²) + eps) over the last dimension, where total is x, or
// x + residual if there is one, and is written then. x [..., D] and weight [D], float32.
inline void norm_rows(const Tensor& any_x, const optional<Tensor>& any_residual,
                      const Tensor& any_weight, double eps, const Tensor& out,
                      const optional<Tensor>& total) {
  const Tensor x = any_x.contiguous(), weight = any_weight.contiguous();
  const optional<Tensor> residual =
      any_residual ? optional<Tensor>(any_residual->contiguous()) : std::nullopt;
  const int64_t dim = weight.size(0), rows = x.numel() / dim;
  TORCH_CHECK(out.is_contiguous() && out.sizes() == x.sizes() &&
                  (!residual || (residual->sizes() == x.sizes() && total->is_contiguous() &&
                                 total->sizes() == x.sizes())),
              "results of ", out.sizes());
  const float* of = weight.const_data_ptr<float>();
  at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x.const_data_ptr<float>() + row * dim;
      if (residual) {
        const float* other = residual->const_data_ptr<float>() + row * dim;
        float* both = total->data_ptr<float>() + row * dim;
        for (int64_t d = 0; d < dim; ++d) both[d] = from[d] + other[d];
        from = both;
      }
      float* to = out.data_ptr<float>() + row * dim;
      Floats squares = {};
      int64_t d = 0;
      for (; d + WIDTH <= dim; d += WIDTH) squares = fused(load(from + d), load(from + d), squares);
      float sum_of_squares = sum(squares);
      for (; d < dim; ++d) sum_of_squares = fused(from[d], from[d], sum_of_squares);
      const float factor = 1 / std::sqrt(sum_of_squares / dim + static_cast<float>(eps));
      for (d = 0; d < dim; ++d) to[d] = of[d] * (from[d] * factor);
    }
  });
}

inline Tensor rms_norm_to(const Tensor& x, const Tensor& weight, double eps, const Tensor& out) {
  norm_rows(x, std::nullopt, weight, eps, out, std::nullopt);
  return out;
}

inline Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return rms_norm_to(x, weight, eps, at::empty(x.sizes(), x.options()));
}

// The norm of x + residual, and that sum.
inline std::tuple<Tensor, Tensor> add_rms_norm_to(const Tensor& x, const Tensor& residual,
                                                  const Tensor& weight, double eps,
                                                  const Tensor& out, const Tensor& total) {
  norm_rows(x, residual, weight, eps, out, total);
  return {out, total};
}

inline std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                               const Tensor& weight, double eps) {
  return add_rms_norm_to(x, residual, weight, eps, at::empty(x.sizes(), x.options()),
                         at::empty(x.sizes(), x.options()));
}

// out = gate / (1 + e^-gate) * up; both [..., I], float32, of which rows may be parts of longer
// ones
inline Tensor gated_to(const Tensor& any_gate, const Tensor& any_up, const Tensor& out) {
  const int64_t width = out.size(-1), rows = width ? out.numel() / width : 0;
  auto rows_of = [&](const Tensor& x) {
    TORCH_CHECK(out.is_contiguous() && x.sizes() == out.sizes(), "results of ", out.sizes());
    const Tensor flat = x.reshape({rows, width});
    return flat.stride(1) == 1 ? flat : flat.contiguous();
  };
  const Tensor gate = rows_of(any_gate), up = rows_of(any_up);
  const int64_t grain = GRAIN / (width + 1) + 1;
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *of_gate = gate.const_data_ptr<float>() + row * gate.stride(0),
                  *of_up = up.const_data_ptr<float>() + row * up.stride(0);
      float* to = out.data_ptr<float>() + row * width;
      for (int64_t i = 0; i < width; i += WIDTH) {
        const int64_t count = std::min<int64_t>(WIDTH, width - i);
        float last[WIDTH] = {};  // what is left of a row, in a whole vector
        if (count < WIDTH) std::copy_n(of_gate + i, count, last);
        const Floats g = load(count < WIDTH ? last : of_gate + i);
        // e^-|g|, which cannot overflow
        const Floats e = exp2_of_negative((g < 0 ? g : -g) * LOG2_E);
        const Floats found = g * ((g < 0 ? e : Floats{} + 1) / (1 + e));
        for (int64_t at = 0; at < count; ++at) to[i + at] = found[at] * of_up[i + at];
      }
    }
  });
  return out;
}

inline Tensor gated(const Tensor& gate, const Tensor& up) {
  return gated_to(gate, up, at::empty(gate.sizes(), gate.options()));
}

// A token's heads are neighbours, as a model has them.
inline Tensor empty_rotated(const Tensor& x) {
  return at::empty({1, x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
}

// x [1, H, T, D], cos and sin [1, T, R], float32; out is as `empty_rotated`
inline void rotate_one(const Tensor& any_x, const Tensor& any_cos, const Tensor& any_sin,
                       bool interleaved, const Tensor& out) {
  const Tensor x = any_x.stride(3) == 1 ? any_x : any_x.contiguous();
  const Tensor cos = any_cos.contiguous(), sin = any_sin.contiguous();
  TORCH_CHECK(x.size(0) == 1 && cos.sizes() == sin.sizes() && cos.size(0) == 1 &&
                  cos.size(1) == x.size(2) && cos.size(2) <= x.size(3) &&
                  out.sizes() == x.sizes() && out.transpose(1, 2).is_contiguous(),
              "tables of ", cos.sizes(), " for ", x.sizes(), " to ", out.sizes());
  const int64_t heads = x.size(1), tokens = x.size(2), dim = x.size(3), half = cos.size(2) / 2;
  auto rotate_token = [&](int64_t t) {
    const float* c = cos.const_data_ptr<float>() + t * cos.stride(1);
    const float* s = sin.const_data_ptr<float>() + t * sin.stride(1);
    for (int64_t h = 0; h < heads; ++h) {
      const float* from = x.const_data_ptr<float>() + h * x.stride(1) + t * x.stride(2);
      float* to = out.data_ptr<float>() + (t * heads + h) * dim;
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
  const int64_t grain = GRAIN / (heads * dim + 1) + 1;  // a rank may have no heads
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) rotate_token(t);
  });
}

inline std::tuple<Tensor, Tensor> rotate_to(const Tensor& q, const Tensor& k, const Tensor& cos,
                                            const Tensor& sin, bool interleaved,
                                            const Tensor& q_out, const Tensor& k_out) {
  rotate_one(q, cos, sin, interleaved, q_out);
  rotate_one(k, cos, sin, interleaved, k_out);
  return {q_out, k_out};
}

inline std::tuple<Tensor, Tensor> rotate(const Tensor& q, const Tensor& k, const Tensor& cos,
                                         const Tensor& sin, bool interleaved) {
  return rotate_to(q, k, cos, sin, interleaved, empty_rotated(q), empty_rotated(k));
}

}  // namespace razor_dist
