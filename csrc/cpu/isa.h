// Which instructions the kernels use. Each kernel's entry picks its variant by isa(), at every call.
#pragma once

namespace quire {

enum Isa {
    PLAIN,
    AVX2,       // with FMA and F16C
    AVX512,     // with BW, VL, DQ and VNNI
    AMX,        // with int8 and bfloat16; and AVX512_BF16
};

Isa isa();

// The variant of a kernel that has no other than these.
#if defined(__x86_64__)
#define PICK(name) (isa() >= AVX512 ? avx512::name : isa() == AVX2 ? avx2::name : plain::name)
#else
#define PICK(name) plain::name
#endif

}  // namespace quire
