// A list of operations that is repeated: razor_dist.engine.tape says of which.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/custom_class.h>

#include <utility>
#include <vector>

namespace razor_dist {

using at::Tensor;

// Comes before whatever computes, and is torch's own for tests of such fallbacks as `note_call`.
constexpr auto NOTING = c10::DispatchKey::TESTING_ONLY_GenericMode;

class Tape : public torch::CustomClassHolder {
 public:
  // Note the calls of this thread from here on, which compute nothing; or no longer.
  void note(bool on) {
    current() = on ? this : nullptr;
    c10::impl::tls_set_dispatch_key_included(NOTING, on);
  }

  // Copy what the last call returns to these, but for those that are None.
  void copy_to(std::vector<std::optional<Tensor>> results) {
    calls_.back().results = std::move(results);
  }

  void run() {
    torch::jit::Stack stack;
    for (const Call& call : calls_) {
      stack.assign(call.arguments.begin(), call.arguments.end());
      call.operation.callBoxed(&stack);
      for (size_t i = 0; i < call.results.size(); ++i)
        if (call.results[i]) call.results[i]->copy_(stack[i].toTensor());
    }
  }

  static void note_call(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
    const auto first = stack->end() - operation.schema().arguments().size();
    current()->calls_.push_back({operation, {first, stack->end()}, {}});
    stack->erase(first, stack->end());
  }

 private:
  struct Call {
    c10::OperatorHandle operation;
    std::vector<c10::IValue> arguments;
    std::vector<std::optional<Tensor>> results;
  };

  static Tape*& current() {
    thread_local Tape* tape = nullptr;
    return tape;
  }

  std::vector<Call> calls_;
};

}  // namespace razor_dist
