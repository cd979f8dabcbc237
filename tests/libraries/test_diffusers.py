"""diffusers: its example scripts' loops train through an engine, and its pipelines compute from the
tiers, as without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedError
from tests.libraries.rows import PLACEMENTS, row
from tests.offload.engine_cases import assert_same_bits, config, seeded
from tests.outside.trainer_cases import assert_close, quiet, transformers, values_of

diffusers = pytest.importorskip("diffusers")
tokenizers = pytest.importorskip("tokenizers")

# a bias of keys has a gradient of rounding errors alone, which are below this eps
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-5}
STEPS, BATCH, WORDS = 4, 2, 32


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    diffusers.utils.logging.disable_progress_bar()
    with quiet():
        yield


# --------------------------------------------------------------------------------- tiny models
def unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=32,
        attention_head_dim=4, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8,
        num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=64,
        pooled_projection_dim=64, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=64, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def clip(kind: str = "CLIPTextModel") -> Any:
    made = transformers.CLIPTextConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=16, projection_dim=32, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return getattr(transformers, kind)(made)


def t5() -> Any:
    made = transformers.T5Config(
        vocab_size=WORDS, d_model=64, d_kv=16, d_ff=96, num_layers=3, num_heads=4,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5EncoderModel(made)


def vae() -> Any:
    return diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=(16, 32), norm_num_groups=8, sample_size=16, shift_factor=0.1,
    )  # fmt: skip


# ------------------------------------------------------------------------- loops of the examples
DDPM = partial(diffusers.DDPMScheduler, num_train_timesteps=100)
FLOW = partial(diffusers.FlowMatchEulerDiscreteScheduler, num_train_timesteps=100)


def loss_of(model: Any, number: int, text: Tensor | None = None) -> Tensor:
    """One batch's loss: MSE to the noise, or with flow matching to the noise less the image."""
    random = torch.Generator().manual_seed(number)
    normal = partial(torch.randn, generator=random)
    latents, noise = normal(BATCH, 4, 8, 8), normal(BATCH, 4, 8, 8)
    steps = torch.randint(0, 100, (BATCH,), generator=random)
    pooled, states = normal(BATCH, 64), normal(BATCH, 5, 64)
    kind = type(model).__name__
    if kind == "UNet2DConditionModel":
        noisy = DDPM().add_noise(latents, noise, steps)
        hidden = states[..., :32] if text is None else text
        return nn.functional.mse_loss(model(noisy, steps, hidden).sample.float(), noise)
    scheduler = FLOW()
    sigmas = scheduler.sigmas[steps].view(-1, 1, 1, 1)
    noisy, target = (1 - sigmas) * latents + sigmas * noise, noise - latents
    times = scheduler.timesteps[steps]
    if kind == "SD3Transformer2DModel":
        found = model(noisy, states, pooled, times).sample
    else:
        pack = partial(diffusers.FluxPipeline._pack_latents, batch_size=BATCH, height=8, width=8)
        noisy, target = (pack(each, num_channels_latents=4) for each in (noisy, target))
        ids = diffusers.FluxPipeline._prepare_latent_image_ids(BATCH, 4, 4, "cpu", torch.float32)
        found = model(
            noisy, states, pooled[:, :32], times / 1000, ids, torch.zeros(5, 3)
        ).sample  # fmt: skip
    return nn.functional.mse_loss(found.float(), target)


def train(model: Any, optimizer: Any, ema: Any = None) -> list[float]:
    """The loop of examples/text_to_image: clipping, a schedule, EMA, a validation with it."""
    params = [param for param in model.parameters() if param.requires_grad]
    schedule = diffusers.optimization.get_scheduler("linear", optimizer, None, 1, 2 * STEPS)
    logged = []
    for number in range(STEPS):
        loss = loss_of(model.train(), number)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        logged += [loss.item(), float(norm)]
        if ema is not None:
            ema.step(model.parameters())
            if number % 2:
                ema.store(model.parameters())
                ema.copy_to(model.parameters())
                with torch.no_grad():
                    logged.append(loss_of(model.eval(), 99).item())
                ema.restore(model.parameters())
    return logged


def keys_of(folder: Path, placement: str, **more: Any) -> dict[str, Any]:
    optimizer = {"type": "adamw", **OPTIMIZER}
    return config(folder, PLACEMENTS[placement], optimizer=optimizer, **more)


def plain_optimizer(models: Sequence[nn.Module]) -> torch.optim.Optimizer:
    params = [p for model in models for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, **OPTIMIZER)


TRAINED: dict[Any, dict[str, Tensor]] = {}  # on the first placement, which all others equal


def assert_trained(key: Any, models: Sequence[Any], expected: Sequence[Any]) -> None:
    values = values_of(nn.ModuleList(models))
    assert_close(values, values_of(nn.ModuleList(expected)))
    assert_same_bits(values, TRAINED.setdefault(key, values))


def ema_of(model: Any) -> Any:
    from diffusers.training_utils import EMAModel

    return EMAModel(model.parameters(), decay=0.9, model_cls=type(model), model_config=model.config)


def trains_as_plain(build: Any, placement: str, folder: Path) -> None:
    expected_model, model = seeded(build), seeded(build)
    for each in (expected_model, model):
        each.enable_gradient_checkpointing()
    expected_ema = ema_of(expected_model)
    expected = train(expected_model, plain_optimizer([expected_model]), expected_ema)
    with offload.initialize(model, keys_of(folder, placement)) as engine:
        ema = ema_of(model)
        assert_close(train(model, engine.optimizer, ema), expected)
        assert_trained(build, [model], [expected_model])
        assert_close(ema.shadow_params, expected_ema.shadow_params)
        model.save_pretrained(folder / "model")
        ema.save_pretrained(folder / "ema")
        trained = values_of(model)
    assert_same_bits(values_of(type(model).from_pretrained(folder / "model")), trained)
    averaged = type(model).from_pretrained(folder / "ema").parameters()
    assert all(torch.equal(a, b) for a, b in zip(averaged, ema.shadow_params, strict=True))


@row("diffusers", "text_to_image's loop, EMA", "UNet2DConditionModel, checkpointed")
def test_a_unet(placement: str, tmp_path: Path) -> None:
    trains_as_plain(unet, placement, tmp_path)


@row("diffusers", "text_to_image's loop, EMA", "SD3Transformer2DModel, flow matching")
def test_an_sd3_transformer(placement: str, tmp_path: Path) -> None:
    trains_as_plain(sd3, placement, tmp_path)


@row("diffusers", "text_to_image's loop, EMA", "FluxTransformer2DModel, flow matching")
def test_a_flux_transformer(placement: str, tmp_path: Path) -> None:
    trains_as_plain(flux, placement, tmp_path)


# ------------------------------------------------------------------------------------ pipelines
def tokenizer() -> Any:
    """Knows w3 ... w31."""
    names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, WORDS))]
    words = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", model_max_length=16
    )


def pipeline(kind: str) -> Any:
    torch.manual_seed(0)
    parts: dict[str, Any] = {"vae": vae().eval(), "tokenizer": tokenizer()}
    if kind == "sd":
        return diffusers.StableDiffusionPipeline(
            **parts, text_encoder=clip().eval(), unet=unet().eval(), safety_checker=None,
            scheduler=diffusers.DDIMScheduler(clip_sample=False), feature_extractor=None,
            requires_safety_checker=False,
        )  # fmt: skip
    parts |= {"tokenizer_2": tokenizer(), "scheduler": FLOW(shift=3.0)}
    if kind == "sd3":
        one, two = (clip("CLIPTextModelWithProjection").eval() for _ in range(2))
        return diffusers.StableDiffusion3Pipeline(
            **parts, transformer=sd3().eval(), text_encoder=one, text_encoder_2=two,
            text_encoder_3=t5().eval(), tokenizer_3=tokenizer(),
        )  # fmt: skip
    return diffusers.FluxPipeline(
        **parts, transformer=flux().eval(), text_encoder=clip().eval(), text_encoder_2=t5().eval()
    )


def models_of(pipe: Any) -> nn.ModuleDict:
    return nn.ModuleDict({n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)})


def images(pipe: Any, prompt: Any = "w5 w9", **how: Any) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    keys = {"num_inference_steps": 3, "output_type": "pt", "height": 16, "width": 16, **how}
    random = torch.Generator().manual_seed(3)
    made: Tensor = pipe(prompt, generator=random, **keys).images
    return made


def spread(pipe: Any, folder: Path, tier: str = "nvme", **keys: Any) -> Any:
    """Dispatch it, with a quarter of its weights in memory where they are on nvme."""
    from offload.integrations.diffusers import dispatch

    if tier == "nvme":
        quarter = sum(param.nbytes for param in models_of(pipe).parameters()) // 4
        keys = {"budget": {"host": quarter, "nvme": "64MiB"}, "prefetch": 1, **keys}
    return dispatch(pipe, config(folder, {"parameters": tier}, **keys))


def computes_as_plain(kind: str, placement: str, folder: Path) -> None:
    from offload.integrations.diffusers import open_pipeline

    plain = pipeline(kind)
    plain.save_pretrained(folder / "pipe")
    pipe = open_pipeline(folder / "pipe")
    spread(pipe, folder, placement)
    with offload.dispatched(pipe.vae) as owner:
        assert torch.equal(
            images(pipe, num_inference_steps=20), images(plain, num_inference_steps=20)
        )
        owner.check_integrity()
        assert owner is offload.dispatched(pipe.text_encoder)


@row("diffusers", "pipeline, 20 steps", "Stable Diffusion: CLIP, UNet, VAE")
def test_stable_diffusion(placement: str, tmp_path: Path) -> None:
    computes_as_plain("sd", placement, tmp_path)


@row("diffusers", "pipeline, 20 steps", "Stable Diffusion 3: 2 CLIP, T5, transformer, VAE")
def test_stable_diffusion_3(placement: str, tmp_path: Path) -> None:
    computes_as_plain("sd3", placement, tmp_path)


@row("diffusers", "pipeline, 20 steps", "Flux: CLIP, T5, transformer, VAE")
def test_flux(placement: str, tmp_path: Path) -> None:
    computes_as_plain("flux", placement, tmp_path)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda pipe: pipe.to("meta"), "set precision .* and device"),
        (lambda pipe: pipe.enable_model_cpu_offload(), "leave out this call"),
        (lambda pipe: pipe.load_lora_weights("lora"), "before dispatch"),
    ],
)
def test_what_moves_or_changes_the_weights_is_refused(call: Any, text: str, tmp_path: Path) -> None:
    pipe = spread(pipeline("sd"), tmp_path)
    with pytest.raises(UnsupportedError, match=text):
        call(pipe)
    assert torch.equal(images(pipe), images(pipeline("sd")))
