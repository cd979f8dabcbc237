"""Passes of a language model whose KV cache is on disk, several times as large as the memory that
it has, beside what disk and arithmetic alone take.

    python -m benchmarks.kv_cache [--times 4] [--batch 16] [--prompt 1024] [--json FILE]

The weights are in RAM. A pass computes the next token of every sequence and reads the cache of
every layer: `--times` what `budget.host` leaves beside the weights. The bounds are measured in the
same rounds: the disk reads the bytes of such a pass in a raw loop, and the same model computes it
with transformers' own cache in RAM. Each system goes on with one batch, in a process of its own,
and has to choose the same tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation import LONGEST, Reads, add_rows, take_turns
from offload.bench.record import Kind, Record, Target
from offload.bench.table import Column, number, print_record
from offload.process.child import Child, Parent

OURS, IN_RAM = "ours, cache on nvme", "cache in memory"
_PROMPT_TOKENS = 256  # are computed at once: bounds activations


def from_shape(options: Mapping[str, Any]) -> Any:
    """A Llama with drawn weights in bf16, as many heads of keys as of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=options["hidden"], intermediate_size=options["hidden"],
        num_hidden_layers=options["layers"], num_attention_heads=options["hidden"] // 64,
        num_key_value_heads=options["hidden"] // 64, max_position_embeddings=1 << 20,
        initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def cache_nbytes(options: Mapping[str, Any]) -> int:
    """The number of bytes of the cache of the prompts, in bf16."""
    tokens: int = options["batch"] * options["prompt"]
    return int(tokens * options["layers"] * 2 * options["hidden"] * 2)


# ---------------------------------------------------------------- a system's process
class Batch:
    """Generates greedily, without end."""

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        self._model, self._cache = model, None
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1024, (options["batch"], options["prompt"]), generator=generator)
        for some in prompts.split(_PROMPT_TOKENS, dim=1):
            self._next(some)

    def _next(self, tokens: torch.Tensor) -> None:
        with torch.inference_mode():
            out = self._model(tokens, past_key_values=self._cache, logits_to_keep=1)
            self._tokens, self._cache = out.logits[:, -1:].argmax(-1), out.past_key_values

    def turn(self, passes: int, bytes_read: Callable[[], int]) -> dict[str, Any]:
        """The seconds and bytes of the passes, and the tokens chosen."""
        began, before, chosen = time.perf_counter(), bytes_read(), []
        for _ in range(passes):
            self._next(self._tokens)
            chosen.append(self._tokens.flatten().tolist())
        return {
            "seconds": (time.perf_counter() - began) / passes,
            "read_nbytes": (bytes_read() - before) / passes,
            "chosen": chosen,
            "peak_rss_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def serve(options: Mapping[str, Any], parent: Parent) -> None:
    """Run one system: a turn for every command."""
    import offload

    model = from_shape(options)
    with ExitStack() as stack:
        bytes_read: Callable[[], int] = int
        if options["system"] == OURS:
            weights = sum(param.nbytes for param in model.parameters())
            model = offload.dispatch(model, {
                "precision": "bf16", "placement": {"parameters": "host", "kv": "nvme"},
                "budget": {"host": weights + int(cache_nbytes(options) / options["times"])},
                "nvme": {"paths": [options["folder"]]}, "kv": {"dtype": options["dtype"]},
            })  # fmt: skip
            ours = offload.dispatched(model)
            stack.callback(ours.close)
            bytes_read = lambda: ours.report().bytes_moved["nvme read"]  # noqa: E731
        batch = Batch(model, options)
        parent.answer({"weights": sum(param.numel() for param in model.parameters())})
        for _ in parent.commands():
            parent.answer(batch.turn(options["passes"], bytes_read))


# ---------------------------------------------------------------- rounds
def compare(options: argparse.Namespace) -> Record:
    """Measure every system once per round, with the bounds."""
    record = Record("kv_cache", {**vars(options), "path": str(options.path)})
    systems = [OURS, IN_RAM]
    with ExitStack() as stack:
        disk = Reads(options.path, stack)
        children = {}
        for system in systems:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.path)))
            given = {**vars(options), "system": system, "folder": str(home)}
            given = {name: value for name, value in given.items() if name not in ("path", "json")}
            child = Child(system, "benchmarks.kv_cache:serve", given, home)
            stack.callback(child.kill)
            record.details["weights"] = child.answer()["weights"]
            children[system] = child
        turns, speeds = take_turns(children, disk, options.rounds)
    add_rows(record, turns, {OURS: Kind.OURS, IN_RAM: Kind.LIMIT}, options.batch, speeds)
    record.compare(LONGEST, OURS, "seconds", Target(0.8))
    record.note_rounds(options.rounds)
    record.notes.append(
        f"{options.layers} layers of {options.hidden}, {record.details['weights'] / 1e6:.0f} M "
        f"weights in RAM, bf16; batch {options.batch}, prompts of {options.prompt} tokens, "
        f"{options.passes} passes a turn; {cache_nbytes(vars(options)) / 2**30:.2f} GiB of keys "
        f"and values, {options.times:g} x what budget.host leaves to them"
        f"{'' if options.dtype == 'auto' else f', stored as {options.dtype}'}"
    )
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=float, default=4.0, help="the cache over its memory")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--passes", type=int, default=4, help="of a turn")
    parser.add_argument("--dtype", default="auto", help="kv.dtype")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    record = compare(options)
    columns = [
        Column("s/pass", number("seconds")), Column("tokens/s", number("tokens_per_s")),
        Column("GB read", number("read_nbytes", 1e9)),
        Column("peak GiB", number("peak_rss_nbytes", 2**30)),
    ]  # fmt: skip
    print_record(record, columns)
    if options.json is not None:
        record.options = json.loads(json.dumps(record.options, default=str))
        record.write(options.json)


if __name__ == "__main__":
    main()
