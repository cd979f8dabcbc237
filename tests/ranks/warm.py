"""Imported once by the process that ranks are forked from: what each of them would load anew.

Numba's tables of all that it can compile take half of the time that a rank with a small model has;
as long takes what torch imports where DTensors or gradient handles are computed with.
"""

import gc

import numpy as np
import torch._dynamo
import torch.distributed.tensor  # noqa: F401

from offload.kernels.cpu.convert import encode
from offload.kernels.floats import Float
from tests import no_network

no_network.block()
encode(np.zeros(8, np.float32), np.zeros(8, np.uint16), Float.BF16)

# else the first full collection in each rank writes to all of these objects, and so copies their
# pages: half of a second
gc.collect()
gc.freeze()
