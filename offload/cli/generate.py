"""`offload generate`: stream text from a folder's model, and report the time and memory."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.cli.errors import located
from offload.config import OffloadConfig
from offload.display.plain_text import without_controls
from offload.tiers.errors import ConfigError, PathError

if TYPE_CHECKING:
    from offload.inference import Dispatched
    from offload.integrations.transformers.text_generation import Encoded, Sampling, Stream
    from offload.process.interrupts import Interrupts

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
        _Generation(asked, config).run(prompts)


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


class _Generation:
    def __init__(self, asked: Asked, config: OffloadConfig) -> None:
        from offload.display.console import PlainConsole
        from offload.process.machine import rss_nbytes

        self._asked = asked
        self._config = config
        self._console = PlainConsole(stderr=True)
        self._baseline_nbytes = rss_nbytes()

    def run(self, prompts: Sequence[str]) -> None:
        import torch

        import offload
        from offload.integrations.transformers.text_generation import (
            Stream,
            encode,
            fitting_tokens,
            load_tokenizer,
            open_generating,
        )
        from offload.process.interrupts import noted_interrupts

        asked, folder = self._asked, self._asked.folder
        model = open_generating(folder)
        tokenizer = load_tokenizer(folder)
        encoded = encode(tokenizer, prompts, chat=asked.chat)
        new_tokens = fitting_tokens(model, encoded.length, asked.new_tokens)
        torch.manual_seed(self._config.seed if asked.seed is None else asked.seed)
        several = encoded.batch > 1
        _replace_unknown_letters()
        stream = Stream(tokenizer, None if several else _write, self._say, new_tokens)
        with noted_interrupts() as interrupts:
            offload.dispatch(model, self._config)
            with offload.dispatched(model) as dispatched:
                new = self._tokens(model, encoded, stream, dispatched, interrupts, tokenizer)
                if several:
                    _write_all(tokenizer.batch_decode(new, skip_special_tokens=True))
                self._close(stream, encoded, dispatched)
            interrupts.check()

    def _tokens(
        self, model: Any, encoded: Encoded, stream: Stream, dispatched: Dispatched,
        interrupts: Interrupts, tokenizer: Any,
    ) -> Any:  # fmt: skip
        """Return the new tokens: as many as were generated before a Ctrl-C."""
        from offload.integrations.transformers.text_generation import generate

        with interrupts.put_off(_STOPPING):
            found = generate(
                model, encoded, stream, self._asked.sampling, stream.most,
                padding=tokenizer.pad_token_id, device=dispatched.device,
                stops=lambda: interrupts.seen,
            )  # fmt: skip
        if encoded.batch == 1:
            _write("\n")
        return found

    def _close(self, stream: Stream, encoded: Encoded, dispatched: Dispatched) -> None:
        from offload.process.machine import peak_rss_nbytes
        from offload.train.summary import MemoryUse, moved_line, summary_table, waits_line

        report, rss = dispatched.report(), peak_rss_nbytes()
        self._say("")
        for line in _rates(stream, encoded):
            self._say(line)
        memory = MemoryUse(self._baseline_nbytes, rss)
        self._console.print(summary_table(dispatched.config, report, memory, None))
        self._say(moved_line(report.bytes_moved))
        self._say(waits_line(report.waits))

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def _rates(stream: Stream, encoded: Encoded) -> list[str]:
    """Return the tokens per second of both kinds of pass."""
    from offload.planning.choice.durations import duration, three_digits

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
