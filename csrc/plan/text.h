// Builds messages from words and numbers, without streams. A compiler that links its C++ runtime statically makes
// libraries with locales of their own, and a stream that meets another library's locale crashes.
#pragma once

#include <cstdio>
#include <string>
#include <type_traits>

namespace flash_ext {

inline void append_text(std::string& out, const std::string& words) { out += words; }
inline void append_text(std::string& out, const char* words) { out += words; }

/// Formats numbers as a stream would.
template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
void append_text(std::string& out, Number number) {
  if constexpr (std::is_floating_point_v<Number>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(number));
    out += digits;
  } else {
    out += std::to_string(number);
  }
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::string out;
  (append_text(out, parts), ...);
  return out;
}

}  // namespace flash_ext
