// Which instructions the kernels use. Each kernel's entry picks its variant by isa(), at every call.
#pragma once

namespace quire {

enum Isa { PLAIN, AVX2 };   // AVX2: with FMA and F16C

Isa isa();

}  // namespace quire
