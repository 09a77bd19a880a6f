// The operations of prompts and answers on CPU; razor_dist.kernels.compiled compiles them.

#if defined(__clang__) || __GNUC__ < 12
#error "GCC 12 or newer is needed: for its OpenMP, which is torch's, and __builtin_shufflevector"
#endif

#include <torch/library.h>

#include "attention.h"
#include "layers.h"
#include "many.h"

TORCH_LIBRARY(razor_dist_cpu, library) {
  library.def(
      "store(Tensor k, Tensor v, Tensor order, Tensor(a!)[] pages, Tensor(b!)[] windows, int "
      "sinks, int entries) -> ()",
      razor_dist::store);
  library.def(
      "attend(Tensor q, Tensor order, Tensor?[] pages, int page_size, Tensor?[] windows, int "
      "sinks, int entries, bool compensation, int width, Tensor(a!) out, float scale, "
      "Tensor? slopes, Tensor(b!)? packed) -> ()",
      razor_dist::attend);
  library.def(
      "attend_many(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor? first, "
      "bool causal, float scale) -> (Tensor, Tensor)",
      razor_dist::attend_many);
  library.def("linear(Tensor x, Tensor w, Tensor? bias) -> Tensor", razor_dist::linear);
  library.def("linear_int8(Tensor x, Tensor w, Tensor scales, Tensor? bias, float most) -> Tensor",
              razor_dist::linear_int8);
  library.def("round_rows(Tensor x, float most, float zero) -> (Tensor, Tensor)",
              razor_dist::round_rows);
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", razor_dist::rms_norm);
  library.def(
      "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
      razor_dist::rotate);
}
