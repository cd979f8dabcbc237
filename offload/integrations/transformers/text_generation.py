"""Text generation by a transformers model: its tokenizer, its `generate`, each token's time.

Everything comes from one local folder: nothing is fetched, and no code of the folder is run.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from offload.checkpoint.foreign.model_files import CONFIG, read_json
from offload.integrations.transformers.pretrained import open_pretrained
from offload.tiers.errors import ConfigError, UnsupportedError


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder. Raise ConfigError if it has none that transformers
    reads."""
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # any, of the libraries that read it
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder}: its tokenizer cannot be read: {said}") from error


def encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Return a prompt's tokens [1, length]. Raise ConfigError if it has none."""
    ids: torch.Tensor = tokenizer([prompt], return_tensors="pt")["input_ids"]
    if not prompt.strip() or not ids.numel():
        raise ConfigError(
            f"--prompt {prompt!r}: has no tokens; give it some text, and the folder a tokenizer"
        )
    return ids


def open_generating(folder: Path) -> Any:
    """Open the model of a folder, with its weights still in files. Raise UnsupportedError for a
    model that does not generate text, ConfigError as `open_pretrained` does."""
    transformers.utils.logging.disable_progress_bar()  # nothing is read yet: it would fill at once
    model: Any = open_pretrained(folder)
    if not model.can_generate():
        named = ", ".join(read_json(folder / CONFIG).get("architectures") or ()) or "its class"
        raise UnsupportedError(
            f"{folder}: {named} generates no text (an encoder, or a head for another task); name "
            "the folder of a causal language model"
        )
    return model


def fitting_tokens(model: Any, length: int, new_tokens: int) -> int:
    """Return `new_tokens`, or as many as the model's context leaves behind a prompt of `length`.
    Raise ConfigError if it leaves none."""
    settings = model.config.get_text_config(decoder=True)
    context: int | None = getattr(settings, "max_position_embeddings", None)
    if context is None or model.config.is_encoder_decoder:  # whose decoder begins anew
        return min(new_tokens, context or new_tokens)
    if length >= context:
        raise ConfigError(
            f"--prompt: its {length:,} tokens leave none of the {context:,} that the model was "
            "made for; shorten the prompt"
        )
    return min(new_tokens, context - length)


class Stream(transformers.TextStreamer):  # type: ignore[misc]
    """Writes the text of tokens as they come from `generate`, and notes their times."""

    next_tokens_are_prompt: bool

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.began_s = 0.0  # on time.perf_counter, as the others
        self.tokens_s: list[float] = []  # of each pass, which gives a token or more
        self.tokens = 0
        self._write = write

    @property
    def prefill_s(self) -> float | None:
        """Seconds until the first token; None without one."""
        return self.tokens_s[0] - self.began_s if self.tokens_s else None

    @property
    def pass_s(self) -> float | None:
        """The median seconds of a pass after the first; None without one."""
        pairs = zip(self.tokens_s, self.tokens_s[1:], strict=False)
        gaps = [after - before for before, after in pairs]
        return statistics.median(gaps) if gaps else None

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.tokens_s.append(time.perf_counter())
            self.tokens += value.numel()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def generate(
    model: Any, ids: torch.Tensor, stream: Stream, new_tokens: int, *, greedy: bool,
    device: torch.device, lookup: int | None = None,
) -> None:  # fmt: skip
    """Generate behind a prompt, into `stream`; if not `greedy` as the folder's
    generation_config.json says. `lookup`: tokens that a pass tries, found in the text so far."""
    likeliest = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    ids = ids.to(device)
    stream.began_s = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
            streamer=stream, prompt_lookup_num_tokens=lookup, **(likeliest if greedy else {}),
        )  # fmt: skip
