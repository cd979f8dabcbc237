"""The model that a configuration was written for; the configuration is refused for another one."""

from __future__ import annotations

from offload.config.fields import Section, key
from offload.tiers.errors import ConfigError


class WrittenFor(Section):
    """The model that `memest --write` wrote a configuration for, and that `offload plan` plans."""

    model: str = key(..., example="Llama-3-8B")
    """Its name."""
    parameters: int = key(..., example=8_030_261_248, ge=1)
    """How many it has, frozen ones included."""
    source: str | None = key(None, example="Llama-3-8B/config.json")
    """Where it is described: a file or folder, or module:function."""
    batch: int = key(1, example=1, ge=1, unit="sequences")
    """Sequences per pass that were planned with."""
    sequence: int = key(2048, example=2048, ge=1, unit="tokens")
    """Length of a sequence that was planned with."""

    def __str__(self) -> str:
        return f"{self.model} ({self.parameters:,} parameters)"

    def check(self, name: str, parameters: int) -> None:
        """Raise ConfigError unless the model `name` has as many parameters as this one."""
        if parameters != self.parameters:
            raise ConfigError(
                f"written_for: this file was written for {self}, and {name} has {parameters:,}; "
                "`memest MODEL --write FILE` writes one for it; if this one is meant for it all "
                "the same, remove written_for"
            )

    def refuse_training(self) -> None:
        """Raise ConfigError: `offload train` cannot build this model."""
        raise ConfigError(
            f"written_for: this file was written for {self}, and `offload train` trains only its "
            "built-in model; train in a loop of your own with offload.initialize(model, FILE), or, "
            "for the built-in model, describe it under train.model and remove written_for"
        )
