"""Run a Python program on the null GPU.

    python -m tests.null_gpu.launch [--devices 1] [--nbytes 8589934592] [--late] [--zeros-back]
                                    MODULE [ARGUMENTS]

`--zeros-back benchmarks.gpu_check step`, for example, takes the steps of the GPU check.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.null_gpu.build import build, missing

FOLDER = Path(__file__).parents[2] / "build" / "null_gpu"  # kernels that Triton compiled stay there


@dataclass(frozen=True)
class NullGpu:
    """What a process sees of the null GPU. `late`: copies of pinned memory are done when they are
    waited for, and until then their destination holds NaN. `zeros_back`: copies to the host bring
    zeros, as if kernels had computed them, instead of what device memory held before."""

    devices: int = 1
    nbytes: int = 8 << 30
    late: bool = False
    zeros_back: bool = False

    def environment(self, library: Path) -> dict[str, str]:
        return {
            **os.environ,
            "LD_PRELOAD": str(library),
            "TRITON_LIBCUDA_PATH": str(library.parent),
            "TRITON_CACHE_DIR": str(library.parent / "triton"),
            "NULL_GPU_DEVICES": str(self.devices),
            "NULL_GPU_NBYTES": str(self.nbytes),
            "NULL_GPU_LATE": str(int(self.late)),
            "NULL_GPU_ZEROS_BACK": str(int(self.zeros_back)),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=NullGpu.devices)
    parser.add_argument("--nbytes", type=int, default=NullGpu.nbytes)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--zeros-back", action="store_true")
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = vars(parser.parse_args())
    why = missing()
    if why is not None:
        raise SystemExit(why)
    command = [sys.executable, "-m", options.pop("module"), *options.pop("arguments")]
    return subprocess.run(command, env=NullGpu(**options).environment(build(FOLDER))).returncode


if __name__ == "__main__":
    raise SystemExit(main())
