// A plan in the making: each decision reads the problem and what was decided before it.
#pragma once

#include <string>

#include "kernel_table.h"
#include "plan.h"
#include "text.h"

namespace flash_ext::plan {

struct Draft {
  const Problem& p;
  const KernelRow& kernel;
  const bool explain;
  Plan plan;

  /// Of a kernel that has several.
  void take_variant(const char* name) {
    plan.variant = name;
    because("variant for ", name);
  }

  /// Notes a reason. It is put into words only where somebody will read it.
  template <class... Parts>
  void because(const Parts&... parts) {
    if (explain) plan.reasons.push_back(text(parts...));
  }
};

/// "1 split", "2 splits".
inline std::string counted(int64_t n, const char* what) { return text(n, " ", what, n == 1 ? "" : "s"); }

}  // namespace flash_ext::plan
