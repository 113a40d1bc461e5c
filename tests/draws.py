"""Draws of which nobody waits for anything: started, and judged at once."""

import kernels
import sampling


def accept(logits_LV, drafts, samplers, positions, method="coupled", ops=kernels):
    """What sampling.accept makes of rows that are there already."""
    return sampling.accept(sampling.start_draw(logits_LV, drafts, samplers, positions, ops), method, ops)
