// Memory for the duration of a call, and parallel loops whose bodies get scratch memory without throwing: an exception
// must not cross the threads of a ParallelFor.
#pragma once

#include <atomic>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <new>

#include "attention.h"

namespace flash_ext::cpu {

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, FreeDeleter>;

/// Null where there is no memory.
inline Buffer try_allocate(int64_t bytes) {
  constexpr size_t kAlignment = 64;
  const size_t size = (static_cast<size_t>(bytes) + kAlignment) / kAlignment * kAlignment;
  return Buffer(std::aligned_alloc(kAlignment, size));
}

/// An array of the given sizes; the last one is in bytes. Throws std::bad_alloc, also where the product overflows.
inline Buffer allocate(std::initializer_list<int64_t> sizes) {
  int64_t bytes = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) throw std::bad_alloc();
  }
  Buffer buffer = try_allocate(bytes);
  if (buffer == nullptr) throw std::bad_alloc();
  return buffer;
}

/// Scratch of the calling thread, null when there is no memory. A small one is kept for the next call, because fresh
/// pages cost more than a small problem takes.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    constexpr int64_t kKeptBytes = int64_t{4} << 20;
    thread_local Buffer kept = try_allocate(kKeptBytes);
    if (bytes > kKeptBytes) own_ = try_allocate(bytes);
    data_ = bytes > kKeptBytes ? own_.get() : kept.get();
  }

  void* data() const { return data_; }

 private:
  Buffer own_;
  void* data_;
};

/// Calls body(begin, end, scratch) on parts of [0, count). Throws std::bad_alloc where a thread found no memory.
template <class Body>
void for_range_with_scratch(int64_t count, int64_t grain, int64_t scratch_bytes, ParallelFor parallel_for,
                            const Body& body) {
  std::atomic<bool> out_of_memory{false};
  parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    const Scratch scratch(scratch_bytes);
    if (scratch.data() == nullptr) {
      out_of_memory = true;
    } else {
      body(begin, end, scratch.data());
    }
  });
  if (out_of_memory) throw std::bad_alloc();
}

}  // namespace flash_ext::cpu
