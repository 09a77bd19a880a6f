// Operations of layers and of prompts on CPU, compiled beside those of answers.cpp.

#include "chosen.h"
#include "layers.h"
#include "many.h"
#include "registered.h"

TORCH_LIBRARY_FRAGMENT(razor_dist_cpu, library) {
  using namespace razor_dist;
  library.def(
      "attend_many(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor? first, "
      "bool causal, float scale) -> (Tensor, Tensor)",
      on_cpu(attend_many));
  library.def(
      "block_largest(Tensor q, Tensor k, Tensor? k_scale, Tensor slow, Tensor edges, Tensor "
      "recent) "
      "-> Tensor",
      on_cpu(block_largest));
  library.def(
      "attend_chosen(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor "
      "chosen, "
      "Tensor edges, Tensor places, Tensor at, float scale) -> (Tensor, Tensor)",
      on_cpu(attend_chosen));
  library.def("merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
              on_cpu(merge));
  library.def("linear(Tensor x, Tensor w, Tensor? bias) -> Tensor", on_cpu(linear));
  library.def("linear.out(Tensor x, Tensor w, Tensor? bias, *, Tensor(a!) out) -> Tensor(a!)",
              on_cpu(linear_to));
  library.def("linear_int8(Tensor x, Tensor w, Tensor scales, Tensor? bias, float most) -> Tensor",
              on_cpu(linear_int8));
  library.def(
      "linear_int8.out(Tensor x, Tensor w, Tensor scales, Tensor? bias, float most, *, Tensor(a!) "
      "out) -> Tensor(a!)",
      on_cpu(linear_int8_to));
  library.def("round_rows(Tensor x, float most, float zero) -> (Tensor, Tensor)",
              on_cpu(round_rows));
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", on_cpu(rms_norm));
  library.def("rms_norm.out(Tensor x, Tensor weight, float eps, *, Tensor(a!) out) -> Tensor(a!)",
              on_cpu(rms_norm_to));
  library.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
      on_cpu(add_rms_norm));
  library.def(
      "add_rms_norm.out(Tensor x, Tensor residual, Tensor weight, float eps, *, Tensor(a!) out0, "
      "Tensor(b!) out1) -> (Tensor(a!), Tensor(b!))",
      on_cpu(add_rms_norm_to));
  library.def("gated(Tensor gate, Tensor up) -> Tensor", on_cpu(gated));
  library.def("gated.out(Tensor gate, Tensor up, *, Tensor(a!) out) -> Tensor(a!)",
              on_cpu(gated_to));
  library.def(
      "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
      on_cpu(rotate));
  library.def(
      "rotate.out(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, *, "
      "Tensor(a!) out0, Tensor(b!) out1) -> (Tensor(a!), Tensor(b!))",
      on_cpu(rotate_to));
}
