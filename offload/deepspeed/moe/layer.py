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
        """Raise UnsupportedError for tensor parallelism within an expert. Tutel, a faster way to
        the same result, is ignored."""
        if enable_expert_tensor_parallelism:
            raise UnsupportedError(
                "MoE: enable_expert_tensor_parallelism is not supported; leave it out, experts are "
                "spread over ranks by ep_size"
            )
        super().__init__(*args, **options)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: the groups of ranks exist already."""
