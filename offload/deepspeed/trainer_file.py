"""Advice for a file that leaves numbers to transformers' Trainer (`auto`).

`OffloadTrainer` takes what its YAML file does not name from TrainingArguments, as Trainer fills in
`auto`. Numbers that only Trainer's own loop can follow (batch sizes, the schedule) have to be said
there: `arguments` has them.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

from offload.deepspeed.migration import AUTO, MICRO, STEPS, TRAIN, Migration
from offload.deepspeed.schedules import KINDS

YAML = "offload.yaml"
_WIDTH = 100


def advice(made: Migration, source: str, out: str | None, ranks: int | None) -> str:
    """Return a paragraph of advice, and the lines to write; `out`: the file that was written."""
    said, notes = arguments(made, ranks)
    given = "".join(f", {name}={json.dumps(value)}" for name, value in said.items())
    written = (
        f"Give {out}" if out is not None
        else f"Write the YAML file with -o {YAML}, and give it"
    )  # fmt: skip
    paragraph = (
        f"{source} is a file for transformers' Trainer: {len(made.unfilled)} of its keys say "
        f"`auto`, which Trainer fills in from TrainingArguments. {written} to OffloadTrainer: "
        "every key that is not in it comes from TrainingArguments. Leave deepspeed= out of these:"
    )
    return "\n".join(
        [
            _wrapped(paragraph),
            "",
            "    from offload.integrations.transformers import OffloadTrainer",
            f"    args = TrainingArguments(...{given})",
            "    trainer = OffloadTrainer(model, args, train_dataset=..., "
            f"offload={json.dumps(out or YAML)})",
            "",
            *map(_wrapped, notes),
        ]
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def arguments(made: Migration, ranks: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return the TrainingArguments that match the file's numbers, and notes about them."""
    batches, notes = _batches(made, ranks)
    schedule = made.schedule
    if schedule is None:
        return batches, notes
    found = {**batches, "lr_scheduler_type": KINDS[schedule.type].trainers}
    for name, argument in (("warmup_num_steps", "warmup_steps"), ("total_num_steps", "max_steps")):
        value = schedule.params.get(name)
        if value not in (None, AUTO):
            found[argument] = value
    if schedule.params.get("warmup_type") == "log":
        notes.append(
            f"The warm-up of {schedule.type} is logarithmic unless warmup_type says linear; "
            "Trainer's is linear."
        )
    return found, notes


def _batches(made: Migration, ranks: int | None) -> tuple[dict[str, Any], list[str]]:
    train, micro, steps = (made.get(name) for name in (TRAIN, MICRO, STEPS))
    if made.batches is not None:
        micro, steps = made.batches.micro, made.batches.steps
    given = {"per_device_train_batch_size": micro, STEPS: steps}
    found = {name: value for name, value in given.items() if value is not None}
    if train is None or made.batches is not None:
        return found, []
    of = f"{'' if ranks is None else f'{ranks} '}ranks has to be {train}"
    return found, [f"{TRAIN}: {train}: per_device_train_batch_size x {STEPS} x {of}."]
