#include "kernels/sm80/decode/kernel.cuh"

namespace flash_ext::sm80 {

template void run_decode<__half, 256>(const ForwardParams&, const DecodeGrid&, const DecodePartials&, bool,
                                      cudaStream_t);

}  // namespace flash_ext::sm80
