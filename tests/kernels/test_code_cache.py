"""Compiled kernels on disk, for processes that compile at the same time."""

import os
import subprocess
import sys
from pathlib import Path

ENCODE_ONE = """
import numpy as np
from numba.core.caching import IndexDataCacheFile as Files
from offload.kernels.cpu.convert import encode
from offload.kernels.floats import Float

def code_of_one(float_):
    stored = np.zeros(8, np.uint16)
    encode(np.ones(8, np.float32), stored, float_)
    return hex(stored[0])
"""
# The order of two processes' writes: both have read the index before either wrote it, and the code
# of the first is the last to be written.
AT_ONCE = """
written = []
save = Files._save_data
Files._load_index = lambda files: {}
Files._save_data = lambda *arguments: written.append(arguments)
print(code_of_one(Float.FP16), code_of_one(Float.BF16))
for arguments in reversed(written):
    save(*arguments)
"""
LATER = "print(code_of_one(Float.FP16), code_of_one(Float.BF16))"


def said_by(folder: Path, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ENCODE_ONE + program], capture_output=True, text=True, check=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder)},
    )  # fmt: skip
    return done.stdout.strip()


def test_two_variants_compiled_at_once_are_not_taken_for_each_other(tmp_path: Path) -> None:
    assert said_by(tmp_path, AT_ONCE) == "0x3c00 0x3f80"
    assert said_by(tmp_path, LATER) == "0x3c00 0x3f80"
