"""Lets torch's CUDA wheel, the only one that PyPI has for Linux on x86-64, be imported without its 3 GB of CUDA libraries.

    cuda_stubs.py SITE_PACKAGES

Compiles a stand-in for every CUDA library that torch links with and that is not installed, into
SITE_PACKAGES/nvidia/cu13/lib, where torch looks for them. Each has the symbols, and their versions, that torch names;
every function returns an error. libcudart is not one of them: torch calls it while it is loaded, and without a driver
the real one (the wheel nvidia-cuda-runtime, 1 MB) says that there is no device.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

# What every x86-64 Linux with a compiler has.
SYSTEM = re.compile(r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so")
# Symbols without a version say by their prefix whose they are; the longest that fits counts.
PREFIXES = {"cusparseLt": "libcusparseLt.", "nccl": "libnccl.", "pnccl": "libnccl.", "cuFile": "libcufile.", "cu": "libcuda."}
# CUDA_ERROR_NO_DEVICE; the other libraries count anything but 0 as a failure as well.
RETURNED = 100


def readelf(library, *options):
    """The lines that readelf prints."""
    command = ["readelf", "--wide", *options, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def needed(libraries):
    """{library: [versions]} of all that `libraries` are linked with."""
    versions = collections.defaultdict(dict)
    for library in libraries:
        file = None
        for line in readelf(library, "--dynamic", "--version-info"):
            if match := re.search(r"\(NEEDED\).*\[(.+)\]", line):
                versions[match[1]]
            elif match := re.search(r"Version: \d+ +File: (\S+)", line):
                file = match[1]
            elif file and (match := re.search(r"Name: (\S+) +Flags:", line)):
                versions[file][match[1]] = None
    return {file: list(names) for file, names in versions.items()}


def undefined(libraries):
    """(symbol, version or None) of each that `libraries` expect of others."""
    for library in libraries:
        for line in readelf(library, "--dyn-syms"):
            fields = line.split()
            if len(fields) >= 8 and fields[6] == "UND":
                name, _, version = fields[7].partition("@")
                yield name, version or None


def compile_stub(folder, file, symbols):
    """Writes the library `file` with `symbols`: {version or None: {name}}."""
    names = sorted(set().union(*symbols.values()))
    with tempfile.TemporaryDirectory() as scratch:
        source, script = pathlib.Path(scratch, "stub.c"), pathlib.Path(scratch, "stub.map")
        source.write_text("".join(f"int {name}(void) {{ return {RETURNED}; }}\n" for name in names))
        script.write_text("".join(
            f"{version} {{ {'global: ' + '; '.join(sorted(symbols[version])) + ';' if symbols[version] else ''} }};\n"
            for version in symbols if version))
        command = ["cc", "-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{file}", "-o", str(folder / file), str(source)]
        if script.stat().st_size:
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def main():
    """Compiles what is not there."""
    site = pathlib.Path(sys.argv[1])
    libraries = sorted((site / "torch/lib").glob("*.so*"))
    installed = {path.name for path in libraries} | {path.name for path in site.glob("nvidia/*/lib/*.so*")}
    if "libcudart.so.13" not in installed:
        sys.exit(f"cuda_stubs: no nvidia-cuda-runtime in {site}")
    versions = needed(libraries)
    stubs = {file: {version: set() for version in versions[file]}
             for file in versions if file not in installed and not SYSTEM.match(file)}
    owners = {version: file for file in stubs for version in versions[file]}
    for name, version in undefined(libraries):
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if version in owners:
            stubs[owners[version]][version].add(name)
        elif version is None and prefix and not (prefix == "cu" and not name[2:3].isupper()):
            for file in stubs:
                if file.startswith(PREFIXES[prefix]):
                    stubs[file].setdefault(None, set()).add(name)
    for file, symbols in stubs.items():
        compile_stub(site / "nvidia/cu13/lib", file, symbols)
    print(f"cuda_stubs: stand-ins for {', '.join(sorted(stubs))}", file=sys.stderr)


if __name__ == "__main__":
    main()
