"""diffusers: its example scripts' loops train through an engine, and its pipelines compute from the
tiers, as without them.

`make test-libraries` installs diffusers and runs this file.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import CheckpointError, ConfigError, StateError, UnsupportedError
from tests.libraries.rows import Result, adamw, row
from tests.offload.engine_cases import assert_same_bits, config, seeded
from tests.outside.test_pretrained_save import assert_same_files
from tests.outside.trainer_cases import forget, quiet, transformers, values_of

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")

# a bias of keys has a gradient of rounding errors alone, which are below this eps
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-5}
STEPS, BATCH, WORDS = 4, 2, 32
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_k", "to_out.0"]}


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


def dit() -> Any:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_type="ada_norm_zero", dropout=0.0,
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
    torch.manual_seed(number)  # of dropped class labels
    random = torch.Generator().manual_seed(number)
    normal = partial(torch.randn, generator=random)
    latents, noise = normal(BATCH, 4, 8, 8), normal(BATCH, 4, 8, 8)
    steps = torch.randint(0, 100, (BATCH,), generator=random)
    pooled, states = normal(BATCH, 64), normal(BATCH, 5, 64)
    kind = type(model).__name__
    if kind in ("UNet2DConditionModel", "DiTTransformer2DModel"):
        noisy = DDPM().add_noise(latents, noise, steps)
        if kind == "DiTTransformer2DModel":  # predicts a variance, too
            labels = torch.randint(0, 10, (BATCH,), generator=random)
            found = model(noisy, steps, labels).sample
            return nn.functional.mse_loss(found[:, :4].float(), noise)
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


def adapted(build: Any) -> Any:
    model = seeded(build).requires_grad_(False)
    torch.manual_seed(5)
    model.add_adapter(peft.LoraConfig(init_lora_weights="gaussian", **LORA))
    return model


def ema_of(model: Any) -> Any:
    from diffusers.training_utils import EMAModel

    return EMAModel(model.parameters(), decay=0.9, model_cls=type(model), model_config=model.config)


def trained(build: Any, place: str, folder: Path) -> Result:
    model = seeded(build)
    model.enable_gradient_checkpointing()
    with adamw(place, folder, model, OPTIMIZER) as optimizer:
        ema = ema_of(model)
        logged, values = train(model, optimizer, ema), values_of(model)
        model.save_pretrained(folder / "model")
        ema.save_pretrained(folder / "ema")
    assert_same_bits(values_of(type(model).from_pretrained(folder / "model")), values)
    averaged = type(model).from_pretrained(folder / "ema").parameters()
    assert all(torch.equal(a, b) for a, b in zip(averaged, ema.shadow_params, strict=True))
    return logged, values, ema.shadow_params


def adapters_trained(build: Any, pipeline: Any, place: str, folder: Path) -> Result:
    """Their files are those of a plain model with the same values."""

    def save(model: Any, name: str) -> None:
        state = peft.get_peft_model_state_dict(model)
        state = diffusers.utils.convert_state_dict_to_diffusers(state)
        part = "unet" if build is unet else "transformer"
        pipeline.save_lora_weights(folder / name, **{f"{part}_lora_layers": state})

    model, plain = adapted(build), adapted(build)
    model.enable_gradient_checkpointing()
    with adamw(place, folder, model, OPTIMIZER) as optimizer:
        logged, values = train(model, optimizer), values_of(model)
        save(model, "found")
    plain.load_state_dict(values)
    save(plain, "expected")
    assert_same_files(folder / "found", folder / "expected")
    return logged, values


CASES = {
    "unet": (
        row("diffusers", "text_to_image's loop, EMA", "UNet2DConditionModel, checkpointed"),
        partial(trained, unet)),
    "dit": (
        row("diffusers", "text_to_image's loop, EMA", "DiTTransformer2DModel, checkpointed"),
        partial(trained, dit)),
    "sd3": (
        row("diffusers", "text_to_image's loop, EMA", "SD3Transformer2DModel, flow matching"),
        partial(trained, sd3)),
    "flux": (
        row("diffusers", "text_to_image's loop, EMA", "FluxTransformer2DModel, flow matching"),
        partial(trained, flux)),
    "unet-lora": (
        row("diffusers", "text_to_image_lora's loop", "UNet2DConditionModel, LoRA"),
        partial(adapters_trained, unet, diffusers.StableDiffusionPipeline)),
    "sd3-lora": (
        row("diffusers", "text_to_image_lora's loop", "SD3Transformer2DModel, LoRA"),
        partial(adapters_trained, sd3, diffusers.StableDiffusion3Pipeline)),
    "flux-lora": (
        row("diffusers", "text_to_image_lora's loop", "FluxTransformer2DModel, LoRA"),
        partial(adapters_trained, flux, diffusers.FluxPipeline)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loops(case: str, tmp_path: Path) -> None:
    check, run = CASES[case]
    check(run)(tmp_path)


def train_both(model: Any, encoder: Any, optimizers: Sequence[Any]) -> list[float]:
    """The loop of examples/dreambooth with --train_text_encoder."""
    tokens = torch.randint(3, WORDS, (BATCH, 5), generator=torch.Generator().manual_seed(0))
    losses = []
    for number in range(STEPS):
        loss = loss_of(model, number, encoder(tokens).last_hidden_state)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def both_trained(place: str, folder: Path, engines: int) -> Result:
    models = [seeded(unet), seeded(clip)]
    whole = nn.ModuleList(models)
    with contextlib.ExitStack() as stack:
        owned = models if engines == 2 else [whole]
        optimizers = [stack.enter_context(adamw(place, folder, m, OPTIMIZER)) for m in owned]
        return train_both(*models, optimizers), values_of(whole)


@row("diffusers", "dreambooth's loop, one engine of an nn.ModuleList", "UNet and text encoder")
def test_a_text_encoder_beside_the_unet(place: str, folder: Path) -> Result:
    return both_trained(place, folder, 1)


@row("diffusers", "dreambooth's loop, an engine each", "UNet and text encoder")
def test_a_text_encoder_with_an_engine_of_its_own(place: str, folder: Path) -> Result:
    found = both_trained(place, folder, 2)
    assert_same_bits(found[1], both_trained(place, folder, 1)[1])
    return found


@row("diffusers", "text_to_image's loop, OffloadAccelerator", "UNet2DConditionModel, EMA")
def test_accelerates_loop(place: str, folder: Path) -> Result:
    accelerate = pytest.importorskip("accelerate")
    from offload.integrations.accelerate import OffloadAccelerator

    forget()
    kind = accelerate.Accelerator if place == "plain" else OffloadAccelerator
    accelerator, losses = kind(gradient_accumulation_steps=2, cpu=True), []
    whole = seeded(unet)
    with adamw(place, folder, whole, OPTIMIZER) as optimizer:
        loader = torch.utils.data.DataLoader(range(2 * STEPS))  # type: ignore[arg-type]
        schedule = diffusers.optimization.get_scheduler("linear", optimizer, None, 1, 2 * STEPS)
        ema = ema_of(whole)
        model, optimizer, loader, schedule = accelerator.prepare(whole, optimizer, loader, schedule)
        for (number,) in loader:
            with accelerator.accumulate(model):
                loss = loss_of(accelerator.unwrap_model(model), int(number))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
            losses.append(loss.item())
        forget()
        return losses, ema.shadow_params, values_of(whole)


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
    if "prompt_embeds" in keys:
        prompt = None
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


def drawn(kind: str, place: str, folder: Path) -> Result:
    from offload.integrations.diffusers import open_pipeline

    pipe = pipeline(kind)
    if place == "plain":
        return images(pipe, num_inference_steps=20)
    pipe.save_pretrained(folder / "pipe")
    pipe = spread(open_pipeline(folder / "pipe"), folder, place)
    with offload.dispatched(pipe.vae) as owner:
        made = images(pipe, num_inference_steps=20)
        owner.check_integrity()
        assert owner is offload.dispatched(pipe.text_encoder)
    return made


PIPELINES = {
    "sd": row("diffusers", "pipeline, 20 steps", "Stable Diffusion: CLIP, UNet, VAE", exact=True),
    "sd3": row("diffusers", "pipeline, 20 steps",
        "Stable Diffusion 3: 2 CLIP, T5, transformer, VAE", exact=True),
    "flux": row("diffusers", "pipeline, 20 steps", "Flux: CLIP, T5, transformer, VAE", exact=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", PIPELINES)
def test_pipelines(kind: str, tmp_path: Path) -> None:
    PIPELINES[kind](partial(drawn, kind))(tmp_path)


def adapter_files(folder: Path) -> Path:
    model = adapted(unet)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.3)
    state = diffusers.utils.convert_state_dict_to_diffusers(peft.get_peft_model_state_dict(model))
    diffusers.StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=state)
    return folder


def _in_tiles(pipe: Any, folder: Path) -> Tensor:
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()
    return images(pipe, ["w4", "w5 w6"], negative_prompt=["w7", "w8"], height=32, width=32)


def _with_a_callback(pipe: Any, folder: Path) -> Tensor:
    def darken(pipe: Any, number: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        tensors["latents"] = tensors["latents"] * 0.9
        return tensors

    return images(pipe, callback_on_step_end=darken)


def _in_another_pipeline(pipe: Any, folder: Path) -> Tensor:
    other = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    first = images(pipe)
    return images(other, "w5", image=first, strength=0.7, height=None, width=None)


def _from_embeddings(pipe: Any, folder: Path) -> Tensor:
    given, _ = pipe.encode_prompt("w5", pipe.device, 1, do_classifier_free_guidance=False)
    return images(pipe.to("cpu"), prompt_embeds=given, guidance_scale=1.0)


def _saved(pipe: Any, folder: Path) -> Tensor:
    pipe.save_pretrained(folder / "again")
    return images(diffusers.DiffusionPipeline.from_pretrained(folder / "again"))


@pytest.mark.parametrize(
    "use", [_in_tiles, _with_a_callback, _in_another_pipeline, _from_embeddings, _saved]
)
def test_uses_of_a_dispatched_pipeline(use: Any, tmp_path: Path) -> None:
    pipe = spread(pipeline("sd"), tmp_path)
    assert torch.equal(use(pipe, tmp_path), use(pipeline("sd"), tmp_path))
    offload.dispatched(pipe.vae).close(keep="host")
    assert torch.equal(images(pipe), images(pipeline("sd")))


def test_adapters_loaded_before_are_in_the_tiers(tmp_path: Path) -> None:
    plain, pipe = pipeline("sd"), pipeline("sd")
    for each in (plain, pipe):
        each.load_lora_weights(adapter_files(tmp_path / "lora"))
    spread(pipe, tmp_path)
    before = images(plain)
    assert torch.equal(images(pipe), before)
    for each in (plain, pipe):
        each.set_adapters(["default_0"], [0.5])
    assert torch.equal(images(pipe), images(plain))
    assert not torch.equal(images(pipe), before)
    for each in (plain, pipe):
        each.fuse_lora()
    assert torch.equal(images(pipe), images(plain))


CONVERTS = row("diffusers", "pipeline dispatched, then `to(dtype)`", "any",
    refused="UnsupportedError: set precision (fp32, bf16 or fp16) and device in the configuration",
)  # fmt: skip
MOVES = row("diffusers", "pipeline dispatched, then enable_model_cpu_offload and its like", "any",
    refused="UnsupportedError: leave out this call; budget and device in offload's configuration "
    "say how much memory they take, and where",
)  # fmt: skip
ADAPTS = row("diffusers", "pipeline dispatched, then load_lora_weights", "any",
    refused="UnsupportedError: load adapters before dispatch(pipe), or close the tiers first, "
    "which gives the weights back: offload.dispatched(pipe.vae).close(keep='host')",
)  # fmt: skip


@pytest.mark.parametrize(
    ("refused", "call"),
    [
        (CONVERTS, lambda pipe: pipe.to(torch.bfloat16)),
        (CONVERTS, lambda pipe: pipe.to("meta")),
        (MOVES, lambda pipe: pipe.enable_model_cpu_offload()),
        (MOVES, lambda pipe: pipe.enable_sequential_cpu_offload("cpu")),
        (MOVES, lambda pipe: pipe.unet.enable_group_offload(torch.device("cpu"))),
        (ADAPTS, lambda pipe: pipe.load_lora_weights("lora")),
        (ADAPTS, lambda pipe: pipe.unet.load_lora_adapter("lora")),
    ],
)
def test_what_changes_the_weights_is_refused(refused: Any, call: Any, tmp_path: Path) -> None:
    pipe = spread(pipeline("sd"), tmp_path)
    refused(lambda *_: call(pipe))(tmp_path)
    assert torch.equal(images(pipe), images(pipeline("sd")))


def test_pipelines_that_cannot_be_dispatched(tmp_path: Path) -> None:
    from offload.integrations.diffusers import dispatch

    with pytest.raises(ConfigError, match="not a pipeline of diffusers"):
        dispatch(unet())
    moved = pipeline("sd")
    moved.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(UnsupportedError, match="hooks of enable_group_offload"):
        spread(moved, tmp_path)
    pipe, other = spread(pipeline("sd"), tmp_path), pipeline("sd")
    other.text_encoder = pipe.text_encoder
    with pytest.raises(StateError, match="is dispatched"):
        spread(other, tmp_path)


def test_formats_of_models_and_what_stays_in_memory(tmp_path: Path) -> None:
    from offload.integrations.diffusers import open_pipeline

    pipeline("flux").save_pretrained(tmp_path / "pipe")
    dtype = {"default": torch.bfloat16, "vae": torch.float32}
    plain = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "pipe", dtype=dtype)
    pipe = open_pipeline(tmp_path / "pipe", dtype=dtype)
    spread(pipe, tmp_path, budget={"host": "1MiB", "nvme": "64MiB"})
    for name, model in models_of(pipe).items():
        assert {p.dtype for p in model.parameters()} == {dtype.get(name, torch.bfloat16)}
    made = [images(each, output_type="latent") for each in (pipe, plain)]
    assert torch.equal(*made)
    assert torch.equal(*(each.vae.decode(torch.ones(1, 4, 8, 8)).sample for each in (pipe, plain)))


def test_folders_that_are_not_opened(tmp_path: Path) -> None:
    from offload.integrations.diffusers import open_pipeline

    with pytest.raises(ConfigError, match="hf download"):
        open_pipeline("stabilityai/stable-diffusion-3.5-large")
    pipeline("sd").save_pretrained(tmp_path)
    weights = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    os.replace(tmp_path / "vae" / weights.name, weights)
    with pytest.raises(CheckpointError, match="needs; get the whole"):
        open_pipeline(tmp_path)
    weights.unlink()
    with pytest.raises(ConfigError, match="reads no pickles"):
        open_pipeline(tmp_path)
    with pytest.raises(ConfigError, match=r"has no model_index\.json"):
        open_pipeline(tmp_path / "unet")


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"device_map": "balanced"}, "budget and device"),
        ({"quantization_config": {}}, "storage.weights"),
        ({"torch_dtype": torch.bfloat16}, "is called dtype"),
        ({"dtype": "auto"}, "not a torch.dtype"),
    ],
)
def test_arguments_that_are_not_taken(argument: Any, text: str, tmp_path: Path) -> None:
    from offload.integrations.diffusers import open_pipeline

    with pytest.raises(ConfigError, match=text):
        open_pipeline(tmp_path, **argument)


def test_a_folder_in_the_hubs_cache_is_opened(tmp_path: Path) -> None:
    from offload.integrations.diffusers import open_pipeline

    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/1f2e"
    plain = pipeline("sd")
    plain.save_pretrained(snapshot)
    blobs.mkdir()
    for file in [path for path in snapshot.rglob("*") if path.is_file()]:
        blob = file.rename(blobs / str(len(list(blobs.iterdir()))))
        file.symlink_to(os.path.relpath(blob, file.parent))
    pipe = spread(open_pipeline(snapshot), tmp_path)
    assert torch.equal(images(pipe), images(plain))


def test_each_model_expects_its_own_last_pass(tmp_path: Path) -> None:
    pipe = spread(pipeline("sd"), tmp_path)
    owner = offload.dispatched(pipe.unet)
    images(pipe)
    expected, wrong = owner.store.trace, []
    use = expected.use

    def checked(index: int, **how: Any) -> bool:
        wrong.extend({index} - {next(expected.cursor.upcoming()), expected._cycle.last})
        return use(index, **how)

    expected.use = checked  # type: ignore[method-assign]
    images(pipe)
    assert not wrong, [owner.store.groups[index].name for index in wrong]


def test_a_dropped_pipeline_gives_its_files_back(tmp_path: Path) -> None:
    def swap_files() -> int:
        links = Path("/proc/self/fd").iterdir()
        return sum(str(tmp_path) in os.readlink(each) for each in links if each.is_symlink())

    pipe = spread(pipeline("sd"), tmp_path)
    images(pipe)
    assert swap_files()
    owner = offload.dispatched(pipe.vae)
    closed = owner._tier_manager
    del pipe, owner
    gc.collect()
    closed.close()  # waits for the thread that closes it
    assert not swap_files()
