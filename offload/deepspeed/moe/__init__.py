"""`deepspeed.moe`: the layer of experts, in `layer`."""
