"""Files as DeepSpeed's ZeRO stages write them, of a model and optimizer of plain PyTorch."""

from pathlib import Path
from typing import Any

import torch
from torch import nn


def parts_of(vector: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Equal parts; the last one is filled with zeros."""
    part = -(-vector.numel() // ranks)
    filled = torch.cat([vector, vector.new_zeros(part * ranks - vector.numel())])
    return list(filled.split(part))


def write(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, ranks: int,
    dtype: torch.dtype = torch.float32, **more: Any,
) -> None:  # fmt: skip
    folder.mkdir(parents=True)
    names = {param: name for name, param in model.named_parameters()}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    state = optimizer.state_dict()

    def flat(number: int, rank: int, field: str) -> torch.Tensor:
        """One group's vector on one rank."""
        values = [
            (p.detach() if field == "master" else optimizer.state[p][field]).reshape(-1).float()
            for p in groups[number]
        ]
        if stage == 3:
            return torch.cat([parts_of(value, ranks)[rank] for value in values])
        return parts_of(torch.cat(values), ranks)[rank]

    for rank in range(ranks):
        states = {
            number: {
                "step": torch.tensor(float(optimizer.state[group[0]]["step"])),
                **{field: flat(number, rank, field) for field in ("exp_avg", "exp_avg_sq")},
            }
            for number, group in enumerate(groups)
        }
        numbers = [{**g, "params": [i]} for i, g in enumerate(state["param_groups"])]
        inner = {"state": states, "param_groups": numbers}
        masters = [flat(number, rank, "master") for number in range(len(groups))]
        part: dict[str, Any] = {"zero_stage": stage}
        if stage == 3:
            part |= {"partition_count": ranks, "optimizer_state_dict": inner}
            part |= {"fp32_flat_groups": masters}
        else:
            part |= {"partition_count": [ranks] * len(groups), "base_optimizer_state": inner}
            part |= {"single_partition_of_fp32_groups": masters}
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": part}, folder / name)
        about = {
            "module": {
                name: value if name not in names.values() else
                (value if stage < 3 else value[:0]).to(dtype)
                for name, value in model.state_dict().items()
            },
            "buffer_names": [name for name, _ in model.named_buffers()],
            "param_shapes": [{names[p]: p.shape for p in group} for group in groups],
            "frozen_param_shapes": {name: p.shape for name, p in frozen.items()},
            "frozen_param_fragments": {
                name: parts_of(p.detach().reshape(-1), ranks)[rank] for name, p in frozen.items()
            },
            "shared_params": {}, "skipped_steps": 0, "global_steps": 3, "global_samples": 12,
            "ds_config": {"optimizer": {"type": "AdamW", "params": {}}},
            "lr_scheduler": {"last_batch_iteration": 2}, **more,
        }  # fmt: skip
        kind = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        if stage == 3 or rank == 0:
            torch.save(about, folder / f"{kind}mp_rank_00_model_states.pt")
    (folder.parent / "latest").write_text(folder.name)
