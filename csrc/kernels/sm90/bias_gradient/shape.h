// The head dims that the gradient of the bias is instantiated for; the plan reads them too.
#pragma once

namespace flash_ext::sm90 {

constexpr int kMaxBiasHeadDim = 128;  // beyond it registers do not hold the addresses of so many slabs

}  // namespace flash_ext::sm90
