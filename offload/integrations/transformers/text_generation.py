"""Text generation by a transformers model: its tokenizer, its `generate`, each token's time.

Everything comes from one local folder: nothing is fetched, and no code of the folder is run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from offload.checkpoint.foreign.model_files import CONFIG, read_json
from offload.display.words import about
from offload.integrations.transformers.pretrained import open_pretrained
from offload.tiers.errors import ConfigError, UnsupportedError

USUAL_NEW_TOKENS = 128
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json",
    "vocab.txt", "tekken.json",
)  # fmt: skip
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_QUIET_S = 10.0  # without a line, where text comes at the end


@dataclass(frozen=True)
class Sampling:
    """The way tokens are chosen; None: according to the folder's generation_config.json."""

    greedy: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def check(self) -> None:
        """Raise ConfigError, naming the option, for a value that makes no sense."""
        if self.temperature is not None and not self.temperature >= 0:
            raise ConfigError(f"--temperature {self.temperature}: write 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k {self.top_k}: at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p}: write a number above 0, at most 1")
        given = {"--temperature": self.temperature, "--top-k": self.top_k, "--top-p": self.top_p}
        for option, value in given.items():
            if self.greedy and value is not None:
                raise ConfigError(f"{option} {value}: --greedy samples nothing; leave one out")

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `generate`."""
        if self.greedy or self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        named = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        given = {name: value for name, value in named.items() if value is not None}
        return {"do_sample": True, **given} if given else {}


@dataclass(frozen=True)
class Encoded:
    """Prompts as tokens."""

    ids: torch.Tensor  # [batch, longest], from the left as long as the longest
    mask: torch.Tensor  # 1 where there is a token of a prompt

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        return self.ids.shape[1]


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, with a token to pad with if it has one for the end. Raise
    ConfigError if the folder has none that transformers reads."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"{folder} has no tokenizer (none of {', '.join(_TOKENIZER_FILES[:4])}, ...); "
            "tokenizer.save_pretrained(FOLDER) writes one"
        )
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # any, of the libraries that read it
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder}: its tokenizer cannot be read: {said}") from error
    if found.pad_token is None:
        found.pad_token = found.eos_token
    return found


def encode(tokenizer: Any, prompts: Sequence[str], *, chat: bool) -> Encoded:
    """Encode prompts; with `chat` each as a user's turn, before the model's. Raise ConfigError for
    a prompt without tokens, or if the tokenizer lacks what is needed."""
    where = tokenizer.name_or_path
    texts = list(prompts)
    if chat:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"--chat: the tokenizer of {where} has no chat template; leave --chat out"
            )
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    if len(texts) > 1 and tokenizer.pad_token is None:
        raise ConfigError(
            f"{where}: its tokenizer has neither a padding token nor one for the end, as several "
            "prompts need; give one at a time"
        )
    # a template has the special tokens already
    found = tokenizer(
        texts, add_special_tokens=not chat, padding=len(texts) > 1, padding_side="left",
        return_tensors="pt",
    )  # fmt: skip
    encoded = Encoded(found["input_ids"], found["attention_mask"])
    for number, tokens in enumerate(encoded.mask.sum(1).tolist(), 1):
        if not tokens:
            raise ConfigError(f"--prompt: prompt {number} has no tokens; give it some text")
    return encoded


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


def fitting_tokens(model: Any, length: int, asked: int | None) -> int:
    """Return the number of tokens to generate behind a prompt of `length`: the number asked for, by
    default `USUAL_NEW_TOKENS` or the rest of the context. Raise ConfigError if a sequence would get
    longer than the model's context."""
    settings = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        length = 0  # the decoder begins anew
    known = [getattr(settings, name, None) for name in _CONTEXT]
    context = next((size for size in known if isinstance(size, int) and size > 0), None)
    left = USUAL_NEW_TOKENS if context is None else context - length
    new_tokens = min(USUAL_NEW_TOKENS, max(1, left)) if asked is None else asked
    if context is None or new_tokens <= left:
        return new_tokens
    raise ConfigError(
        f"--max-new-tokens {new_tokens}: behind a prompt of {length:,} tokens that is more than "
        f"the {context:,} that the model was made for; "
        + (f"write at most {left:,}" if left > 0 else "shorten the prompt")
    )


@dataclass
class Times:
    """The times at which tokens came, on `time.perf_counter`."""

    began_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)

    @property
    def prefill_s(self) -> float | None:
        """Seconds until the first token; None without one."""
        return self.tokens_s[0] - self.began_s if self.tokens_s else None

    @property
    def pass_s(self) -> float | None:
        """The median seconds from one token to the next; None with fewer than two tokens."""
        pairs = zip(self.tokens_s, self.tokens_s[1:], strict=False)
        gaps = [after - before for before, after in pairs]
        return statistics.median(gaps) if gaps else None


class Stream(transformers.TextStreamer):  # type: ignore[misc]
    """Receives tokens from `generate`; a single sequence's text is written word by word."""

    next_tokens_are_prompt: bool

    def __init__(
        self, tokenizer: Any, write: Callable[[str], None] | None, say: Callable[[str], None],
        new_tokens: int,
    ) -> None:  # fmt: skip
        """`write` gets text; None: for several sequences `say` gets a line from time to time."""
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times = Times()
        self.most = new_tokens
        self._write = write
        self._say = say
        self._said_s = 0.0

    def begin(self) -> None:
        self.times.began_s = self._said_s = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            return
        now = time.perf_counter()
        self.times.tokens_s.append(now)
        if self._write is not None:
            super().put(value)
        elif now - self._said_s >= _QUIET_S:
            self._said_s = now
            done = len(self.times.tokens_s)
            left = (now - self.times.began_s) / done * (self.most - done)
            self._say(f"{done:,} of {self.most:,} tokens, {about(left)}")

    def end(self) -> None:
        """Finish: no further token comes."""
        if self._write is not None:
            super().end()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        assert self._write is not None, "text is wanted"
        self._write(text)


def generate(
    model: Any, encoded: Encoded, stream: Stream, sampling: Sampling, new_tokens: int, *,
    padding: int | None, device: torch.device, stops: Callable[[], bool],
) -> torch.Tensor:  # fmt: skip
    """Return the new tokens [batch, tokens]; `stops` returns true after a token to end early."""

    def stopped(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        return torch.full((ids.shape[0],), stops(), device=ids.device, dtype=torch.bool)

    stream.begin()
    with torch.inference_mode():
        found: torch.Tensor = model.generate(
            input_ids=encoded.ids.to(device), attention_mask=encoded.mask.to(device),
            max_new_tokens=new_tokens, pad_token_id=padding, streamer=stream,
            stopping_criteria=transformers.StoppingCriteriaList([stopped]),
            **sampling.arguments,
        )  # fmt: skip
    prompt = 0 if model.config.is_encoder_decoder else encoded.length
    return found[:, prompt:].cpu()
