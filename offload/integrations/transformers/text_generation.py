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
_BROKEN = "\N{REPLACEMENT CHARACTER}"  # of a letter that is not whole yet
_LONGEST_LETTER = 8  # tokens; what is broken for longer is so in the text
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


class Tokenizer:
    """The tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer. Raise ConfigError if the folder has none that transformers reads."""
        import transformers

        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ConfigError(
                f"{folder} has no tokenizer (none of {', '.join(_TOKENIZER_FILES[:4])}, ...); "
                "tokenizer.save_pretrained(FOLDER) writes one"
            )
        try:
            self._own: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # any, of the libraries that read it
            said = " ".join(str(error).split())[:200]
            raise ConfigError(f"{folder}: its tokenizer cannot be read: {said}") from error
        self._folder = folder

    def encode(self, prompts: Sequence[str], *, chat: bool) -> Encoded:
        """Encode prompts; with `chat` each as a user's turn, before the model's. Raise ConfigError
        for a prompt without tokens, or if the tokenizer lacks what is needed."""
        texts = [self._turn(prompt) for prompt in prompts] if chat else list(prompts)
        # a template has the special tokens already
        rows = [self._own(text, add_special_tokens=not chat)["input_ids"] for text in texts]
        for number, row in enumerate(rows, 1):
            if not row:
                raise ConfigError(f"--prompt: prompt {number} has no tokens; give it some text")
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self._padding(rows))
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, longest - len(row) :] = torch.tensor(row)
            mask[number, longest - len(row) :] = 1
        return Encoded(ids, mask)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._own.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def padding(self) -> int | None:
        """The token behind the end of a sequence that is shorter than others."""
        own = self._own.pad_token_id
        return self._own.eos_token_id if own is None else own  # type: ignore[no-any-return]

    def _padding(self, rows: Sequence[Sequence[int]]) -> int:
        padding = self.padding
        if padding is None and len(set(map(len, rows))) > 1:
            raise ConfigError(
                f"{self._folder}: its tokenizer has neither a padding token nor one for the end, "
                "and these prompts are not equally long; give one at a time"
            )
        return padding or 0

    def _turn(self, prompt: str) -> str:
        if not self._own.chat_template:
            raise ConfigError(
                f"--chat: the tokenizer of {self._folder} has no chat template; leave --chat out"
            )
        turns = [{"role": "user", "content": prompt}]
        text: str = self._own.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return text


def open_generating(folder: Path) -> Any:
    """Open the model of a folder, with its weights still in files. Raise UnsupportedError for a
    model that does not generate text, ConfigError as `open_pretrained` does."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # nothing is read yet: it would fill at once
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


class Stream:
    """Receives tokens from `generate`; a single sequence's text is written as it completes."""

    def __init__(
        self, tokenizer: Tokenizer, write: Callable[[str], None] | None,
        say: Callable[[str], None], new_tokens: int,
    ) -> None:  # fmt: skip
        """`write` gets text; None: for several sequences `say` gets a line from time to time."""
        self.times = Times()
        self._tokenizer = tokenizer
        self._write = write
        self._say = say
        self.most = new_tokens
        self._said_s = 0.0
        self._begun = False
        self._before: list[int] = []  # tokens of the last piece: a word's text depends on them
        self._new: list[int] = []

    def begin(self) -> None:
        self.times.began_s = self._said_s = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if not self._begun:  # the prompt
            self._begun = True
            return
        now = time.perf_counter()
        self.times.tokens_s.append(now)
        if self._write is not None:
            self._new += value.flatten().tolist()
            self._put_out(last=False)
        elif now - self._said_s >= _QUIET_S:
            self._said_s = now
            done = len(self.times.tokens_s)
            left = (now - self.times.began_s) / done * (self.most - done)
            self._say(f"{done:,} of {self.most:,} tokens, {about(left)}")

    def end(self) -> None:
        """Finish: no further token comes."""
        if self._write is not None and self._new:
            self._put_out(last=True)

    def _put_out(self, *, last: bool) -> None:
        assert self._write is not None, "text is wanted"
        before = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode(self._before + self._new)
        if text.endswith(_BROKEN) and not last and len(self._new) < _LONGEST_LETTER:
            return
        self._before, self._new = self._new, []
        self._write(text[len(before) :])


def generate(
    model: Any, encoded: Encoded, stream: Stream, sampling: Sampling, new_tokens: int, *,
    padding: int | None, device: torch.device, stops: Callable[[], bool],
) -> torch.Tensor:  # fmt: skip
    """Return the new tokens [batch, tokens]; `stops` returns true after a token to end early."""
    import transformers

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
