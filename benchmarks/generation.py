"""Passes of a language model whose weights are on disk, beside the bounds of disk and arithmetic.

    python -m benchmarks.generation [--shape dense] [--batch 1 32 256] [--json FILE]

A pass computes the next token of every sequence of the batch, each with a cache of the tokens
before it. Shapes: `dense`, 3 B in the shape of Llama's; `mixture`, 2.5 B in that of Qwen3's, 64
experts in each block, four of which compute a token; `small` is a quick look.

Each system has a process of its own. The bounds are measured in the same rounds: the disk reads the
bytes of a pass in a raw loop (`mixture`: in blocks of an expert's size), and the same pass is
computed with all weights in memory.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.bench.io_raw import raw_loop
from offload.bench.record import Kind, Record, Row, interleaved, seconds_of
from offload.bench.table import Column, number, print_record
from offload.process.child import Child, Parent

OFFLOAD, IN_RAM = "offload, all on nvme", "all weights in memory"
DISK, LONGEST = "bound by disk", "the larger bound"
DISK_NBYTES = 2 << 30
_BLOCK_NBYTES = {"mixture": 3 << 20}  # of the raw loop: an expert; else as `raw_loop` has it
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


# Billions of fresh normal values take a CPU minutes, and no speed depends on them: products of
# random numbers draw the power of random numbers, whether or not they repeat.
_PATTERN_NUMEL = (1 << 22) - 3  # odd: neighbouring rows never get the same values
_SEED = 1


def give_quick_values(model: nn.Module) -> None:
    """Let `model`, on the meta device, be initialised from one block of normal values, repeated;
    norms start at 1. Buffers of transformers' models are initialised as usual."""
    generator = torch.Generator().manual_seed(_SEED)
    pattern = torch.randn(_PATTERN_NUMEL, generator=generator) * 0.02

    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            if param.ndim == 1:
                param.fill_(1.0)
            else:
                param.zero_()  # the one write that is counted, as an initialiser's
                _repeat(pattern, param.data.view(-1))

    def fill_or(theirs: Any, module: nn.Module) -> None:
        fill(module) if next(module.parameters(recurse=False), None) is not None else theirs(module)

    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters = partial(fill, module)  # type: ignore[assignment]
        if hasattr(module, "_init_weights"):  # transformers': of every module in it
            module._init_weights = partial(fill_or, module._init_weights)  # type: ignore[assignment]


def _repeat(pattern: torch.Tensor, flat: torch.Tensor) -> None:
    for start in range(0, flat.numel(), pattern.numel()):
        part = flat[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])


# ---------------------------------------------------------------- a system's process
class Passes:
    """Generates greedily with one model; each turn begins a new batch."""

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, options

    def turn(self, bytes_read: Callable[[], int]) -> dict[str, Any]:
        """Seconds and bytes of each pass after the first, which is the prompt's."""
        options = self._options
        generator = torch.Generator().manual_seed(1)
        shape = (options["batch"], options["prompt"])
        tokens = torch.randint(self._model.config.vocab_size, shape, generator=generator)
        tokens = tokens.to(self._model.device)
        seconds, read, chosen, cache = [], [], [], None
        with torch.inference_mode():
            for _ in range(options["passes"] + 1):
                began, before = time.perf_counter(), bytes_read()
                out = self._model(tokens, past_key_values=cache, logits_to_keep=1)
                tokens, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
                chosen.append(int(tokens.sum()))
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


def _offload(options: Mapping[str, Any], stack: ExitStack) -> tuple[Any, Callable[[], int]]:
    config: dict[str, Any] = {
        "precision": "bf16", "budget": {"host": options["budget"]},
        "nvme": {"paths": [options["folder"]]}, "placement": {"parameters": "nvme"},
    }  # fmt: skip
    if options["storage"] is not None:
        config["storage"] = {"weights": options["storage"]}
    import offload

    model = dispatch(options["shape"], config, stack)
    return model, lambda: offload.dispatched(model).report().bytes_moved["nvme read"]


def dispatch(shape: str, config: Mapping[str, Any], stack: ExitStack) -> Any:
    """A model of repeated values; `stack` closes it."""
    import offload

    with torch.device("meta"):
        model = from_shape(shape)
    give_quick_values(model)
    model = offload.dispatch(model, config)
    stack.callback(offload.dispatched(model).close)
    return model


def _in_ram(options: Mapping[str, Any], stack: ExitStack) -> tuple[Any, Callable[[], int]]:
    with ExitStack() as closed:  # which gives the model its parameters back
        config = {"precision": "bf16", "placement": {"parameters": "host"}}
        model = dispatch(options["shape"], config, closed)
    return model, lambda: 0


_OPENED = {OFFLOAD: _offload, IN_RAM: _in_ram}


# ---------------------------------------------------------------- rounds
def compare(options: argparse.Namespace, batch: int) -> Record:
    """Measure one batch size: every system once per round, with the bounds."""
    record = Record("generation", {**vars(options), "batch": batch})
    with ExitStack() as stack:
        block = _BLOCK_NBYTES.get(options.shape, 16 << 20)
        disk = raw_loop(options.path, DISK_NBYTES, print, stack, block)
        runs: dict[str, Callable[[], Any]] = {
            DISK: lambda: disk.nbytes / seconds_of(partial(disk.run, write=False))
        }
        children = []
        for system in (OFFLOAD, IN_RAM):
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.path)))
            given = {
                "system": system, "shape": options.shape, "budget": options.budget,
                "storage": options.storage, "batch": batch, "prompt": options.prompt,
                "passes": options.passes, "folder": str(home),
            }  # fmt: skip
            child = Child(system, "benchmarks.generation:serve", given, home)
            stack.callback(child.kill)
            record.details["parameters"] = child.answer()["parameters"]
            runs[system] = partial(_turn, child)
            children.append(child)
        turns = interleaved(runs, options.rounds, print)
        for child in children:
            child.close()
    speeds = turns.pop(DISK)
    _add_rows(record, turns, speeds, options)
    return record


def _turn(child: Child) -> dict[str, Any]:
    child.send("turn")
    result: dict[str, Any] = child.answer()
    return result


def _add_rows(
    record: Record, turns: Mapping[str, Sequence[Mapping[str, Any]]], speeds: Sequence[float],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    """Add a row per system, one for the time that the disk needs for the bytes that offload read,
    and one for the larger of that and of the pass with everything in memory."""
    batch, kinds = record.options["batch"], {OFFLOAD: Kind.OFFLOAD, IN_RAM: Kind.LIMIT}
    for system, results in turns.items():
        names = ("seconds", "read_nbytes", "peak_rss_nbytes")
        measures = {name: [float(each[name]) for each in results] for name in names}
        measures["tokens_per_s"] = [batch / seconds for seconds in measures["seconds"]]
        record.rows.append(Row(system, kinds[system], measures))
    read = record.rows[0].values("read_nbytes")
    waits = [nbytes / speed for nbytes, speed in zip(read, speeds, strict=True)]
    bounds = [waits, *(row.values("seconds") for row in record.rows[1:])]
    longest = [max(each) for each in zip(*bounds, strict=True)]
    for name, seconds in ((DISK, waits), (LONGEST, longest)):
        record.rows.append(Row(name, Kind.LIMIT, {"seconds": seconds}))
    chosen = [[each["chosen"] for each in results] for results in turns.values()]
    same = all(each == chosen[0] for each in chosen)
    record.notes.append("the same tokens from all systems" if same else "TOKENS DIFFER")
    record.compare(LONGEST, OFFLOAD, "seconds")
    record.note_rounds(options.rounds)
    record.notes.append(
        f"{record.details['parameters'] / 1e9:.2f} B parameters, bf16"
        f"{'' if options.storage is None else f', stored as {options.storage}'}, batch {batch}, "
        f"prompts of {options.prompt} tokens, {options.passes} passes a turn; budget.host "
        f"{options.budget}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="dense")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=4)
    parser.add_argument("--passes", type=int, default=3, help="passes per turn, after the prompt's")
    parser.add_argument("--budget", default="1536MiB")
    parser.add_argument("--storage", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    for batch in options.batch:
        record = compare(options, batch)
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
