"""What the checks run in processes of their own, mostly on the null GPU.

    python -m tests.null_gpu.programs NAME OPTIONS

NAME is one of the functions below, OPTIONS its keyword arguments as JSON; its answer is one line.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn

import offload
from benchmarks.gpu_first import take_steps
from offload.swap.device.streams import StreamEvent
from offload.tiers import accelerator
from offload.tiers.tier import Tier
from tests.null_gpu import calls
from tests.null_gpu.sanitizer import sanitized

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


# ---------------------------------------------------------------- what torch's sanitizer sees
def races(tier: str, waits: bool) -> list[str]:
    """Of the steps that gpu-check takes; without `waits`, the model waits for no copy."""
    if not waits:
        StreamEvent.before_compute = lambda self: None  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, sanitized() as found:
        take_steps(torch.device("cuda"), Tier(tier), Path(folder))
    return found


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
        z: Tensor = _Product.apply(y, self.second, self.seen)
        return z


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
    **keys: Any,
) -> list[int]:
    """Train; checksums of what each product read, forward and backward, and of the last weights.

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
        train = _trainer(engine, where, side_stream)
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
    engine: offload.Engine, where: torch.device, side_stream: bool = False, steps: int = 3
) -> Callable[[], None]:
    dtype = next(engine.module.parameters()).dtype

    def train() -> None:
        stream = torch.cuda.stream(torch.cuda.Stream(where)) if side_stream else nullcontext()
        with stream:
            for step in range(steps):
                engine.backward(engine.module(rows(step, dtype, where)))
                engine.optimizer.step()
                engine.optimizer.zero_grad()

    return train


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


# ---------------------------------------------------------------- how many calls a step makes
def calls_per_step(
    placement: str, blocks: int, steps: int = 3, warm_up: int = 3
) -> dict[str, float]:
    """Of a small Llama. What the user does herself (the batch, the loss's value) is not in it."""
    from offload.bench.systems import batch_of
    from offload.config import OffloadConfig
    from offload.gpt import build_meta_model

    states = dict.fromkeys(("parameters", "gradients", "optimizer"), placement.partition(",")[0])
    activations = {"tier": "nvme", "checkpoint": True} if "," in placement else {}
    shape = {"shape": "llama", "layers": blocks, "hidden": 64, "heads": 2, "mlp": 128}
    with tempfile.TemporaryDirectory() as folder:
        config = OffloadConfig.load({
            "device": "cuda", "clip_grad_norm": 1.0, "nvme": {"paths": [folder]},
            "budget": {"device": "256MiB", "host": "512MiB", "nvme": "1GiB"},
            "placement": {**states, "activations": activations},
            "optimizer": {"type": "adamw", "lr": 1e-4},
            "train": {
                "model": {**shape, "vocab": 256, "max_sequence": 16}, "batch": 1, "sequence": 16,
            },
        })  # fmt: skip
        model = build_meta_model(config)
        with offload.initialize(model, config) as engine:
            inputs, targets = batch_of(config, 0, torch.device("cuda"))

            def step() -> None:
                model(inputs, targets).loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()

            for _ in range(warm_up):
                step()
            engine.settle()
            with calls.counted() as found:
                for _ in range(steps):
                    step()
                engine.settle()
    return {name: count / steps for name, count in sorted(found.items())}


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


# ---------------------------------------------------------------- the null GPU itself
def unknown_call() -> None:
    """Graphs are not among its calls."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.CUDAGraph().capture_begin()


def read_by_the_cpu() -> None:
    """What a CPU may not read."""
    ctypes.string_at(torch.ones(4, device="cuda").data_ptr(), 4)


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


@triton.jit
def _nothing(pointer):
    pass


def other_devices_memory() -> dict[str, Any]:
    """What Triton says of memory of device 1, where that is current, and where device 0 is."""
    there = torch.zeros(64, device=torch.device("cuda", 1))
    with torch.cuda.device(1):
        same = _said(lambda: _nothing[(1,)](there))
    return {"same": same, "other": _said(lambda: _nothing[(1,)](there))}


def current_streams() -> list[str]:
    """Where our own way of entering a stream differs from PyTorch's, whatever was current."""
    wrong: list[str] = []

    def compare(when: str, name: str = "", stream: Any = None, at: int = 0) -> None:
        """`stream` shall be current on device `at`; what PyTorch says is current on each device."""
        if torch.cuda.current_device() != at:
            wrong.append(f"{when}: device {torch.cuda.current_device()} is current")
        for index in range(2):
            theirs = torch.cuda.current_stream(index)
            if accelerator.of(device).current_stream(torch.device("cuda", index)) != theirs:
                wrong.append(f"{when}: PyTorch says {theirs}")
        if stream is not None and torch.cuda.current_stream(at) != stream:
            wrong.append(f"{when}: not in {name}")

    device = torch.device("cuda", 1)
    kind = accelerator.of(device)
    ours = {f"ours on {i}": kind.stream(torch.device("cuda", i)) for i in range(2)}
    other = torch.cuda.Stream(0)
    theirs = {
        "the default": torch.cuda.default_stream(0), "another": other,
        "a foreign one": torch.cuda.ExternalStream(torch.cuda.Stream(0).cuda_stream, 0),
    }  # fmt: skip
    for outer, around in theirs.items():
        for name, stream in ours.items():
            with torch.cuda.stream(around):
                with kind.entered(stream):
                    compare(f"{name} in {outer}", name, stream, stream.device_index)
                    with kind.entered(other):
                        compare(f"another in {name}", "another", other)
                    compare(f"{name} again", name, stream, stream.device_index)
                compare(f"{outer} after {name}", outer, around)
    return wrong


def transformers_trainer(**keys: Any) -> dict[str, Any]:
    """Trains, evaluates and resumes through OffloadTrainer; where the model was before it had an
    engine, and the bytes of GPU memory beside `budget.device`."""
    import transformers

    from offload.integrations.transformers import OffloadTrainer
    from tests.outside.trainer_cases import Rows, tiny_llama

    folder = tempfile.mkdtemp()
    args = transformers.TrainingArguments(
        output_dir=folder, max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=2,
        report_to=[], disable_tqdm=True, gradient_accumulation_steps=2, **keys,
    )  # fmt: skip
    rows = {"train_dataset": Rows(40, seed=1), "eval_dataset": Rows(8, seed=2)}

    def trainer() -> OffloadTrainer:
        return OffloadTrainer(tiny_llama(), args, offload=settings("host", folder), **rows)

    first = trainer()
    before = {str(param.device) for param in first.model.parameters()}
    first.evaluate()
    first.train()
    found = {
        "before": sorted(before), "on": str(first.engine.device),
        "precision": first.engine.config.precision,
        "beside": torch.cuda.max_memory_allocated() - (64 << 20),
    }  # fmt: skip
    first.save_model(f"{folder}/model")
    first.engine.close()
    again = trainer()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    found["steps"] = again.engine.report().steps + again.engine.report().skipped_steps
    again.engine.close()
    return found


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
