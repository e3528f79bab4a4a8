"""Sources and flags of the three libraries; the machinery is in build_support/, the metadata in pyproject.toml."""

import platform

from setuptools import Extension, setup

from build_support.build_command import BuildLibraries, TorchLibrary

PLAN = ["csrc/plan/plan.cpp"]

CPU = [
    "csrc/api/attention_args.cpp",
    "csrc/api/backward.cpp",
    "csrc/api/checks.cpp",
    "csrc/api/cpu.cpp",
    "csrc/api/cpu_device.cpp",
    "csrc/api/decode.cpp",
    "csrc/api/dropout.cpp",
    "csrc/api/forward.cpp",
    "csrc/api/merge.cpp",
    "csrc/api/ops.cpp",
    "csrc/api/score_options.cpp",
    "csrc/api/value_checks.cpp",
    "csrc/api/weights.cpp",
    "csrc/kernels/cpu/append.cpp",
    "csrc/kernels/cpu/attention.cpp",
    "csrc/kernels/cpu/dropout_mask.cpp",
    "csrc/kernels/cpu/isa_baseline.cpp",
    "csrc/kernels/cpu/merge.cpp",
    *PLAN,
]
# A false alarm of GCC 12 in its own avx512fintrin.h; Clang does not know the warning.
AVX512_WARNING_FLAGS = ["-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
# The same kernels once more per instruction set; the library picks one when it runs. The flags come behind the
# -march=x86-64 that every source gets.
X86_ISA_FLAGS = {
    "csrc/kernels/cpu/isa_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "csrc/kernels/cpu/isa_avx512.cpp": [*AVX512_FLAGS, *AVX512_WARNING_FLAGS],
}
ISA_FLAGS = X86_ISA_FLAGS if platform.machine() in ("x86_64", "AMD64") else {}

CUDA = [
    "csrc/api/attention_args.cpp",
    "csrc/api/backward.cpp",
    "csrc/api/checks.cpp",
    "csrc/api/cuda.cpp",
    "csrc/api/cuda_attention.cpp",
    "csrc/api/cuda_decode.cpp",
    "csrc/api/cuda_device.cpp",
    "csrc/api/cuda_weights.cpp",
    "csrc/api/decode.cpp",
    "csrc/api/dropout.cpp",
    "csrc/api/forward.cpp",
    "csrc/api/merge.cpp",
    "csrc/api/score_options.cpp",
    "csrc/api/value_checks.cpp",
    "csrc/api/weights.cpp",
    "csrc/kernels/sm80/inst/append.cu",
    "csrc/kernels/sm80/inst/backward.cu",
    "csrc/kernels/sm80/inst/backward_bf16_64.cu",
    "csrc/kernels/sm80/inst/backward_bf16_128.cu",
    "csrc/kernels/sm80/inst/backward_bf16_256.cu",
    "csrc/kernels/sm80/inst/backward_f16_64.cu",
    "csrc/kernels/sm80/inst/backward_f16_128.cu",
    "csrc/kernels/sm80/inst/backward_f16_256.cu",
    "csrc/kernels/sm80/inst/backward_f32_64.cu",
    "csrc/kernels/sm80/inst/backward_f32_128.cu",
    "csrc/kernels/sm80/inst/backward_f32_256.cu",
    "csrc/kernels/sm80/inst/backward_tf32_64.cu",
    "csrc/kernels/sm80/inst/backward_tf32_128.cu",
    "csrc/kernels/sm80/inst/backward_tf32_256.cu",
    "csrc/kernels/sm80/inst/bias_gradient.cu",
    "csrc/kernels/sm80/inst/bias_gradient_bf16.cu",
    "csrc/kernels/sm80/inst/bias_gradient_f16.cu",
    "csrc/kernels/sm80/inst/bias_gradient_f32.cu",
    "csrc/kernels/sm80/inst/clear.cu",
    "csrc/kernels/sm80/inst/decode.cu",
    "csrc/kernels/sm80/inst/decode_bf16_64.cu",
    "csrc/kernels/sm80/inst/decode_bf16_128.cu",
    "csrc/kernels/sm80/inst/decode_bf16_256.cu",
    "csrc/kernels/sm80/inst/decode_f16_64.cu",
    "csrc/kernels/sm80/inst/decode_f16_128.cu",
    "csrc/kernels/sm80/inst/decode_f16_256.cu",
    "csrc/kernels/sm80/inst/decode_f32_64.cu",
    "csrc/kernels/sm80/inst/decode_f32_128.cu",
    "csrc/kernels/sm80/inst/decode_f32_256.cu",
    "csrc/kernels/sm80/inst/dropout_mask.cu",
    "csrc/kernels/sm80/inst/forward.cu",
    "csrc/kernels/sm80/inst/forward_bf16_64.cu",
    "csrc/kernels/sm80/inst/forward_bf16_128.cu",
    "csrc/kernels/sm80/inst/forward_bf16_256.cu",
    "csrc/kernels/sm80/inst/forward_f16_64.cu",
    "csrc/kernels/sm80/inst/forward_f16_128.cu",
    "csrc/kernels/sm80/inst/forward_f16_256.cu",
    "csrc/kernels/sm80/inst/forward_f32_64.cu",
    "csrc/kernels/sm80/inst/forward_f32_128.cu",
    "csrc/kernels/sm80/inst/forward_f32_256.cu",
    "csrc/kernels/sm80/inst/forward_tf32_64.cu",
    "csrc/kernels/sm80/inst/forward_tf32_128.cu",
    "csrc/kernels/sm80/inst/forward_tf32_256.cu",
    "csrc/kernels/sm80/inst/merge.cu",
    "csrc/kernels/sm80/inst/weights.cu",
    "csrc/kernels/sm80/inst/weights_bf16.cu",
    "csrc/kernels/sm80/inst/weights_f16.cu",
    "csrc/kernels/sm80/inst/weights_f32.cu",
    "csrc/kernels/sm90/inst/backward.cu",
    "csrc/kernels/sm90/inst/backward_bf16_64.cu",
    "csrc/kernels/sm90/inst/backward_bf16_128.cu",
    "csrc/kernels/sm90/inst/backward_f16_64.cu",
    "csrc/kernels/sm90/inst/backward_f16_128.cu",
    "csrc/kernels/sm90/inst/bias_gradient.cu",
    "csrc/kernels/sm90/inst/bias_gradient_bf16_64.cu",
    "csrc/kernels/sm90/inst/bias_gradient_bf16_128.cu",
    "csrc/kernels/sm90/inst/bias_gradient_f16_64.cu",
    "csrc/kernels/sm90/inst/bias_gradient_f16_128.cu",
    "csrc/kernels/sm90/inst/forward.cu",
    "csrc/kernels/sm90/inst/forward_bf16_64.cu",
    "csrc/kernels/sm90/inst/forward_bf16_96.cu",
    "csrc/kernels/sm90/inst/forward_bf16_128.cu",
    "csrc/kernels/sm90/inst/forward_bf16_192.cu",
    "csrc/kernels/sm90/inst/forward_bf16_192_128.cu",
    "csrc/kernels/sm90/inst/forward_bf16_256.cu",
    "csrc/kernels/sm90/inst/forward_f16_64.cu",
    "csrc/kernels/sm90/inst/forward_f16_96.cu",
    "csrc/kernels/sm90/inst/forward_f16_128.cu",
    "csrc/kernels/sm90/inst/forward_f16_192.cu",
    "csrc/kernels/sm90/inst/forward_f16_192_128.cu",
    "csrc/kernels/sm90/inst/forward_f16_256.cu",
    *PLAN,
]

setup(
    ext_modules=[
        # What takes longest comes first: at the end, no core waits long for another.
        TorchLibrary("flash_ext.lib.libflash_ext_cuda", CUDA, cuda=True),
        TorchLibrary("flash_ext.lib.libflash_ext_cpu", [*ISA_FLAGS, *CPU], source_flags=ISA_FLAGS),
        Extension("flash_ext._plan", [*PLAN, "csrc/plan/bindings.cpp"]),
    ],
    cmdclass={"build_ext": BuildLibraries},
)
