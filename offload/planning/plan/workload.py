"""The input of one optimizer step, or of one generation of text."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config.training import MOST_TOKENS
from offload.tiers.errors import ConfigError

_USUAL = (1, 512, 128)  # sequences, tokens of a prompt, new ones


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
    def asked(
        cls, batch: int | None, prompt: int | None, new_tokens: int | None
    ) -> tuple[Generation, tuple[str, ...]]:
        """Return a generation with usual numbers for those that are None, and a note for each.
        Raise ConfigError, naming the option, for a number out of range."""
        given = {"batch": batch, "prompt": prompt, "new tokens": new_tokens}
        numbers = [
            usual if n is None else n for n, usual in zip(given.values(), _USUAL, strict=True)
        ]
        found = cls(*numbers)
        found._check()
        notes = (
            f"{name}: {number}, as none was asked for"
            for (name, asked), number in zip(given.items(), numbers, strict=True)
            if asked is None
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

    def _check(self) -> None:
        numbers = {
            "--batch": self.batch, "--prompt": self.prompt, "--new-tokens": self.new_tokens,
        }  # fmt: skip
        for option, value in numbers.items():
            if value < 1:
                raise ConfigError(f"{option} {value}: at least 1")
        if self.batch * self.context > MOST_TOKENS:
            raise ConfigError(
                f"--batch {self.batch} with {self.context:,} tokens in each sequence: at most "
                f"{MOST_TOKENS:,} together"
            )
