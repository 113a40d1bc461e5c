"""What the CUDA kernels take of a multiprocessor: a table from what ptxas said of them (`make cuda-check`).

    registers.py build/cuda/sm_90/attention.log ...
"""

import re
import subprocess
import sys
from pathlib import Path

KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
                    re.DOTALL)


def plain(names: list[str]) -> list[str]:
    """Names without namespaces and parameters; as they are where there is no c++filt."""
    try:
        lines = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return names
    return [re.sub(r"^void |\(anonymous namespace\)::|quire::", "", line).partition("(")[0] for line in lines]


def main(paths: list[str]) -> None:
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        kernels = KERNEL.findall(Path(path).read_text("utf-8"))
        for name, (_, architecture, spilled, registers) in zip(plain([kernel[0] for kernel in kernels]), kernels):
            cell = registers if spilled == "0" else f"{registers} (spills {spilled} bytes)"
            found.setdefault(f"{Path(path).stem}: {name}", {})[architecture] = cell
    architectures = list(dict.fromkeys(name for row in found.values() for name in row))
    print(f"{'registers a thread':<34}" + "".join(f"{name:<26}" for name in architectures))
    for name, row in sorted(found.items()):
        print(f"{name:<34}" + "".join(f"{row.get(architecture, ''):<26}" for architecture in architectures).rstrip())


if __name__ == "__main__":
    main(sys.argv[1:])
