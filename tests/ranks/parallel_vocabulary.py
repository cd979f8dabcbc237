"""A language model whose embedding and head are cut unevenly along the vocabulary; run by ranks."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import offload
from tests.offload.engine_cases import NVME, seeded
from tests.ranks.parallel_models import BATCH, LENGTH, WIDTH, Block, Case, keys_of, whole

VOCABULARY = 37
PARKED = {**NVME, "activations": {"tier": "nvme", "checkpoint": False}}


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelised(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for index in range(2):
        plan = {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(use_local_output=False),  # a DTensor between the two
            "down": RowwiseParallel(),
        }
        parallelize_module(model.get_submodule(f"blocks.{index}"), mesh, plan)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    embed = RowwiseParallel(input_layouts=Replicate())
    return parallelize_module(model, mesh, {"embed": embed, "head": head})


def train(parallel: bool, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Two passes per step; losses and, by name, gradients of the last step, weights, and one weight
    written to at the end."""
    mesh, model = None, seeded(LanguageModel)
    if parallel:
        both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        mesh, model = both["dp"], parallelised(model, both["tp"])
    generator = torch.Generator().manual_seed(3)
    losses, tensors = [], {}
    with offload.initialize(model, keys_of(Case(1, PARKED), folder), mesh=mesh) as engine:
        for _ in range(3):
            for _ in range(2):
                tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
                with loss_parallel() if parallel else nullcontext():
                    logits = model(tokens[:, :-1]).flatten(0, 1)
                    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
                    (loss / 2).backward()
                losses.append(whole(loss).item())
            for name, param in model.named_parameters():
                gradient = engine.gradient(param)
                assert gradient is not None, name
                tensors[f"{name} gradient"] = whole(gradient)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        tensors.update({name: whole(value) for name, value in model.state_dict().items()})
        with torch.no_grad(), engine.gathered(model.head.weight):
            model.head.weight.mul_(2)
        tensors["twice"] = whole(model.state_dict()["head.weight"])
    return losses, tensors
