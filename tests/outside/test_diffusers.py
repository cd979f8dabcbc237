"""Pipelines of diffusers with a dispatched component: the images of plain diffusers, or an error
that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import HOST, NVME, config, on_the_cpu_alone, seeded

diffusers = pytest.importorskip("diffusers")
pytestmark = on_the_cpu_alone("pipelines are moved to the CPU")


def unet() -> Any:
    return diffusers.UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def images(pipe: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    found = pipe(generator=generator, num_inference_steps=2, output_type="np").images
    return torch.tensor(found)


def pipeline(component: Any) -> Any:
    return diffusers.DDPMPipeline(component, diffusers.DDPMScheduler(num_train_timesteps=10))


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_a_pipeline_moves_and_casts_to_what_is_there_or_says_how(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    expected = images(pipeline(seeded(unet)))
    keys = config(tmp_path, {"parameters": placement["parameters"]})
    model = offload.dispatch(seeded(unet), keys)
    pipe = pipeline(model)
    with pytest.raises(UnsupportedError, match=r"precision: bf16 in the configuration; a pipeline"):
        pipe.to(torch.bfloat16)
    pipe.to("cpu").to(torch.float32).enable_model_cpu_offload(device="cpu")
    assert torch.equal(images(pipe), expected)
    offload.dispatched(model).close("host")
    low = images(pipeline(model).to(torch.bfloat16))
    again = offload.dispatch(seeded(unet), {**keys, "precision": "bf16"})
    assert torch.equal(images(pipeline(again).to(torch.bfloat16)), low)
    offload.dispatched(again).close("drop")
