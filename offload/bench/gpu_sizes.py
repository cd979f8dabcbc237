"""The step benchmark's case: the largest of a few Llama shapes that a machine can hold and finish.

Bytes per parameter in bf16 with a split master and fp32 moments, all of them in the host tier as
long as they fit:

    weight 2 | gradient 2 | remainder 2 | exp_avg 4 | exp_avg_sq 4
                          └──────── optimizer record: the part that may spill to nvme ┘

What does not fit goes to nvme; what takes longer than there is time gives way to a smaller shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from offload.bench.gpu_machine import GpuMachine
from offload.tiers.units import format_bytes

GIB = 1 << 30
SEQUENCE = 1024
BATCHES = (32, 16, 8, 4, 2, 1)
STEPS = 4  # one to warm up, then three that count

_WEIGHT, _GRADIENT, _RECORD = 2, 2, 10  # bytes per parameter
_PAGES = 1.01  # records and groups are whole pages
_PROCESS_NBYTES = 6 * GIB  # interpreter, libraries, CUDA, one group's first values in fp32
_WINDOW_NBYTES = 1 * GIB  # copies of what is on nvme, staging
_DEVICE_BUDGET_NBYTES = 24 * GIB
_DEVICE_LEAST_NBYTES = 256 << 20  # outbox, staging, sums of squares
_CUDA_NBYTES = 2 * GIB  # context, libraries' workspaces, fragments
_DISK_SHARE = 0.9
_ADAM_TRAFFIC = 26  # bytes per parameter over the memory bus
_COMPUTE_SHARE = 0.3  # of the products' rate, guessed low: an estimate of time, not a claim
_LOAD_PASSES = 6  # times that loading and pinning go over a group's fp32 values
_LOAD_BYTES_PER_S = 4e9  # one thread


@dataclass(frozen=True)
class Shape:
    """A Llama: grouped queries, SwiGLU, RMSNorm, embedding and head apart."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int

    @property
    def block_numel(self) -> int:
        kv = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        return attention + 3 * self.hidden * self.mlp + 2 * self.hidden

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.block_numel + 2 * self.vocab * self.hidden + self.hidden

    def flops(self, tokens: int, *, recomputed: bool) -> float:
        """Operations of forward and backward; `recomputed` counts each block's second forward.

        A token's product with a matrix is 2 per element forward and 4 backward; causal attention
        looks at half of the sequence.
        """
        block = 8 if recomputed else 6
        attention = block * SEQUENCE * self.hidden * self.layers  # 2 products, 2 each, half of it
        return tokens * (
            block * self.layers * self.block_numel + 6 * self.vocab * self.hidden + attention
        )

    def model(self) -> dict[str, Any]:
        """As `train.model` has it."""
        sizes = {name: value for name, value in asdict(self).items() if name != "name"}
        return {"shape": "llama", "max_sequence": SEQUENCE, "tied": False, **sizes}


SHAPES = (
    Shape("8 B", 32, 4096, 32, 8, 14336, 128256),
    Shape("3.6 B", 28, 3072, 24, 8, 8192, 128256),
    Shape("1.5 B", 16, 2048, 32, 8, 8192, 128256),
    Shape("0.5 B", 16, 1280, 20, 5, 3456, 32000),
    Shape("0.15 B", 8, 1024, 16, 16, 4096, 8192),
    Shape("0.01 B", 4, 256, 4, 4, 1024, 8192),
)


@dataclass(frozen=True)
class Needs:
    """What a system takes of the host per parameter, and whether it can spill to nvme."""

    system: str
    host_per_parameter: float
    spills: bool


OURS = Needs("ours", (_WEIGHT + _GRADIENT + _RECORD) * _PAGES, spills=True)
# By its formula 18; 22 were measured on a smaller model.
DEEPSPEED = Needs("DeepSpeed ZeRO-3", 22.0, spills=False)


@dataclass(frozen=True)
class Case:
    """What is trained, and why not more. Budgets in bytes."""

    shape: Shape
    batch: int
    device_budget_nbytes: int
    host_budget_nbytes: int
    nvme_budget_nbytes: int
    record_share_on_nvme: float  # of the optimizer's records
    estimated_s: float
    why: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * SEQUENCE

    @property
    def least_to_device_nbytes(self) -> int:
        """Weights that no step can do without copying: each new one once, and once more in
        backward what the device's budget could not keep."""
        weights = _WEIGHT * self.shape.numel
        return weights + max(0, weights - self.device_budget_nbytes)

    @property
    def least_to_host_nbytes(self) -> int:
        """Every gradient, once."""
        return _GRADIENT * self.shape.numel

    @property
    def record_nbytes_on_nvme(self) -> int:
        return int(_RECORD * self.shape.numel * self.record_share_on_nvme)

    @property
    def adam_nbytes(self) -> int:
        """Over the memory bus."""
        return _ADAM_TRAFFIC * self.shape.numel

    def config(self) -> dict[str, Any]:
        """A configuration, all but the folder for files."""
        spilled = round(100 * self.record_share_on_nvme)
        records: Any = "host"
        if spilled:
            records = {"host": f"{100 - spilled}%", "nvme": f"{spilled}%"}
        return {
            "device": "cuda",
            "precision": "bf16",
            "budget": {
                "device": self.device_budget_nbytes, "host": self.host_budget_nbytes,
                "nvme": self.nvme_budget_nbytes,
            },
            "placement": {
                "parameters": "host", "gradients": "host", "optimizer": records,
                "activations": {"tier": "device", "checkpoint": True},
            },
            "optimizer": {"type": "adamw", "lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
            "clip_grad_norm": 1.0,
            "train": {"model": self.shape.model(), "batch": self.batch, "sequence": SEQUENCE},
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        derived = {
            "tokens": self.tokens, "sequence": SEQUENCE, "parameters": self.shape.numel,
            "config": self.config(),
        }  # fmt: skip
        return {**asdict(self), "why": list(self.why), **derived}


def choose(
    machine: GpuMachine, time_s: float, needs: Sequence[Needs] = (OURS,),
    shapes: Iterable[Shape] = SHAPES,
) -> tuple[Case | None, tuple[str, ...]]:  # fmt: skip
    """The first of `shapes` that all of `needs` can train, with the largest batch that fits and
    ends in `time_s` by estimate; None if there is none. And why each larger one was not taken."""
    refused: list[str] = []
    for shape in shapes:
        found = _case(shape, machine, time_s, needs)
        if isinstance(found, Case):
            return _with_reasons(found, refused), tuple(refused)
        refused.append(f"{shape.name}: {found}")
    return None, tuple(refused)


def _with_reasons(case: Case, refused: Sequence[str]) -> Case:
    return Case(**{**_fields(case), "why": (*refused, *case.why)})


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


def _case(
    shape: Shape, machine: GpuMachine, time_s: float, needs: Sequence[Needs]
) -> Case | str:  # fmt: skip
    """The case of one shape, or why it cannot be."""
    budget = min(_DEVICE_BUDGET_NBYTES, machine.device_nbytes // 2)
    gathered = _gathered_nbytes(shape)
    if gathered > budget:
        return (
            f"{format_bytes(gathered)} of parameters are gathered at a time, the device's budget "
            f"is {format_bytes(budget)}"
        )
    spilled = _spilled_share(shape, machine, needs)
    if isinstance(spilled, str):
        return spilled
    why = []
    if spilled:
        why.append(f"{spilled:.0%} of the optimizer's records on nvme: RAM holds no more")
    for batch in BATCHES:
        active = _activation_nbytes(shape, batch * SEQUENCE)
        if active > machine.device_nbytes - budget - _CUDA_NBYTES:
            continue
        seconds = _estimate_s(shape, batch * SEQUENCE, machine, spilled)
        if seconds <= time_s:
            return Case(
                shape, batch, budget, *_budgets(shape, spilled), spilled, seconds, tuple(why)
            )
        if batch == BATCHES[-1]:
            return f"would take about {seconds:.0f} s, there are {time_s:.0f}"
    return f"one sequence of {SEQUENCE} tokens does not fit on the device beside the budget"


def _gathered_nbytes(shape: Shape) -> int:
    root = (2 * shape.vocab * shape.hidden + shape.hidden) * _WEIGHT
    # two blocks: the one in use and the next one
    return int((root + 2 * shape.block_numel * _WEIGHT) * _PAGES) + _DEVICE_LEAST_NBYTES


def _spilled_share(shape: Shape, machine: GpuMachine, needs: Sequence[Needs]) -> float | str:
    """The share of the records that has to go to nvme (in whole per cent), or why none will do."""
    room = machine.host_nbytes - _PROCESS_NBYTES - _WINDOW_NBYTES
    share = 0.0
    for need in needs:
        short = need.host_per_parameter * shape.numel - room
        if short <= 0:
            continue
        missing = f"{need.system} needs {format_bytes(int(short))} more RAM"
        if not need.spills:
            return f"{missing} than there is"
        exact = short / (_RECORD * _PAGES * shape.numel)
        share = -(-100 * exact // 1) / 100
        if share > 1:
            return f"{missing} than there is, with all optimizer records on nvme, too"
        disk = _budgets(shape, share)[1]
        if disk > machine.disk_nbytes * _DISK_SHARE:
            return (
                f"{missing} than there is, or {format_bytes(disk)} of disk, of which "
                f"{format_bytes(machine.disk_nbytes)} are free"
            )
    return share


def _budgets(shape: Shape, spilled: float) -> tuple[int, int]:
    """Of host and nvme."""
    records = _RECORD * _PAGES * shape.numel
    host = (_WEIGHT + _GRADIENT) * _PAGES * shape.numel + records * (1 - spilled)
    nvme = records * spilled
    if not spilled:
        return int(host) + _WINDOW_NBYTES, 0
    # Homes are given out in whole records, so it may be a little more than the share. And while a
    # new version of a group is written, the old one is there, too.
    group = (_WEIGHT + _GRADIENT) * max(shape.vocab * shape.hidden, shape.block_numel)
    return int(host) + _WINDOW_NBYTES, int(nvme * 1.02 + 2 * group) + _WINDOW_NBYTES


def _activation_nbytes(shape: Shape, tokens: int) -> int:
    """At the most: the logits with their fp32 copies and gradients, or one block recomputed."""
    logits = 16 * shape.vocab
    kept = 2 * shape.layers * shape.hidden
    block = 2 * (16 * shape.hidden + 8 * shape.mlp)
    return tokens * (kept + max(logits, block))


def _estimate_s(shape: Shape, tokens: int, machine: GpuMachine, spilled: float) -> float:
    """From the start of the process to its end, roughly, and rather too long."""
    host = sum(_budgets(shape, spilled))
    disk = _RECORD * shape.numel * spilled
    build = host / machine.touch_bytes_per_s
    build += 4 * shape.numel * _LOAD_PASSES / _LOAD_BYTES_PER_S
    build += disk / machine.disk_write_bytes_per_s
    compute = shape.flops(tokens, recomputed=True) / (machine.matmul_flops_per_s * _COMPUTE_SHARE)
    adam = _ADAM_TRAFFIC * shape.numel / machine.bus_bytes_per_s
    moved = disk / machine.disk_read_bytes_per_s + disk / machine.disk_write_bytes_per_s
    started = 10.0  # imports, CUDA, kernels compiled
    return started + build + STEPS * (compute + adam + moved)
