// What g++ needs of a header that comes with nvcc alone.
#pragma once
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __specialization_static static
#define __inline_hint__
#define __annotate__(a)
#define __location__(a)
#define __no_return__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
