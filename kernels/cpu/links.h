// Small collectives of ranks of one host: razor_dist.parallel.shared_memory says what its segment
// holds, and in which order it is written. Short steps make two or three in a layer, so that their
// fixed cost matters most.
#pragma once

#include <ATen/core/Tensor.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <limits>

namespace razor_dist {

using at::Tensor;

// Results of `meet`: no place for this rank's part was free; all is done; other parts are missing.
enum Met : int64_t { NO_PLACE = 0, DONE = 1, WAITING = 2 };

// A counter of every rank, each in a cache line of its own; or one alone.
struct Counters {
  int64_t* data;
  int64_t stride, size;

  explicit Counters(const Tensor& of)
      : data(of.data_ptr<int64_t>()), stride(of.stride(0)), size(of.size(0)) {}
  int64_t* at(int64_t rank) const { return data + rank * stride; }
  int64_t get(int64_t rank) const { return __atomic_load_n(at(rank), __ATOMIC_SEQ_CST); }
  // Nothing that follows is read before this is written: of two ranks that are last at once, one
  // at least sees the other.
  void set(int64_t rank, int64_t value) const {
    __atomic_store_n(at(rank), value, __ATOMIC_SEQ_CST);
  }
  int64_t least() const {
    int64_t found = std::numeric_limits<int64_t>::max();
    for (int64_t rank = 0; rank < size; ++rank) found = std::min(found, get(rank));
    return found;
  }
};

// The counter's lower half, which futexes are; it is written as a whole.
inline long futex(const Counters& counter, int operation, uint32_t value, const timespec* time) {
  return syscall(SYS_futex, counter.data, operation, value, time, nullptr, 0);
}

// Note that a rank's part of a number is on its board; if all parts are, wake the ranks that wait.
inline bool post(const Tensor& of_posted, const Tensor& of_complete, int64_t rank, int64_t number) {
  const Counters posted(of_posted), complete(of_complete);
  posted.set(rank, number + 1);
  if (posted.least() <= number) return false;
  if (complete.get(0) <= number) {
    complete.set(0, number + 1);
    futex(complete, FUTEX_WAKE, std::numeric_limits<int32_t>::max(), nullptr);
  }
  return true;
}

// How often a rank yields before it sleeps for the first time. With more ranks than cores that is
// cheaper than sleeping, since the rank that it waits for probably runs next.
constexpr int YIELDS = 50;
// Nanoseconds of a yield after which another program must have run, which computes without end: it
// keeps the core for a scheduler's whole slice, where a rank that sleeps gets it back when it is
// woken. Ranks then sleep at once in this many collectives, some dozen tokens.
constexpr int64_t SLICE = 1'000'000;
constexpr int SLEEPS = 1000;

inline int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

// Yield until a number is complete, at most so often; return early if a yield takes a slice.
inline void yield_until(const Counters& complete, int64_t number, int yields) {
  thread_local int sleeps = 0;
  if (yields && sleeps) {
    --sleeps;
    return;
  }
  for (; yields && complete.get(0) <= number; --yields) {
    const int64_t began = nanoseconds();
    sched_yield();
    if (nanoseconds() - began < SLICE) continue;
    sleeps = SLEEPS;
    return;
  }
}

// Wait until all ranks' parts of a number are on their boards, for at most ``seconds``.
inline bool wait_for(const Counters& posted, const Counters& complete, int64_t number, int yields,
                     double seconds) {
  yield_until(complete, number, yields);
  const int64_t seen = complete.get(0);
  if (seen <= number) {
    const timespec time{static_cast<time_t>(seconds),
                        static_cast<long>(seconds * 1e9) % 1000000000};
    futex(complete, FUTEX_WAIT, static_cast<uint32_t>(seen), &time);
  }
  return complete.get(0) > number || posted.least() > number;
}

// Every rank's `mine`: added up in the order of ranks (`add`, float32), so that all get the same
// bits, or side by side, to `out`. boards: uint8 [P, places, bytes]. With `seconds` passed before
// all parts are there the rest is still to be had, by a call that does not `begin`.
inline int64_t meet(const Tensor& mine, const Tensor& out, const Tensor& boards,
                    const Tensor& of_posted, const Tensor& of_read, const Tensor& of_complete,
                    int64_t rank, bool add, bool begin, double seconds) {
  const int64_t ranks = boards.size(0), places = boards.size(1), room = boards.size(2),
                bytes = mine.nbytes();
  TORCH_CHECK(mine.is_contiguous() && out.is_contiguous() && bytes <= room &&
                  out.nbytes() == static_cast<size_t>(add ? bytes : ranks * bytes) &&
                  (!add || (mine.scalar_type() == at::kFloat && out.scalar_type() == at::kFloat)),
              "parts of ", mine.sizes(), " to ", out.sizes());
  const Counters posted(of_posted), read(of_read), complete(of_complete);
  const int64_t number = posted.get(rank) - !begin;
  auto part = [&](int64_t of) {
    return boards.data_ptr<uint8_t>() + (of * places + number % places) * room;
  };
  bool all = false;
  if (begin) {
    if (number - read.least() >= places) return NO_PLACE;
    std::memcpy(part(rank), mine.const_data_ptr(), bytes);
    all = post(of_posted, of_complete, rank, number);
  }
  if (!all && !wait_for(posted, complete, number, begin ? YIELDS : 0, seconds)) return WAITING;
  if (add) {
    float* const to = out.data_ptr<float>();
    std::memcpy(to, part(0), bytes);
    for (int64_t of = 1; of < ranks; ++of) {
      const float* from = reinterpret_cast<const float*>(part(of));
      for (int64_t i = 0; i < out.numel(); ++i) to[i] += from[i];
    }
  } else {
    for (int64_t of = 0; of < ranks; ++of)
      std::memcpy(static_cast<uint8_t*>(out.data_ptr()) + of * bytes, part(of), bytes);
  }
  read.set(rank, number + 1);
  return DONE;
}

}  // namespace razor_dist
