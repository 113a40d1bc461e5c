// attention.inc for any CPU.
#include "attention.h"

#define LANES 4
#define FMA(a, b, c) ((a) * (b) + (c))

namespace quire::plain {
#include "vec.inc"
#include "attention.inc"
}
