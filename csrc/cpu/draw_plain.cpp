// draw.inc for any CPU.
#include "draw.h"

#define LANES 2

namespace quire::plain {
#include "draw.inc"
}
