"""Which instruction sets the native kernels can use on this CPU. `make quick` tests the best, `make test` all."""

import ctypes

import pytest

import native

NAMES = ("plain", "avx2", "avx512", "amx")  # by level, as kernels.h numbers them


def _levels() -> list[int]:
    set_isa = ctypes.CDLL(str(native.library())).set_isa_cpu
    levels = [level for level in range(len(NAMES)) if set_isa(ctypes.c_int64(level)) == 0]
    set_isa(ctypes.c_int64(levels[-1]))
    return levels


LEVELS = _levels()
BEST = LEVELS[-1]
PARAMS = [pytest.param(level, id=NAMES[level], marks=() if level == BEST else pytest.mark.slow) for level in LEVELS]
