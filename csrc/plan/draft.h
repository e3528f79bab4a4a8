// A plan under construction: each decision reads the problem and the decisions before it.
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

  /// Sets the variant of a kernel that has several.
  void take_variant(const char* name) {
    plan.variant = name;
    because("variant for ", name);
  }

  /// Adds a reason. The text is built only if the caller asked for reasons.
  template <class... Parts>
  void because(const Parts&... parts) {
    if (explain) plan.reasons.push_back(text(parts...));
  }
};

/// "1 split", "2 splits".
inline std::string counted(int64_t n, const char* what) { return text(n, " ", what, n == 1 ? "" : "s"); }

}  // namespace flash_ext::plan
