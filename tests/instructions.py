"""Which instruction sets the native kernels can be tested with here: those of this CPU, and AMX in an emulator
(csrc/emu/x86_emu.h), which few rows and caches of other types than bfloat16 leave to AVX-512. `make quick` tests the
CPU's best, `make test` all.

With EMULATE_AMX in the environment, as test_amx.py sets it, everything in the process computes in the emulator.
"""

import ctypes
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import pytest

import native
from emulator import COMPILER, run

NAMES = ("plain", "avx2", "avx512", "amx")  # by level, as kernels.h numbers them
PLAIN, AVX2, _, AMX = range(4)
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-psabi",
         "-Wno-maybe-uninitialized", "-fPIC", "-pthread", "-DEMULATED")


def emulated_library() -> Path:
    """The kernels compiled for the emulator; compiled first if these sources never were."""
    key = blake2b(repr(FLAGS).encode(), digest_size=8)
    for path in [*native.source_files(), native.SOURCES / "emu/x86_emu.h"]:
        key.update(path.read_bytes())
    folder = native.build_root() / f"amx-emulator-{key.hexdigest()}"
    return native.built(folder, "quire_emulated", compile_into, lambda: None)


def compile_into(folder: Path) -> None:
    def compile_one(source: Path) -> str:
        object = folder / f"{source.stem}.o"
        run(COMPILER, *FLAGS, "-c", str(source), "-o", str(object))
        return str(object)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sorted((native.SOURCES / "cpu").glob("*.cpp"))))
    run(COMPILER, "-shared", "-pthread", *objects, "-o", str(folder / "quire_emulated.so"))


def _levels() -> list[int]:
    if os.environ.get("EMULATE_AMX"):  # a library that is loaded later finds these functions before its own
        ctypes.CDLL(str(emulated_library()), ctypes.RTLD_GLOBAL)
    set_isa = ctypes.CDLL(str(native.library())).set_isa_cpu
    levels = [level for level in range(len(NAMES)) if set_isa(ctypes.c_int64(level)) == 0]
    set_isa(ctypes.c_int64(levels[-1]))
    return levels


LEVELS = _levels()
BEST = LEVELS[-1]
EMULATED = AVX2 <= BEST < AMX and platform.system() == "Linux"
PARAMS = [pytest.param(level, id=NAMES[level], marks=() if level == BEST else pytest.mark.slow) for level in LEVELS]
if EMULATED:
    PARAMS.append(pytest.param(AMX, id="amx-emulated", marks=pytest.mark.slow))


class Library:
    """The kernels' C functions. `set_isa_cpu` with AMX turns to the emulator's where this CPU lacks it."""

    def __init__(self, declare=lambda library: None):
        self.declare, self.libraries = declare, {}
        self.current = self.open(native.library)

    def open(self, path) -> ctypes.CDLL:
        if path not in self.libraries:
            self.libraries[path] = ctypes.CDLL(str(path()))
            self.libraries[path].set_isa_cpu.argtypes = (ctypes.c_int64,)
            self.declare(self.libraries[path])
        return self.libraries[path]

    def set_isa_cpu(self, level) -> int:
        level = getattr(level, "value", level)
        self.current = self.open(emulated_library if EMULATED and level == AMX else native.library)
        return self.current.set_isa_cpu(level)

    def __getattr__(self, name):
        return getattr(self.current, name)
