"""DeepSpeed's optimizers by their names. They hold numbers: `initialize` takes the rule of ours."""

from __future__ import annotations
