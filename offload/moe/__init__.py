"""Mixtures of experts: layers whose tokens choose the modules that compute them.

    from offload.moe import MoE

    moe = MoE(hidden_size, expert, num_experts=8, k=2)
    output, l_aux, exp_counts = moe(hidden_states)

Ordinary torch modules, in a model that an engine trains as in one that it does not.
"""

from offload.moe.experts import Experts
from offload.moe.gate import Gate
from offload.moe.layer import MoE

__all__ = ["Experts", "Gate", "MoE"]
