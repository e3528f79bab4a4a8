// What every file of operators needs. An operator is one function for all devices: it prepares its call, runs the
// kernels on its tensors' device (kernels.h) and returns what they wrote.
#pragma once

#include <torch/csrc/stable/library.h>

#include "device_scope.h"
#include "kernels.h"
#include "tensors.h"

/// Registers operators for the library's device, in the braces that follow. The build defines the dispatch key, CPU or
/// CUDA, and compiles the file once for each library.
#define FLASH_EXT_OPERATORS(m) STABLE_TORCH_LIBRARY_IMPL(flash_ext, FLASH_EXT_DISPATCH_KEY, m)
