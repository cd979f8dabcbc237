"""`deepspeed.moe`: the layer of experts (`layer`), and questions about its parameters (`utils`)."""
