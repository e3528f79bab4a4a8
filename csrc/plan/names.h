// The names of the plan's enums, for readers and for Python.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "plan.h"

namespace flash_ext::plan {

template <class Enum>
using Named = std::pair<const char*, Enum>;

constexpr Named<Operation> kOperationNames[] = {{"forward", Operation::kForward},
                                                {"backward", Operation::kBackward},
                                                {"weights", Operation::kWeights},
                                                {"weights_backward", Operation::kWeightsBackward},
                                                {"decode", Operation::kDecode}};
constexpr Named<Device> kDeviceNames[] = {{"cpu", Device::kCpu}, {"cuda", Device::kCuda}};
constexpr Named<DType> kDTypeNames[] = {{"float16", DType::kFloat16},
                                        {"bfloat16", DType::kBFloat16},
                                        {"float32", DType::kFloat32},
                                        {"float64", DType::kFloat64}};
constexpr Named<MaskClass> kMaskClassNames[] = {
    {"full", MaskClass::kFull}, {"causal", MaskClass::kCausal}, {"general", MaskClass::kGeneral}};

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
