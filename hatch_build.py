"""Build hook: compile the CPU quantisers when the package is built, and include notebooks and an example.

A machine without a compiler can then install the package. The compiler is zig's C front end, a wheel from the
package index: a dependency of the build, not of the run. clang's vector extensions keep the source plain C;
each build level is the same file for another instruction set. If compiling fails, the package is installed
without the quantisers, and warns at run time, in one line, that it is slow.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("ablate/numerics/kernels")
FLAGS = (
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
)  # no contraction: every rounding is specified


MACOS = "aarch64-macos.11.0"
"""Target of builds on Apple silicon: named, so that they run from macOS 11 on, whatever release they are
built on."""


def levels(machine: str, system: str) -> dict[str, tuple[str, ...]]:
    """Return the compiler's options of each build, by level.

    Each names its instructions: without -mcpu zig compiles for the processor of the machine that builds, and
    a processor that lacks one of them ends with SIGILL.

    Args:
        machine: processor, as `platform.machine` names it.
        system: operating system, as `platform.system` names it.
    """
    if machine.lower() in ("x86_64", "amd64"):
        return {"portable": ("-mcpu=x86_64",), **{f"x86_64_v{n}": (f"-mcpu=x86_64_v{n}",) for n in (3, 4)}}
    target = ("-target", MACOS) if (machine, system) == ("arm64", "Darwin") else ()
    return {"portable": (*target, "-mcpu=baseline")}


class Kernels(BuildHookInterface):
    """Hook that compiles all kernels, to nvfp4_<level>.so beside them."""

    PLUGIN_NAME = "kernels"

    def initialize(self, version, build_data):
        build_data["pure_python"], build_data["infer_tag"] = False, True
        if version != "editable":  # an editable package finds them beside itself
            build_data["force_include"]["analysis"] = "ablate/analysis"
            for example in ("mae.py", "mae_masking.yaml"):  # for `ablate init --images`
                build_data["force_include"][f"experiments/{example}"] = f"ablate/examples/{example}"
        folder = Path(self.root) / FOLDER
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
            for level, target in levels(platform.machine(), platform.system()).items():
                output = folder / f"nvfp4_{level}.so"
                command = [
                    sys.executable,
                    "-m",
                    "ziglang",
                    "cc",
                    *FLAGS,
                    *target,
                    "-o",
                    str(output),
                    *map(str, sorted(folder.glob("*.c"))),
                ]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    self.app.display_warning(
                        f"{output.name} could not be compiled, the slow reference will run:\n{done.stderr}"
                    )
