"""What the checks run in processes of their own, mostly on the null GPU.

    python -m tests.null_gpu.programs NAME OPTIONS

NAME is one of the functions below, OPTIONS its keyword arguments as JSON; its answer is one line.
"""

import ctypes
import json
import os
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offload
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.choice.planner import check_plan
from offload.planning.machine.baseline import GPU_CONTEXT_NBYTES
from offload.process.machine import rss_nbytes
from offload.runs.forecast import forecast, workload_of
from offload.tiers.tier import Tier
from tests.null_gpu import calls

WIDTH, BATCH = 64, 1024  # a batch is large enough to be moved away until backward
HALVES = {"host": "50%", "nvme": "50%"}
THIRDS = {"device": "30%", "host": "40%", "nvme": "30%"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    **{
        tier: {"parameters": tier, "gradients": tier, "optimizer": tier}
        for tier in ("device", "host", "nvme")
    },
    "host and nvme": {"parameters": HALVES, "gradients": HALVES, "optimizer": HALVES},
    "split": {"parameters": THIRDS, "gradients": HALVES, "optimizer": THIRDS},
}


def settings(placement: str, folder: str, device: str = "cuda", **keys: Any) -> dict[str, Any]:
    return {
        "device": device,
        "budget": {"device": "64MiB", "host": "64MiB", "nvme": "256MiB"},
        "nvme": {"paths": [folder]},
        "placement": PLACEMENTS[placement],
        "optimizer": {"type": "adamw", "lr": 1e-2, "weight_decay": 0.1},
        **keys,
    }


# ---------------------------------------------------------------- what kernels read
Seen = list[Tensor]  # weights and activations, copied where a kernel of a product would read them


class _Product(torch.autograd.Function):
    """What stands for one: this GPU can copy, so the result is `x`, moved by a row. Gradients are
    zeros, on any device, so every update is known without a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: Seen) -> Tensor:
        seen.append(weight.clone())
        ctx.save_for_backward(x, weight)
        ctx.seen = seen
        moved = torch.empty_like(x)
        moved[1:].copy_(x[:-1])
        moved[:1].copy_(x[-1:])
        return moved

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.seen += [x.clone(), weight.clone()]
        return torch.zeros_like(x), torch.zeros_like(weight), None


class Block(nn.Module):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.rand(WIDTH, WIDTH)) for _ in range(2))
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x, self.first, self.seen)
        return _Product.apply(y, self.second, self.seen)


class Net(nn.Module):
    """Every value is positive. So is then what a kernel that did nothing left of older values,
    read as sums of squares."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(seen) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def rows(step: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    """A batch whose rows differ, from each other and from those of other steps."""
    numbers = torch.arange(1, BATCH + 1).reshape(BATCH, 1) + step * BATCH
    return (numbers / (4 * BATCH)).expand(BATCH, WIDTH).to(dtype).contiguous().to(where)


def checksum(tensor: Tensor) -> int:
    """As kernels would read it. The stream that wrote it must be done."""
    if tensor.device.type == "cpu":
        return zlib.crc32(tensor.detach().view(torch.uint8).numpy().tobytes())
    return zlib.crc32(calls.device_bytes(tensor.data_ptr(), tensor.nbytes))


def values_seen(
    placement: str,
    device: str = "cuda",
    precision: str = "fp32",
    index: int = 0,
    thread: bool = False,
    side_stream: bool = False,
    pinning_fails: bool = False,
    activations: dict[str, Any] | None = None,
    sleeps: dict[str, Any] | None = None,
    **keys: Any,
) -> list[int]:
    """Train; checksums of what each product read, forward and backward, and of the last weights.
    `sleeps`: release the device, with these options, before and after each step.

    On a device's `index`, which is not the current device of training's thread, unless it is 0.
    """
    seen: Seen = []
    if pinning_fails:
        calls.fail_next("cudaHostRegister", calls.MEMORY_ERROR, times=1000)
    where = torch.device(device, index) if device == "cuda" else torch.device(device)
    with tempfile.TemporaryDirectory() as folder:
        given = settings(placement, folder, device, precision=precision, **keys)
        if activations is not None:
            given["placement"] = {**given["placement"], "activations": activations}
        with torch.cuda.device(where) if device == "cuda" else nullcontext():
            engine = offload.initialize(Net(seen), given)
        engine.module.register_buffer("mask", torch.ones(3, 5, device=where))
        train = _trainer(engine, where, side_stream, sleeps=sleeps)
        if thread:
            _in_a_thread(train)
        else:
            train()
        engine.settle()
        engine.check_integrity()
        for weight in engine.module.parameters():
            with engine.gathered(weight):
                seen.append(weight.detach().clone())
        if device == "cuda":
            torch.cuda.synchronize(where)
        engine.close()
    return [checksum(tensor) for tensor in seen]


def _trainer(
    engine: offload.Engine, where: torch.device, side_stream: bool = False, steps: int = 3,
    sleeps: dict[str, Any] | None = None,
) -> Callable[[], None]:  # fmt: skip
    dtype = next(engine.module.parameters()).dtype

    def sleep() -> None:
        if sleeps is not None:
            seen = engine.module.blocks[0].seen  # type: ignore[index, union-attr]
            seen[:] = [tensor.cpu() for tensor in seen]
            with engine.asleep(**sleeps):
                assert bytes_held() == 0, torch.cuda.memory_summary()

    def train() -> None:
        stream = torch.cuda.stream(torch.cuda.Stream(where)) if side_stream else nullcontext()
        with stream:
            for step in range(steps):
                engine.backward(engine.module(rows(step, dtype, where)))
                sleep()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                sleep()

    return train


def bytes_held() -> int:
    """The bytes of the GPU's memory that are not free: a null GPU's context takes none."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def sleeps_often(cycles: int) -> list[list[int]]:
    """The GPU's bytes awake, descriptors and RSS after each of the later cycles."""
    rows_of: list[tuple[int, int, int]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        offload.initialize(Net([]), settings("split", folder)) as engine,
    ):
        _trainer(engine, torch.device("cuda"), sleeps={})()
        for number in range(cycles):
            with engine.asleep(host=number % 2 == 0):
                assert bytes_held() == 0
            rows_of.append((bytes_held(), len(os.listdir("/proc/self/fd")), rss_nbytes()))
    return [list(column) for column in zip(*rows_of[cycles // 5 :], strict=True)]


def _in_a_thread(work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def blocking_calls(placement: str, passes: int, planned: bool, **keys: Any) -> list[int]:
    """How many calls in each backward pass of the second step wait, in autograd's thread or in that
    of the model."""
    if planned:
        keys["gradient_accumulation_steps"] = passes
    where, counts = torch.device("cuda"), []
    with (
        tempfile.TemporaryDirectory() as folder,
        offload.initialize(Net([]), settings(placement, folder, **keys)) as engine,
    ):
        dtype = next(engine.module.parameters()).dtype
        calls.count_this_thread()
        for number in range(2 * passes):
            loss = engine.module(rows(number, dtype, where))
            loss.register_hook(lambda _: calls.count_this_thread())
            before = calls.blocking_calls()
            engine.backward(loss)
            counts.append(calls.blocking_calls() - before)
            if (number + 1) % passes == 0:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
    return counts[passes:]


# ---------------------------------------------------------------- what else users call
def features(cases: list[dict[str, Any]]) -> list[int]:
    """Everything that reads or writes states from outside, between steps; steps taken per case."""
    return [_all_features(**case) for case in cases]


def _all_features(placement: str, precision: str = "fp32", **keys: Any) -> int:
    with (
        tempfile.TemporaryDirectory() as folder,
        offload.initialize(
            Net([]), settings(placement, folder, precision=precision, **keys)
        ) as engine,
    ):
        step = _trainer(engine, torch.device("cuda"), steps=2)
        step()
        if not engine.config.optimizer.in_backward:  # else updates have used them up
            _touch_gradients(engine)
        step()
        _touch_states(engine, Path(folder) / "checkpoint")
        engine.save_checkpoint(Path(folder) / "beside", wait=False)
        step()
        engine.load_checkpoint(Path(folder) / "beside")
        step()
        with torch.no_grad():
            engine.module(_inputs(engine))
        engine.settle()
        engine.check_integrity()
        return engine.report().steps


def _inputs(engine: offload.Engine) -> Tensor:
    return rows(0, next(engine.module.parameters()).dtype, torch.device("cuda"))


def _touch_gradients(engine: offload.Engine) -> None:
    engine.backward(engine.module(_inputs(engine)))
    weight = next(engine.module.parameters())
    gradient = engine.gradient(weight)
    assert gradient is not None
    assert gradient.shape == weight.shape
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
    engine.optimizer.zero_grad()


def _touch_states(engine: offload.Engine, checkpoint: Path) -> None:
    weight = next(engine.module.parameters())
    with engine.gathered(weight):
        weight.data.add_(1)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    engine.module.load_state_dict(engine.module.state_dict())
    engine.save_checkpoint(checkpoint)
    engine.load_checkpoint(checkpoint)


# ---------------------------------------------------------------- all of a GPU's memory
def within_gpu_budget(total: str) -> dict[str, float]:
    """Train a language model whose pass is known; MiB that were planned, and that were taken."""
    config = OffloadConfig.load({
        "device": "cuda", "precision": "bf16", "clip_grad_norm": 1.0,
        "budget": {"gpu": total, "host": "1GiB", "nvme": 0},
        "placement": {"activations": {"checkpoint": "auto"}},
        "train": {"model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 16000}, "batch": 8,
                  "sequence": 1024},
    }).owning_the_loop()  # fmt: skip
    model = build_meta_model(config)
    run = forecast(config, model, workload_of(config))
    assert run is not None
    check_plan(run.planned.best)
    tokens = torch.zeros(8, 1024, dtype=torch.long, device="cuda")
    with offload.initialize(model, run.config) as engine:
        for _ in range(3):
            engine.backward(engine.module(tokens, tokens).loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.settle()
        tier = engine.report().tiers["device"]
        assert tier.peak_nbytes <= tier.budget_nbytes
    place = run.planned.memory.places[Tier.DEVICE]
    sizes = {
        "planned": place.peak_nbytes, "total": place.capacity_nbytes,
        "tensors": torch.cuda.max_memory_allocated() + GPU_CONTEXT_NBYTES,
        "taken": torch.cuda.max_memory_reserved() + GPU_CONTEXT_NBYTES,
    }  # fmt: skip
    return {name: nbytes / (1 << 20) for name, nbytes in sizes.items()}


def beyond_gpu_budget() -> dict[str, Any]:
    """A pass that was not planned runs into the limit, and training goes on after it."""
    fractions, total = [], torch.cuda.mem_get_info()[1]

    def note() -> None:
        fractions.append(round(torch.cuda.get_per_process_memory_fraction() * total / (1 << 20)))

    def engine(gpu: str) -> offload.Engine:
        made = offload.initialize(Net([]), settings("host", ".", budget={"gpu": gpu, "nvme": 0}))
        note()
        return made

    wide, tight = engine("3GiB"), engine("2GiB")
    wide.close()
    note()
    said = _said(lambda: torch.empty(3 << 30, dtype=torch.uint8, device="cuda"))
    _trainer(tight, torch.device("cuda"))()
    steps = tight.report().steps
    tight.close()
    note()
    torch.cuda.set_per_process_memory_fraction(0.25)  # by the program
    below = _said(lambda: engine("3GiB").close())
    note()
    return {"mib": fractions, "said": said, "steps": steps, "below": below}


# ---------------------------------------------------------------- the null GPU itself
def copied_and_back() -> bool:
    """Through pinned memory, with a stream that waits for another."""
    values = torch.arange(1000.0).pin_memory()
    back = torch.empty(1000).pin_memory()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        there = values.to("cuda", non_blocking=True)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        back.copy_(there, non_blocking=True)
    second.synchronize()
    return torch.equal(values, back)


def read_too_early() -> list[bool]:
    """Whether pinned memory holds NaN before, and what was copied after, a wait."""
    back = torch.empty(1000).pin_memory()
    back.copy_(torch.ones(1000).to("cuda"), non_blocking=True)
    before = bool(back.isnan().all())
    torch.cuda.current_stream().synchronize()
    return [before, bool((back == 1).all())]


def error_kept() -> dict[str, Any]:
    """The status of a call that fails, and what later kernels say."""
    torch.cuda.init()
    calls.fail_next("cudaHostRegister", calls.MEMORY_ERROR)
    region = ctypes.create_string_buffer(4096)
    status = torch.cuda.cudart().cudaHostRegister(ctypes.addressof(region), 4096, 0)
    return {"status": int(status), "said": [_said(_fill), _said(_fill)]}


def _fill() -> None:
    torch.empty(1, device="cuda").fill_(0.0)


def _said(call: Callable[[], object]) -> str | None:
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(globals()[name](**options)), flush=True)


if __name__ == "__main__":
    main()
