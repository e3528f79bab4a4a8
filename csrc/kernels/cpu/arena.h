// Scratch memory that is cut into arrays. The same code that takes the arrays from a null base measures how much they
// need, so size and layout cannot disagree.
#pragma once

#include "simd.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    constexpr int64_t kAlignment = 64;
    const int64_t offset = size_;
    size_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(base_ + offset);
  }

  int64_t size() const { return size_; }

 private:
  char* base_;
  int64_t size_ = 0;
};

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
