"""A GPU that is emulated below the driver's interface: the server and `spec-build` find a `libcuda.so.1` that runs the
kernels of one engine. SPEC_EMULATED_DRIVER names its folder: libspec_emu_driver.so and examples/code_table, as cargo
leaves them.
"""

import os
import subprocess
from pathlib import Path

import pytest

from . import places

# Of the GPU: 512 MiB are never planned.
MEMORY_MIB = 1536
COMPLAINT = "emulated libcuda:"


def _folder():
    return Path(os.environ.get("SPEC_EMULATED_DRIVER", places.ROOT / "target/debug"))


def prepare(scratch, engine):
    """Variables for a process that is to find the GPU, and those for a server besides."""
    library, table = _folder() / "libspec_emu_driver.so", _folder() / "examples/code_table"
    if not (library.exists() and table.exists()):
        pytest.skip(f"there is no emulated driver in {_folder()} (scripts/test-server)")
    scratch.mkdir(parents=True, exist_ok=True)
    link = scratch / "libcuda.so.1"
    link.unlink(missing_ok=True)
    link.symlink_to(library)
    runtime = scratch / "runtime.so"
    source = Path(__file__).with_name("runtime.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", runtime, source], check=True)
    code = scratch / "code"
    with open(code, "wb") as out:
        subprocess.run([table, engine / "1/target.engine"], check=True, stdout=out)
    variables = {
        "LD_LIBRARY_PATH": str(scratch), "EMU_DRIVER_CODE": str(code), "EMU_DRIVER_MIB": str(MEMORY_MIB),
    }
    return variables, {"LD_PRELOAD": str(runtime)}
