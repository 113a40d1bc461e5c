"""The CUDA kernels compiled for the emulator (csrc/emu/cuda_emu.h), and faulty ones of a test's own."""

import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu
import native

FLAGS = ("-x", "c++", "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
         "-fPIC")
WATCHED = ("-fsanitize=address,alignment", "-fno-sanitize-recover=all", "-g1")
# `make sanitize` sets this, and preloads the sanitizer's library.
SANITIZE = WATCHED if os.environ.get("EMULATOR_SANITIZE") else ()
COMPILER = os.environ.get("CXX", "c++")


def load() -> gpu.Cuda:
    """The operations on CPU tensors; compiled first if these sources never were."""
    folder = gpu.build_folder("sanitized" if SANITIZE else "emulator")
    library = ctypes.CDLL(str(native.built(folder, gpu.NAME, compile_into, lambda: None)))
    library.emu_error.restype = ctypes.c_char_p
    ops = gpu.Cuda(library, "cpu")
    ops.set_order, ops.set_block_bytes = library.emu_set_order, library.emu_set_block_bytes
    return ops


def compile_into(folder: Path) -> None:
    def compile_one(source: Path) -> str:
        object = folder / f"{source.stem}.o"
        run(COMPILER, *FLAGS, *SANITIZE, "-c", str(source), "-o", str(object))
        return str(object)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sorted(gpu.SOURCES.glob("*.cu"))))
    run(COMPILER, "-shared", *SANITIZE, *objects, "-o", str(folder / f"{gpu.NAME}.so"))


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)


def run_program(folder: Path, text: str, *flags: str) -> subprocess.CompletedProcess:
    """What a .cu file with a main function of its own says."""
    source, program = folder / "program.cu", folder / "program"
    source.write_text(text, "utf-8")
    run(COMPILER, *FLAGS, *flags, f"-I{gpu.SOURCES}", str(source), "-o", str(program))
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run([str(program)], capture_output=True, text=True, env=environment)
