"""`offload generate`: stream text from a folder's model, and report the time and memory."""

import io
import sys
from pathlib import Path

import torch

import offload
from offload.config import OffloadConfig
from offload.display.console import PlainConsole
from offload.display.plain_text import without_controls
from offload.display.words import duration, three_digits
from offload.integrations.transformers.text_generation import (
    Stream,
    encode,
    fitting_tokens,
    generate,
    load_tokenizer,
    open_generating,
)
from offload.process.machine import peak_rss_nbytes, rss_nbytes
from offload.train.summary import moved_line, summary_table, waits_line


def run_generation(
    folder: Path, prompt: str, config: OffloadConfig, new_tokens: int, *, greedy: bool,
    lookup: int | None,
) -> None:  # fmt: skip
    """Generate; text goes to standard output, everything else to standard error."""
    console, baseline_nbytes = PlainConsole(stderr=True), rss_nbytes()
    model = open_generating(folder)
    tokenizer = load_tokenizer(folder)
    ids = encode(tokenizer, prompt)
    new_tokens = fitting_tokens(model, ids.numel(), new_tokens)
    torch.manual_seed(config.seed)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that its encoding does not have
    stream = Stream(tokenizer, _write)
    offload.dispatch(model, config)
    with offload.dispatched(model) as dispatched:
        generate(
            model, ids, stream, new_tokens, greedy=greedy, device=dispatched.device, lookup=lookup
        )
        _write("\n")
        report, peak_nbytes = dispatched.report(), peak_rss_nbytes()
        for line in ("", *_rates(stream, ids.numel())):
            console.print(line, soft_wrap=True)
        console.print(summary_table(dispatched.config, report, baseline_nbytes, peak_nbytes, None))
        console.print(moved_line(report.bytes_moved), soft_wrap=True)
        console.print(waits_line(report.waits), soft_wrap=True)


def _rates(stream: Stream, length: int) -> list[str]:
    """Return the tokens per second of both kinds of pass."""
    lines = []
    if stream.prefill_s is not None:
        lines.append(
            f"prefill: {length:,} tokens in {duration(stream.prefill_s)}, "
            f"{three_digits(length / stream.prefill_s)} tokens/s"
        )
    if stream.pass_s is not None:
        each = stream.tokens / len(stream.tokens_s)
        several = f"{three_digits(each)} a pass, " if each > 1 else ""
        lines.append(
            f"decoding: {stream.tokens:,} tokens, {several}passes of {duration(stream.pass_s)}, "
            f"{three_digits(each / stream.pass_s)} tokens/s"
        )
    return lines


def _write(text: str) -> None:
    """Write the model's text; on a terminal, without control characters that move the cursor."""
    sys.stdout.write(without_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
