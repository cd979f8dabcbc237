"""Passes of a language model whose weights are on disk, beside what disk and arithmetic alone take,
and beside accelerate's `disk_offload`.

    python -m benchmarks.generation [--shape dense] [--batch 1 32 256] [--json FILE]

A pass computes the next token of every sequence of the batch, each with a cache of the tokens
before it. Shapes: `dense`, 3 B in the shape of Llama's; `mixture`, 2.5 B in that of Qwen3's, 64
experts in each block, four of which compute a token; `large`, 39 B, which only `--storage int4`
makes fit. (`13b`, `70b` and `175b` are for the host memory of a machine with a GPU: `make
gpu-check` chooses among them.)

Each system has a process of its own. Ours and accelerate's run in a memory cgroup of `--limit`, so
the page cache that accelerate reads through counts as its memory; ours reads past that cache.
accelerate makes one pass of a turn after the prompt's, ours `--passes`. The bounds are measured in
the same rounds: the disk reads the bytes of a pass in a raw loop (`mixture`: in blocks of an
expert's size), and the same pass is computed with all weights in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quick_values import give_quick_values
from offload.bench.io import best, fill, noise
from offload.bench.io_raw import GRID, Shape, open_loop, try_grid
from offload.bench.record import Kind, Record, Row, Target
from offload.bench.rounds import in_turn, seconds_of
from offload.bench.table import Column, number, print_record
from offload.process.child import Child, Parent
from offload.swap.io.swap_file import SwapFile
from offload.tiers.errors import ConfigError
from offload.tiers.units import parse_bytes

OURS, ACCELERATE, IN_RAM = "ours, all on nvme", "accelerate, disk_offload", "all weights in memory"
DISK, LONGEST = "bound by disk", "the larger bound"
DISK_NBYTES = 2 << 30
CGROUPS = Path("/sys/fs/cgroup/memory")
_OF_EXPERTS = tuple(Shape("threads", depth, 3 << 20) for depth in (4, 6, 8, 12))  # of `mixture`
_SHARD_NBYTES = 1 << 30
_DRAWN = 4_194_301  # values; a prime, so that no two rows or tensors begin with the same ones
_LLAMA = {"model_type": "llama", "vocab_size": 32768, "max_position_embeddings": 4096}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "dense": _LLAMA | {
        "hidden_size": 2560, "intermediate_size": 8704, "num_hidden_layers": 36,
        "num_attention_heads": 20, "num_key_value_heads": 5,
    },
    "mixture": {
        "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 1024,
        "intermediate_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 64,
        "num_experts_per_tok": 4,
    },
    "large": _LLAMA | {
        "hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 56,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    "13b": _LLAMA | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 8,
    },
    "70b": _LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    "175b": _LLAMA | {
        "hidden_size": 12288, "intermediate_size": 40448, "num_hidden_layers": 96,
        "num_attention_heads": 96, "num_key_value_heads": 8,
    },
    "small": _LLAMA | {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip


# ---------------------------------------------------------------- the model
def from_shape(shape: str) -> nn.Module:
    """A model in bf16 on the default device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), tie_word_embeddings=False, **settings)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def on_meta(shape: str) -> nn.Module:
    """The model of `from_shape` without values, on the meta device."""
    with torch.device("meta"):
        return from_shape(shape)


def write_model(shape: str, folder: Path) -> None:
    """Write a folder in transformers' format, shard by shard. Values are drawn once and repeated:
    drawing each of them takes minutes."""
    from safetensors.torch import save_file

    model: Any = on_meta(shape)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    noise_ = torch.empty(_DRAWN, dtype=torch.bfloat16)
    noise_.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    begin = 0
    index: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def write() -> None:
        name = f"model-{len(set(index.values())):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, param in model.named_parameters():
        if param.ndim == 1:
            shard[name] = torch.ones(param.shape, dtype=param.dtype)
        else:
            copies = noise_.repeat(-(-(begin + param.numel()) // _DRAWN))
            shard[name] = copies[begin : begin + param.numel()].view(param.shape)
            begin = (begin + param.numel()) % _DRAWN
        if sum(each.nbytes for each in shard.values()) > _SHARD_NBYTES:
            write()
    write()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


# ---------------------------------------------------------------- a system's process
class Passes:
    """Generates greedily with one model; each turn begins a new batch."""

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, options
        self._device = torch.device(options.get("device", "cpu"))

    def turn(self, bytes_read: Callable[[], int]) -> dict[str, Any]:
        """Seconds and bytes of each pass after the first, which is the prompt's."""
        options = self._options
        generator = torch.Generator().manual_seed(1)
        shape = (options["batch"], options["prompt"])
        tokens = torch.randint(self._model.config.vocab_size, shape, generator=generator)
        tokens = tokens.to(self._device)
        seconds, read, chosen, cache = [], [], [], None
        with torch.inference_mode():
            for _ in range(options["passes"] + 1):
                began, before = time.perf_counter(), bytes_read()
                out = self._model(tokens, past_key_values=cache, logits_to_keep=1)
                tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
                chosen.append(int(tokens.sum()))  # waits for a GPU
                seconds.append(time.perf_counter() - began)
                read.append(bytes_read() - before)
        passes = options["passes"]
        return {
            "seconds": sum(seconds[1:]) / passes,
            "read_nbytes": sum(read[1:]) / passes,
            "chosen": chosen,
            "peak_rss_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def serve(options: Mapping[str, Any], parent: Parent) -> None:
    """Run one system: a turn for every command."""
    with ExitStack() as stack:
        model, bytes_read = _OPENED[options["system"]](options, stack)
        passes = Passes(model, options)
        parent.answer({"parameters": sum(param.numel() for param in model.parameters())})
        for _ in parent.commands():
            parent.answer(passes.turn(bytes_read))


def _read_nothing() -> int:
    return 0


def _ours(options: Mapping[str, Any], stack: ExitStack) -> tuple[Any, Callable[[], int]]:
    join_cgroup(options)
    config: dict[str, Any] = {
        "precision": "bf16", "budget": {"host": options["budget"]},
        "nvme": {"paths": [options["folder"]]}, "placement": {"parameters": "nvme"},
    }  # fmt: skip
    if options["storage"] is not None:
        config["storage"] = {"weights": options["storage"]}
    model = dispatch(options["shape"], options["source"], config, stack)
    return model, bytes_over(model, "nvme read")


def dispatch(shape: str, source: str | None, config: Mapping[str, Any], stack: ExitStack) -> Any:
    """The model of a folder, or one of repeated values if there is no folder; `stack` closes it."""
    import offload

    if source is None:
        model = on_meta(shape)
        give_quick_values(model, 0.02)
    else:
        model = offload.open_pretrained(source)
    model = offload.dispatch(model, config)
    stack.callback(offload.dispatched(model).close)
    return model


def bytes_over(model: Any, link: str) -> Callable[[], int]:
    """A function that returns the number of bytes that have moved over `link` so far."""
    import offload

    owner = offload.dispatched(model)
    return lambda: owner.report().bytes_moved[link]


def _accelerate(options: Mapping[str, Any], stack: ExitStack) -> tuple[Any, Callable[[], int]]:
    """Load the folder's own files, as for models that transformers loads by `device_map`."""
    from accelerate import disk_offload, init_empty_weights

    folder = Path(options["folder"])
    index_for_accelerate(Path(options["source"]), folder)
    join_cgroup(options)
    with init_empty_weights():  # buffers have their values
        model = from_shape(options["shape"])
    return disk_offload(model, folder, torch.device("cpu")), _read_nothing


def _in_ram(options: Mapping[str, Any], stack: ExitStack) -> tuple[Any, Callable[[], int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options["source"], dtype=torch.bfloat16)
    return model.eval(), _read_nothing


_OPENED = {OURS: _ours, ACCELERATE: _accelerate, IN_RAM: _in_ram}


def index_for_accelerate(source: Path, folder: Path) -> None:
    """Write accelerate's index, which names the file of each tensor."""
    from accelerate.utils.offload import save_offload_index
    from safetensors import safe_open

    index: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                index[name] = {"safetensors_file": str(file), "weight_name": name}
    save_offload_index(index, str(folder))


def forget_cached(source: Path) -> None:
    """Drop the files from the page cache: what is cached outside of a cgroup costs it nothing."""
    for file in source.glob("*.safetensors"):
        with file.open("rb") as written:
            os.fsync(written.fileno())
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def join_cgroup(options: Mapping[str, Any]) -> None:
    """Move this process to the cgroup, which limits its memory, page cache included."""
    (Path(options["cgroup"]) / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def memory_cgroup(name: str, limit: str) -> Any:
    """A cgroup with a limit on memory. ConfigError where this process may not make one."""
    folder = CGROUPS / f"offload-{os.getpid()}-{name}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(parse_bytes(limit)))
    except OSError as error:
        raise ConfigError(
            f"{folder}: no memory limit can be set ({error}); run as root where cgroups of "
            "version 1 are mounted"
        ) from error
    try:
        yield folder
    finally:
        folder.rmdir()


# ---------------------------------------------------------------- rounds
class Reads:
    """Raw reads of a file that is written once: what a disk still has to write slows reads down."""

    def __init__(self, folder: Path, opened: ExitStack, grid: Sequence[Shape] = GRID) -> None:
        file = opened.enter_context(SwapFile(folder))
        file.reserve(DISK_NBYTES)
        buffer = noise(max(shape.depth * shape.block_nbytes for shape in grid))
        fill(file, buffer, DISK_NBYTES, lambda text: None)
        tried = try_grid(file, buffer, DISK_NBYTES, lambda text: None, grid)
        shape = best(tried, write=False)
        self._nbytes = DISK_NBYTES // shape.block_nbytes * shape.block_nbytes
        self._loop = open_loop(shape, file, buffer, DISK_NBYTES)
        opened.callback(self._loop.close)

    def bytes_per_s(self) -> float:
        return self._nbytes / seconds_of(lambda: self._loop.run(write=False))


def compare(options: argparse.Namespace, batch: int, source: Path | None, path: Path) -> Record:
    """Measure one batch size: every system once per round, with the bounds."""
    record = Record("generation", {**vars(options), "batch": batch})
    systems = list(options.systems)
    with ExitStack() as stack:
        disk = Reads(path, stack, _OF_EXPERTS if options.shape == "mixture" else GRID)
        children = {}
        for number_, system in enumerate(systems):
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path)))
            cgroup = None
            if system != IN_RAM:
                cgroup = stack.enter_context(memory_cgroup(str(number_), options.limit))
            child = Child(
                system, "benchmarks.generation:serve",
                {
                    "system": system, "shape": options.shape, "budget": options.budget,
                    "storage": options.storage, "batch": batch, "prompt": options.prompt,
                    "passes": 1 if system == ACCELERATE else options.passes,
                    "folder": str(home), "cgroup": str(cgroup),
                    "source": None if source is None else str(source),
                },
                home,
            )  # fmt: skip
            stack.callback(child.kill)
            record.details["parameters"] = child.answer()["parameters"]
            children[system] = child
        if source is not None:
            forget_cached(source)
        turns, speeds = take_turns(children, disk, options.rounds)
    _add_rows(record, turns, speeds, options)
    return record


Turns = Mapping[str, Sequence[Mapping[str, Any]]]  # by system, those of each round


def take_turns(
    children: Mapping[str, Child], disk: Reads, rounds: int
) -> tuple[Turns, Sequence[float]]:
    """The answers of each system per round, and the disk's bytes per second; ends the systems."""
    turns: dict[str, list[dict[str, Any]]] = {system: [] for system in children}
    speeds = []
    for round_, order in in_turn(list(children), rounds):
        speed = disk.bytes_per_s()
        for system in order:
            children[system].send("turn")
            found = children[system].answer()
            if round_ >= 0:
                turns[system].append(found)
        if round_ >= 0:
            speeds.append(max(speed, disk.bytes_per_s()))
    for child in children.values():
        child.close()
    return turns, speeds


def add_rows(
    record: Record, turns: Turns, kinds: Mapping[str, Kind], batch: int, speeds: Sequence[float]
) -> None:  # fmt: skip
    """Add a row per system, one for the time that the disk needs for our bytes, and one for the
    larger of that and of the pass with everything in memory, if that was measured."""
    names = ("seconds", "read_nbytes", "peak_rss_nbytes")
    for system, found in turns.items():
        measures = {name: [float(each[name]) for each in found] for name in names}
        measures["tokens_per_s"] = [batch / seconds for seconds in measures["seconds"]]
        record.rows.append(Row(system, kinds[system], measures))
    of_kind = {row.kind: row for row in record.rows}
    read = of_kind[Kind.OURS].values("read_nbytes")
    waits = [nbytes / speed for nbytes, speed in zip(read, speeds, strict=True)]
    record.rows.append(Row(DISK, Kind.LIMIT, {"seconds": waits}))
    computing = of_kind.get(Kind.LIMIT)
    bounds = [waits] if computing is None else [waits, computing.values("seconds")]
    longest = [max(each) for each in zip(*bounds, strict=True)]
    record.rows.append(Row(LONGEST, Kind.LIMIT, {"seconds": longest}))
    ours, *others = ([each["chosen"] for each in found] for found in turns.values())
    pairs = [pair for other in others for pair in zip(ours, other, strict=True)]
    # where one makes fewer passes, of those that both make
    same = all(a == b for mine, its in pairs for a, b in zip(mine, its, strict=False))
    record.notes.append("the same tokens from all systems" if same else "TOKENS DIFFER")


def _add_rows(
    record: Record, turns: Mapping[str, Sequence[Mapping[str, Any]]], speeds: Sequence[float],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    batch = record.options["batch"]
    kinds = {OURS: Kind.OURS, ACCELERATE: Kind.PEER, IN_RAM: Kind.LIMIT}
    add_rows(record, turns, kinds, batch, speeds)
    least = 0.9 if batch == 1 and options.shape == "dense" else 0.85
    record.compare(LONGEST, OURS, "seconds", Target(0.8 if options.shape == "mixture" else least))
    beside = 8.0 if options.shape == "mixture" else 2.0 if batch == 1 else 1.0
    record.compare(ACCELERATE, OURS, "seconds", Target(beside))
    record.note_rounds(options.rounds)
    record.notes.append(
        f"{record.details['parameters'] / 1e9:.2f} B parameters, bf16"
        f"{'' if options.storage is None else f', stored as {options.storage}'}, batch {batch}, "
        f"prompts of {options.prompt} tokens, {options.passes} passes a turn; budget.host "
        f"{options.budget}, memory of a process with its page cache {options.limit}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="dense")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=4)
    parser.add_argument("--passes", type=int, default=3, help="of a turn, after the prompt's")
    parser.add_argument("--budget", default="1536MiB")
    parser.add_argument("--limit", default="3GiB")
    parser.add_argument("--storage", default=None)
    parser.add_argument("--without", choices=("accelerate", "ram"), nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    options.systems = [OURS]
    options.systems += [] if "accelerate" in options.without else [ACCELERATE]
    options.systems += [] if "ram" in options.without else [IN_RAM]
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        source = Path(folder) if options.systems != [OURS] else None
        if source is not None:
            write_model(options.shape, source)
        for batch in options.batch:
            record = compare(options, batch, source, options.path)
            columns = [
                Column("s/pass", number("seconds")), Column("tokens/s", number("tokens_per_s")),
                Column("GB read", number("read_nbytes", 1e9)),
                Column("peak GiB", number("peak_rss_nbytes", 2**30)),
            ]  # fmt: skip
            print_record(record, columns)
            if options.json is not None:
                record.options = {key: str(value) for key, value in record.options.items()}
                record.write(options.json.with_suffix(f".{batch}.json"))


if __name__ == "__main__":
    main()
