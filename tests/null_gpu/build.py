"""The null GPU's library: `libcuda.so.1`, which is also PyTorch's CUDA runtime, cuBLAS and cuDNN.

    python -m tests.null_gpu.build FOLDER

Loaded before all others (LD_PRELOAD), its functions take the place of those that PyTorch's wheel
brings. A function that PyTorch refers to and that is not written here ends the process with its
name, instead of reaching NVIDIA's own.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
LIBRARY = "libcuda.so.1"
# Versions of symbols begin with the name of their library.
_STANDS_FOR = ("libcudart", "libcublas", "libcublasLt", "libcudnn")
_CALLERS = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so")


def missing() -> str | None:
    """Why the library cannot be built, or no program could use it; None if it can."""
    if shutil.which("gcc") is None or shutil.which("nm") is None:
        return "gcc and nm are needed to build the null GPU"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if not _cuda_headers().is_dir():
        return "the null GPU needs torch's wheel for CUDA 13, which brings CUDA's headers"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def build(folder: Path) -> Path:
    """Compile the library into `folder`; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    stubs = folder / "unknown.c"
    stubs.write_text("".join(_stubs(folder)))
    library = folder / LIBRARY
    new = folder / "new.so"
    _compile([*SOURCES, stubs], new, f"-Wl,-soname,{LIBRARY}")
    new.replace(library)  # a program that runs keeps the old one
    return library


def _stubs(folder: Path) -> Iterator[str]:
    """C functions for what is called and not written."""
    written = folder / "written.so"
    _compile(SOURCES, written)
    known = {name for name, _ in _symbols(written, "--defined-only")}
    yield "_Noreturn void unknown(const char *name);\n"
    for name in sorted(_called() - known):
        yield f'void {name}(void) {{ unknown("{name}"); }}\n'


def _called() -> set[str]:
    """What PyTorch and Triton refer to of the libraries that this one stands for."""
    folder = _packages() / "torch" / "lib"
    triton = (_packages() / "triton" / "backends" / "nvidia" / "driver.c").read_text()
    return {*re.findall(r"\bcu[A-Z]\w+(?=\()", triton)} | {
        name
        for caller in _CALLERS
        for name, version in _symbols(folder / caller, "--undefined-only")
        if version.startswith(_STANDS_FOR)
    }


def _symbols(library: Path, which: str) -> Iterator[tuple[str, str]]:
    """Names and versions of a library's dynamic symbols."""
    command = ["nm", "-D", which, str(library)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        name, _, version = line.split()[-1].partition("@")
        yield name, version


def _compile(sources: Sequence[Path], to: Path, *options: str) -> None:
    # Triton's wheel has what NVIDIA's includes from `crt`
    headers = [_cuda_headers(), _packages() / "triton" / "backends" / "nvidia" / "include"]
    flags = ["-std=gnu11", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", *options]
    flags += [part for folder in headers for part in ("-isystem", str(folder))]
    subprocess.run(["gcc", *flags, *map(str, sources), "-o", str(to)], check=True)


def _cuda_headers() -> Path:
    return _packages() / "nvidia" / "cu13" / "include"


def _packages() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


if __name__ == "__main__":
    why = missing()
    print(build(Path(sys.argv[1])) if why is None else why)
