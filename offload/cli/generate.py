"""`offload generate`: stream text from a folder's model, and report the time and memory."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

import offload
from offload.cli.errors import located
from offload.config import OffloadConfig
from offload.display.console import PlainConsole
from offload.display.plain_text import without_controls
from offload.integrations.transformers.text_generation import (
    Encoded,
    Sampling,
    Stream,
    encode,
    fitting_tokens,
    generate,
    load_tokenizer,
    open_generating,
)
from offload.planning.choice.durations import duration, three_digits
from offload.process.interrupts import noted_interrupts
from offload.process.machine import peak_rss_nbytes, rss_nbytes
from offload.tiers.errors import ConfigError, PathError
from offload.train.summary import MemoryUse, moved_line, summary_table, waits_line

_STOPPING = "Ctrl-C: finishing this token; press Ctrl-C again to quit at once"


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    folder: Path
    prompts: Sequence[str]  # or @FILE
    file: Path | None
    overrides: Sequence[str]
    new_tokens: int | None
    sampling: Sampling
    seed: int | None
    chat: bool


def run_generation(asked: Asked) -> None:
    """Generate; text goes to standard output, everything else to standard error. Raise
    KeyboardInterrupt after a Ctrl-C, behind the closing table."""
    if asked.new_tokens is not None and asked.new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {asked.new_tokens}: at least 1")
    asked.sampling.check()
    prompts = [_text_of(prompt) for prompt in asked.prompts]
    config = OffloadConfig.load(asked.file or {}, asked.overrides)
    place = nullcontext() if asked.file is None else located(asked.file, asked.overrides)
    with place:
        _generate(asked, config, prompts)


def _text_of(prompt: str) -> str:
    """Return the prompt, or the text of its file. Raise ConfigError if it is empty, PathError if
    there is no such file."""
    text = prompt
    if prompt.startswith("@"):
        path = Path(prompt[1:])
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"--prompt {prompt}: the file is no text in UTF-8") from None
        except OSError as error:
            raise PathError(f"--prompt {prompt}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise ConfigError(f"--prompt {prompt!r}: is empty; give it some text")
    return text


def _generate(asked: Asked, config: OffloadConfig, prompts: Sequence[str]) -> None:
    console, baseline_nbytes = PlainConsole(stderr=True), rss_nbytes()

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    model = open_generating(asked.folder)
    tokenizer = load_tokenizer(asked.folder)
    encoded = encode(tokenizer, prompts, chat=asked.chat)
    new_tokens = fitting_tokens(model, encoded.length, asked.new_tokens)
    torch.manual_seed(config.seed if asked.seed is None else asked.seed)
    several = encoded.batch > 1
    _replace_unknown_letters()
    stream = Stream(tokenizer, None if several else _write, say, new_tokens)
    with noted_interrupts() as interrupts:
        offload.dispatch(model, config)
        with offload.dispatched(model) as dispatched:
            with interrupts.put_off(_STOPPING):
                new = generate(
                    model, encoded, stream, asked.sampling, stream.most,
                    padding=tokenizer.pad_token_id, device=dispatched.device,
                    stops=lambda: interrupts.seen,
                )  # fmt: skip
            if several:
                _write_all(tokenizer.batch_decode(new, skip_special_tokens=True))
            else:
                _write("\n")
            report, memory = dispatched.report(), MemoryUse(baseline_nbytes, peak_rss_nbytes())
            for line in ("", *_rates(stream, encoded)):
                say(line)
            console.print(summary_table(dispatched.config, report, memory, None))
            say(moved_line(report.bytes_moved))
            say(waits_line(report.waits))
        interrupts.check()


def _rates(stream: Stream, encoded: Encoded) -> list[str]:
    """Return the tokens per second of both kinds of pass."""
    times, lines = stream.times, []
    if times.prefill_s is not None:
        rate = encoded.batch * encoded.length / times.prefill_s
        lines.append(
            f"prefill: {encoded.batch} x {encoded.length:,} tokens in {duration(times.prefill_s)}, "
            f"{three_digits(rate)} tokens/s"
        )
    if times.pass_s is not None:
        count = len(times.tokens_s)
        lines.append(
            f"decoding: {encoded.batch} x {count:,} tokens, {duration(times.pass_s)} each, "
            f"{three_digits(encoded.batch / times.pass_s)} tokens/s"
        )
    return lines


def _replace_unknown_letters() -> None:
    """Replace characters that the encoding of standard output does not have."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _write(text: str) -> None:
    """Write the model's text; on a terminal, without control characters that move the cursor."""
    sys.stdout.write(without_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _write_all(texts: Sequence[str]) -> None:
    for number, text in enumerate(texts, 1):
        _write(f"--- {number} of {len(texts)} ---\n{text}\n")
