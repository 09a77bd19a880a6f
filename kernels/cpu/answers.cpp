// Operations of answers and between ranks on CPU; layers_and_prompts.cpp has the others.

#include "attention.h"
#include "registered.h"
#include "tape.h"
#ifdef __linux__
#include "links.h"
#endif

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
