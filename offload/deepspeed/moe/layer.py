"""`deepspeed.moe.layer`: its `MoE` is `offload.moe.MoE`."""

from __future__ import annotations

from typing import Any

from offload import moe
from offload.tiers.errors import UnsupportedError


class MoE(moe.MoE):
    """`offload.moe.MoE`, also with the arguments that only DeepSpeed's has, at their defaults."""

    def __init__(
        self, *args: Any, use_tutel: bool = False, enable_expert_tensor_parallelism: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        """UnsupportedError for tensor parallelism within an expert. Tutel would be a faster way to
        the same result; there is one way here."""
        if enable_expert_tensor_parallelism:
            raise UnsupportedError(
                "MoE: enable_expert_tensor_parallelism is not supported; leave it out, experts are "
                "spread over ranks by ep_size"
            )
        super().__init__(*args, **options)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Nothing is left to do: groups of ranks are there."""
