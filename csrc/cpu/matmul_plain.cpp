// matmul.inc for any CPU.
#include "matmul.h"

#define LANES 4
#define FMA(a, b, c) ((a) * (b) + (c))

namespace quire::plain {
#include "vec.inc"
#include "panels.inc"
#include "matmul.inc"
}
