"""The input of one optimizer step, or of one generation of text."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config.training import MOST_TOKENS
from offload.tiers.errors import ConfigError

_USUAL = {"batch": 1, "prompt": 512, "new tokens": 128}


@dataclass(frozen=True, slots=True)
class Workload:
    """The input of one step of one rank."""

    batch: int  # sequences per backward pass
    sequence: int  # tokens per sequence
    passes: int = 1  # backward passes per step

    @property
    def tokens(self) -> int:
        """The tokens per step."""
        return self.batch * self.sequence * self.passes


@dataclass(frozen=True, slots=True)
class Generation:
    """The arguments of `generate`: a pass over the prompts, which yields the first new token, then
    a pass of one token per sequence for each further one."""

    batch: int  # sequences
    prompt: int  # tokens of each
    new_tokens: int  # to be generated for each

    @classmethod
    def asked(cls, *numbers: int | None) -> tuple[Generation, tuple[str, ...]]:
        """Return a generation of `batch`, `prompt` and `new_tokens`, with usual numbers for those
        that are None, and a note for each. Raise ConfigError, naming the option, for a number out
        of range."""
        known, notes = [], []
        for (name, usual), number in zip(_USUAL.items(), numbers, strict=True):
            if number is None:
                notes.append(f"{name}: {usual}, as none was asked for")
            elif number < 1:
                raise ConfigError(f"--{name.replace(' ', '-')} {number}: at least 1")
            known.append(usual if number is None else number)
        found = cls(*known)
        if found.batch * found.context > MOST_TOKENS:
            raise ConfigError(
                f"--batch {found.batch} with {found.context:,} tokens in each sequence: at most "
                f"{MOST_TOKENS:,} together"
            )
        return found, tuple(notes)

    @property
    def prefill(self) -> Workload:
        return Workload(self.batch, self.prompt)

    @property
    def decode(self) -> Workload:
        """The input of a pass after the first one."""
        return Workload(self.batch, 1)

    @property
    def usual(self) -> Workload:
        """The input of the most frequent pass."""
        return self.decode if self.new_tokens > 1 else self.prefill

    @property
    def context(self) -> int:
        """The tokens of each sequence in the final cache; the last token is in no pass."""
        return self.prompt + self.new_tokens - 1
