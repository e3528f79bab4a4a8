// Macros for functions that host and device code share.
//
// On the host they have internal linkage: the CPU kernels are compiled once per instruction set, and a merged copy of
// an inline function might hold instructions that the machine lacks.
#pragma once

#if defined(__CUDACC__)
#define FLASH_EXT_HOST_DEVICE __host__ __device__ __forceinline__
#define FLASH_EXT_HOST_DEVICE_MEMBER FLASH_EXT_HOST_DEVICE
#else
#define FLASH_EXT_HOST_DEVICE static inline
#define FLASH_EXT_HOST_DEVICE_MEMBER  // of a class that the CPU kernels do not use
#endif
