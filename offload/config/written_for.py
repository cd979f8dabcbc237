"""The model that a configuration was written for; the configuration is refused for another one."""

from __future__ import annotations

from pydantic import Field

from offload.config.fields import Section, about
from offload.tiers.errors import ConfigError


class WrittenFor(Section):
    """The model that `memest --write` wrote a configuration for, and that `offload plan` plans."""

    model: str = Field(description="Its name.", examples=["Llama-3-8B"])
    parameters: int = Field(
        ge=1, description="How many it has, frozen ones included.", examples=[8_030_261_248]
    )
    source: str | None = Field(
        None,
        description="Where it is described: a file or folder, or module:function.",
        examples=["Llama-3-8B/config.json"],
    )
    batch: int = Field(
        1,
        ge=1,
        description="Sequences per pass that were planned with.",
        examples=[1],
        json_schema_extra=about(unit="sequences"),
    )
    sequence: int = Field(
        2048,
        ge=1,
        description="Length of a sequence that was planned with.",
        examples=[2048],
        json_schema_extra=about(unit="tokens"),
    )

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
