// From the values of the plan's enums to their names and back. The names stand beside the enums.
#pragma once

#include <stdexcept>
#include <string>

#include "plan.h"

namespace flash_ext::plan {

constexpr const auto& names_of(Operation) { return kOperationNames; }
constexpr const auto& names_of(Device) { return kDeviceNames; }
constexpr const auto& names_of(DType) { return kDTypeNames; }
constexpr const auto& names_of(MaskClass) { return kMaskClassNames; }

template <class Enum>
const char* name_of(Enum value) {
  for (const auto& [name, known] : names_of(value))
    if (known == value) return name;
  throw std::logic_error("a value without a name");
}

/// The value that a name stands for. Otherwise throws std::invalid_argument, which Python sees as ValueError, with the
/// field `what` and the allowed names.
template <class Enum>
Enum value_of(const std::string& what, const std::string& text) {
  std::string allowed;
  for (const auto& [name, value] : names_of(Enum{})) {
    if (text == name) return value;
    allowed += (allowed.empty() ? "" : ", ") + std::string(name);
  }
  throw std::invalid_argument(what + " must be one of " + allowed + ", got " + text);
}

}  // namespace flash_ext::plan
