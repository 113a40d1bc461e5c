// peak.inc for any CPU.
#include "peak.h"

#define LANES 4
#define FMA(a, b, c) ((a) * (b) + (c))

namespace quire::plain {
#include "vec.inc"
#include "peak.inc"
}
