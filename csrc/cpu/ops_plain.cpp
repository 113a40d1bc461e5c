// ops.inc for any CPU.
#include "ops.h"

#define LANES 4
#define FMA(a, b, c) ((a) * (b) + (c))

namespace quire::plain {
#include "vec.inc"
#include "ops.inc"
}
