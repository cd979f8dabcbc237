"""What every rank runs in the tests of dispatched models on several ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import offload
from tests.offload.engine_cases import TinyLM, batches, bits, config, seeded
from tests.ranks.parallel_models import LENGTH, WIDTH, Model, parallelised

PLACEMENTS: list[Any] = ["host", "nvme", {"host": "50%", "nvme": "50%"}]
PLAN = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def keys_of(folder: str, parameters: Any) -> dict[str, Any]:
    budget = {"host": "16MiB", "nvme": "64MiB"}
    return config(Path(folder), {"parameters": parameters}, budget=budget, device="cpu")


def samples() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def outputs(folder: str) -> list[Tensor]:
    """In every placement, of a model in parts on two ranks; of a whole one on a single rank."""
    if not dist.is_initialized():
        return [seeded(Model)(samples())]
    results = []
    for parameters in PLACEMENTS:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = offload.dispatch(parallelised(seeded(Model), mesh), keys_of(folder, parameters))
        with offload.dispatched(model) as dispatched:
            for _ in range(2):
                out = model(samples())
            dispatched.check_integrity()
        results.append(out.full_tensor() if hasattr(out, "full_tensor") else out)
    return results


def generated(folder: str) -> tuple[list[list[int]], Tensor]:
    """By a model of transformers with its own plan."""
    import transformers

    torch.manual_seed(0)
    made = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(made).eval()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {name: PLAN[way]() for name, way in made.base_model_tp_plan.items()}
        parallelize_module(model.model, mesh, plan)
        offload.dispatch(model, keys_of(folder, "nvme"))
    prompt = torch.arange(3, 9).view(2, 3)
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    if dist.is_initialized():
        offload.dispatched(model).close()
    return output.sequences.tolist(), torch.stack(output.logits)


@torch.no_grad()
def by_itself(folder: str) -> list[bytes]:
    """Ranks with a model each, which they call as often as they like."""
    tokens = batches(1)[0][:, :-1]
    model = offload.dispatch(seeded(TinyLM, dist.get_rank()), keys_of(folder, "nvme"))
    with offload.dispatched(model):
        return [bits(model(tokens)) for _ in range(1 + 2 * dist.get_rank())]


def all_of_it(folder: str) -> tuple[Any, Any, Any]:
    return outputs(folder), generated(folder), by_itself(folder)
