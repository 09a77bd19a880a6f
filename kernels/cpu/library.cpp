// The operations of prompts and answers on CPU; razor_dist.kernels.compiled compiles them.

#if defined(__clang__) || __GNUC__ < 12
#error "GCC 12 or newer is needed: for its OpenMP, which is torch's, and __builtin_shufflevector"
#endif

#include <torch/library.h>

#include "attention.h"
#include "chosen.h"
#include "layers.h"
#include "many.h"
#include "tape.h"
#ifdef __linux__
#include "links.h"
#endif

namespace {

// As an operation of the CPU, not one that is made of others.
template <class Function>
auto on_cpu(Function* function) {
  return torch::dispatch(c10::DispatchKey::CPU, function);
}

}  // namespace

TORCH_LIBRARY(razor_dist_cpu, library) {
  using namespace razor_dist;
  library.def(
      "store(Tensor k, Tensor v, Tensor order, Tensor(a!)[] pages, Tensor(b!)[] windows, int "
      "sinks) -> ()",
      on_cpu(store));
  library.def(
      "attend(Tensor q, Tensor order, Tensor?[] pages, int page_size, Tensor?[] windows, int "
      "sinks, bool compensation, int width, Tensor(a!) out, float scale, "
      "Tensor? slopes, Tensor(b!)? packed, Tensor? places) -> ()",
      on_cpu(attend));
  library.def("merge_ranks(Tensor gathered, Tensor order, Tensor(a!) out, Tensor? places) -> ()",
              on_cpu(merge_ranks));
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
#ifdef __linux__
  library.def("post(Tensor(a!) posted, Tensor(b!) complete, int rank, int number) -> bool",
              on_cpu(post));
  library.def(
      "meet(Tensor mine, Tensor(a!) out, Tensor(b!) boards, Tensor(c!) posted, Tensor(d!) read, "
      "Tensor(e!) complete, int rank, bool add, bool begin, float seconds) -> int",
      on_cpu(meet));
#endif
  library.class_<Tape>("Tape")
      .def(torch::init<>())
      .def("note", &Tape::note)
      .def("copy_to", &Tape::copy_to)
      .def("run", &Tape::run);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&razor_dist::Tape::note_call>());
}
