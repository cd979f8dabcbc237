"""The figures that DeepSpeed 0.19.8's own memory estimator prints, for comparison.

They count states alone, no activations, and are not ours: bytes of GPU memory per GPU and of RAM
per node ("per CPU"), for one node layout. The rules were read off DeepSpeed's documentation and
from runs of its estimator over a grid of models and machines, which this agrees with to the byte:

    ZeRO-2  GPU  offloaded: the 16-bit weights, 2 bytes a parameter
                 else: those, and 18 bytes a parameter (gradients in 16 and 32 bits, master, two
                 moments) shared out over all GPUs
            RAM  offloaded: 16 bytes a parameter, or 4 for each GPU of all nodes if that is more
                 else: 4 bytes a parameter for each GPU of the node, while the model is built
    ZeRO-3  GPU  4 bytes for each parameter of the largest layer, and over all GPUs nothing more
                 (parameters offloaded, too), 2 bytes a parameter (only the optimizer), or 18
            RAM  18, 16, or (no offload) no bytes a parameter, over all nodes; built without
                 `zero.Init` at least 4 bytes for each GPU of the node, of the whole model
All RAM is multiplied by a factor for buffers, 1.5.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.tiers.errors import ConfigError
from offload.tools.memest.systems.subject import Ranks

BUFFER_FACTOR = 1.5
_GIB = 1 << 30


@dataclass(frozen=True)
class Needs:
    """Bytes of RAM per node and of GPU memory per GPU; `options`: what is offloaded, and whether
    the model is built in shards (`zero.Init`), in DeepSpeed's words."""

    options: str
    host_nbytes: int
    gpu_nbytes: int


def estimate(stage: int, numel: float, largest_layer: float, ranks: Ranks) -> list[Needs]:
    """One row per combination of options, in DeepSpeed's order. `largest_layer`: parameters of the
    largest module without its children. ConfigError for sizes that are none."""
    if stage not in (2, 3):
        raise ConfigError(f"stage: DeepSpeed has an estimator for 2 and 3, not for {stage}")
    if numel <= 0 or (stage == 3 and not 0 < largest_layer <= numel):
        raise ConfigError(
            f"a model of {numel:g} parameters whose largest layer has {largest_layer:g} is none; "
            "write for example --params 7e9 and a largest layer of 1.3e8"
        )
    if ranks.per_node < 1 or ranks.nodes < 1:
        raise ConfigError(f"{ranks.nodes} nodes with {ranks.per_node} GPUs; write 1 or more")
    if stage == 2:
        return [_zero2(numel, ranks, offload=offload) for offload in (True, False)]
    return [
        _zero3(numel, largest_layer, ranks, optimizer, parameters, zero_init)
        for optimizer, parameters in ((True, True), (True, False), (False, False))
        for zero_init in (True, False)
    ]


def _zero2(numel: float, ranks: Ranks, *, offload: bool) -> Needs:
    if offload:
        gpu = int(2 * numel)
        per_parameter = max(4 * ranks.count, 16)
    else:
        gpu = int(2 * numel + int(18 * numel / ranks.count))
        per_parameter = 4 * ranks.per_node
    host = int(numel * per_parameter * BUFFER_FACTOR)
    return Needs(f"offload_optimizer={_device(offload)}", host, gpu)


def _zero3(
    numel: float, largest_layer: float, ranks: Ranks, optimizer: bool, parameters: bool,
    zero_init: bool,
) -> Needs:  # fmt: skip
    sharded = 18 if not optimizer else 0 if parameters else 2  # bytes a parameter, of all GPUs
    gpu = 4 * largest_layer + int(sharded * numel / ranks.count)
    built_whole = 4 * ranks.per_node  # bytes a parameter before it is cut up
    kept = 18 if parameters else 16
    node_share = 1 / ranks.nodes
    # The order of multiplications is DeepSpeed's: its last bit is printed, too.
    if not optimizer:
        host = (largest_layer if zero_init else numel) * built_whole
    elif zero_init:
        host = numel * kept * node_share
    else:
        host = numel * max(built_whole, kept * node_share)
    options = (
        f"offload_param={_device(parameters)}, offload_optimizer={_device(optimizer)}, "
        f"zero_init={int(zero_init)}"
    )
    return Needs(options, int(host * BUFFER_FACTOR), int(gpu))


def _device(offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def lines(stage: int, needs: list[Needs]) -> list[str]:
    """GiB (which DeepSpeed calls GB) with two decimals, one line per row."""
    return [
        f"{each.host_nbytes / _GIB:8.2f} GiB RAM per node | {each.gpu_nbytes / _GIB:6.2f} GiB per "
        f"GPU | ZeRO-{stage}, {each.options}"
        for each in needs
    ]
