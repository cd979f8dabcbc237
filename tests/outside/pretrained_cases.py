"""Folders in transformers' format, and a comparison of what it and offload load from them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import offload
from offload.tiered_model import DTYPES
from tests.offload.engine_cases import HOST, assert_same_bits, bits, config
from tests.outside.zoo import MAX_NUMEL, NAMES, tiny_config, transformers

FILE = "model.safetensors"


def saved(folder: Path, model_type: str, *, shard: str = "1GB", **settings: Any) -> Path:
    """A tiny causal language model, as `save_pretrained` writes it; ValueError for others."""
    shape = tiny_config(model_type)
    for name, value in settings.items():
        setattr(shape, name, value)
    kind: Any = getattr(transformers, NAMES[model_type])
    with torch.device("meta"):
        numel = sum(p.numel() for p in kind(copy.deepcopy(shape)).parameters())
    if numel > MAX_NUMEL:
        raise ValueError(f"{numel} parameters after shrinking")
    torch.manual_seed(0)
    kind(shape).save_pretrained(folder, max_shard_size=shard)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None]) -> Path:
    """Other tensors in the one file of a folder."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}
    save_file(change(tensors) or tensors, folder / FILE, {"format": "pt"})
    return folder


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones under each name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def plainly(folder: Path, kind: Any, precision: str = "fp32", **kwargs: Any) -> Any:
    torch.manual_seed(3)
    return kind.from_pretrained(folder, dtype=DTYPES[precision], **kwargs)


def opened(
    folder: Path, swap: Path, kind: Any = None, precision: str = "fp32", **kwargs: Any
) -> offload.Engine:
    keys = config(swap, HOST, budget={"host": "64MiB"}, precision=precision)
    torch.manual_seed(3)
    return offload.from_pretrained(folder, keys, model_class=kind, **kwargs)


def assert_same_model(plain: Any, engine: offload.Engine) -> None:
    """Names, ties, formats, bits, what is trained, and both configurations."""
    model: Any = engine.module
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in plain.parameters()
    ]
    with engine.gathered():
        expected, actual = tensors_of(plain), tensors_of(model)
        assert actual.keys() == expected.keys()
        wrong = [
            name for name, tensor in actual.items()
            if tensor.dtype != expected[name].dtype or tensor.shape != expected[name].shape
            or bits(tensor.detach().clone()) != bits(expected[name].detach())
        ]  # fmt: skip
    assert not wrong, f"{len(wrong)} of {len(actual)} differ: {wrong[:5]}"
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.training == plain.training
    if plain.can_generate():
        assert model.generation_config.to_dict() == plain.generation_config.to_dict()


def assert_same_files(actual: Path, expected: Path) -> None:
    names = [sorted(path.name for path in folder.iterdir()) for folder in (actual, expected)]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".safetensors"):
            loaded = [load_file(folder / name) for folder in (actual, expected)]
            assert_same_bits(*loaded)
            assert [t.dtype for t in loaded[0].values()] == [t.dtype for t in loaded[1].values()]
        else:
            assert (actual / name).read_text() == (expected / name).read_text()


def assert_all_uses_equal(
    plain: Any, source: Path, folder: Path, dtype: torch.dtype, **kwargs: Any
) -> None:
    """Opened, written again, and dispatched on two tiers; in fp32 also a frozen base's step."""
    wanted = {n: bits(p.detach()) for n, p in plain.named_parameters()}
    model: Any = offload.open_pretrained(source, dtype=dtype, **kwargs)
    model.save_pretrained(folder / "ordinary")
    ordinary = type(plain).from_pretrained(folder / "ordinary", dtype=dtype)
    assert {n: bits(p.detach()) for n, p in ordinary.named_parameters()} == wanted
    tokens = torch.arange(8)[None]
    precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    budget = {"host": "64MiB", "nvme": "64MiB"}
    for tier in ("host", "nvme"):
        model = offload.open_pretrained(source, dtype=dtype, **kwargs)
        keys = {"precision": precision, "budget": budget, "placement": {"parameters": tier}}
        offload.dispatch(model, {**keys, "nvme": {"paths": [str(folder / tier)]}})
        with torch.no_grad():
            assert bits(model(tokens).logits) == bits(plain(tokens).logits)
        offload.dispatched(model).close()
    if dtype == torch.float32:
        model = offload.open_pretrained(source, dtype=dtype, **kwargs)
        for each in (model, plain):
            for name, param in each.named_parameters():
                param.requires_grad_("norm" in name)
        keys = config(folder, HOST, budget={"host": "64MiB"}, optimizer={"type": "sgd", "lr": 0.1})
        with offload.initialize(model, keys) as engine:
            engine.backward(model(tokens, labels=tokens).loss)
            engine.optimizer.step()
            plain(tokens, labels=tokens).loss.backward()
            trained = [param for param in plain.parameters() if param.requires_grad]
            torch.optim.SGD(trained, lr=0.1).step()
            with engine.gathered():
                for (name, param), other in zip(
                    model.named_parameters(), plain.parameters(), strict=True
                ):
                    torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-6, msg=name)
                    assert param.requires_grad or bits(param) == wanted[name]
