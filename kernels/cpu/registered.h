// How operations are registered.
#pragma once

#if defined(__clang__) || __GNUC__ < 12
#error "GCC 12 or newer is needed: for its OpenMP, which is torch's, and __builtin_shufflevector"
#endif

#include <torch/library.h>

namespace razor_dist {

// As an operation of the CPU, not one that is made of others.
template <class Function>
auto on_cpu(Function* function) {
  return torch::dispatch(c10::DispatchKey::CPU, function);
}

}  // namespace razor_dist
