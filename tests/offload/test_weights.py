"""`weights=`: every tensor as it is, rounded at most, or an error that names it."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import offload
from offload.errors import CheckpointError, ConfigError
from tests.offload.engine_cases import HOST, MARKS, config, seeded
from tests.offload.engine_states import bits

pytestmark = MARKS

INF = float("inf")


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("scale", torch.ones(32))
        self.register_buffer("sixteen", torch.ones(32, dtype=torch.float16))
        self.register_buffer("count", torch.zeros(32, dtype=torch.int64))
        self.register_buffer("small", torch.zeros(32, dtype=torch.int8))
        self.register_buffer("mask", torch.zeros(32, dtype=torch.bool))
        self.register_buffer("transient", torch.ones(32), persistent=False)


def files(folder: Path, **changed: Tensor | None) -> Path:
    """A safetensors file of the model with other values, and some tensors as given."""
    values: dict[str, Tensor | None] = {
        name: torch.full_like(tensor, 3) if tensor.is_floating_point() else tensor
        for name, tensor in seeded(WithBuffers).state_dict().items()
    }
    values |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
    kept = {name: tensor for name, tensor in values.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return folder / "model.safetensors"


def loaded(folder: Path, weights: Path, precision: str = "fp32") -> dict[str, Tensor]:
    model = seeded(WithBuffers)
    keys = config(folder, HOST, precision=precision)
    with offload.initialize(model, keys, weights=weights) as engine, engine.gathered():
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def refusal(folder: Path, precision: str = "fp32", **changed: Tensor) -> str:
    with pytest.raises(CheckpointError) as caught:
        loaded(folder, files(folder, **changed), precision)
    return str(caught.value)


def test_persistent_buffers_come_from_the_files_and_others_do_not(tmp_path: Path) -> None:
    mean, count = torch.randn(32), torch.tensor(7)
    weights = files(
        tmp_path, norm__running_mean=mean, norm__num_batches_tracked=count,
        transient=torch.full((32,), 9.0),
    )  # fmt: skip
    tensors = loaded(tmp_path, weights)
    assert bits(tensors["norm.running_mean"]) == bits(mean)
    assert tensors["norm.num_batches_tracked"].item() == 7
    assert tensors["scale"].eq(3).all()
    assert tensors["transient"].eq(1).all()


@pytest.mark.parametrize("shape", [(1,), (), (32, 1), (1, 32), (31,), (0,)])
@pytest.mark.parametrize("name", ["scale", "linear__bias"])
def test_no_shape_is_broadcast(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    message = refusal(tmp_path, "fp32", **{name: torch.ones(shape)})
    assert f"{name.replace('__', '.')} has shape {shape}, in the model (32,)" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", torch.full((32,), 1.7)),
        ("small", torch.full((32,), 128)),
        ("mask", torch.full((32,), 2)),
        ("scale", torch.full((32,), 2**24 + 1)),
        ("scale", torch.full((32,), 1 + 1j)),
        *(
            ("linear__bias", torch.ones(32, dtype=dtype))
            for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64)
        ),
    ],
)
def test_no_kind_of_number_becomes_another(tmp_path: Path, name: str, value: Tensor) -> None:
    message = refusal(tmp_path, "fp32", **{name: value})
    assert f"{name.replace('__', '.')} is {value.dtype} in the files" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sixteen", torch.full((32,), INF)),
        ("sixteen", torch.full((32,), 1 / 3)),
        ("scale", torch.full((32,), float("nan"), dtype=torch.float64)),
    ],
)
def test_floating_point_numbers_are_rounded(tmp_path: Path, name: str, value: Tensor) -> None:
    rounded = loaded(tmp_path, files(tmp_path, **{name: value}))[name]
    assert bits(rounded) == bits(value.to(rounded.dtype))


@pytest.mark.parametrize(
    ("name", "precision", "value", "shown"),
    [
        ("sixteen", "fp32", torch.full((32,), 1e30), "1e+30"),
        ("sixteen", "fp32", torch.full((32,), 65520.0), "65520"),
        ("sixteen", "fp32", torch.full((32,), -1e30, dtype=torch.bfloat16), "-1.0"),
        ("scale", "fp32", torch.full((32,), 1e300, dtype=torch.float64), "1e+300"),
        ("linear__bias", "fp16", torch.full((32,), 1e30), "1e+30"),
        ("linear__bias", "fp16", torch.full((32,), 70000.0, dtype=torch.bfloat16), "70144"),
        ("linear__bias", "bf16", torch.full((32,), 3.4e38), "3.4e+38"),
        ("linear__bias", "fp32", torch.full((32,), 1e300, dtype=torch.float64), "1e+300"),
    ],
)
def test_no_value_becomes_infinite(
    tmp_path: Path, name: str, precision: str, value: Tensor, shown: str
) -> None:
    value[:-1] = 0
    message = refusal(tmp_path, precision, **{name: value})
    assert f"{name.replace('__', '.')} ({value.dtype}) holds {shown}" in message


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    first = files(tmp_path)
    save_file({"linear.bias": torch.zeros(32)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"linear\.bias is in .*model.* and in .*other"):
        loaded(tmp_path, tmp_path)
    loaded(tmp_path, first)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="no safetensors file"):
        loaded(tmp_path, tmp_path)


def test_what_can_be_no_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights at"):
        loaded(tmp_path, Path("a\0b"))


def test_buffers_that_the_files_lack_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "offload"):
        tensors = loaded(tmp_path, files(tmp_path, norm__running_mean=None, scale=None))
    assert "2 buffers are not in the files" in caplog.text
    assert "norm.running_mean" in caplog.text
    assert tensors["scale"].eq(1).all()


def test_an_integer_parameter_comes_from_the_files(tmp_path: Path) -> None:
    def build() -> Any:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model.table = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
        return model

    values = {name: tensor for name, tensor in build().state_dict().items() if name != "table"}
    weights = tmp_path / "model.safetensors"
    mean = torch.randn(4)
    save_file({**values, "1.running_mean": mean, "table": torch.arange(4)}, weights)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = build()
        with offload.initialize(model, config(tmp_path, HOST), weights=weights):
            assert model.table.tolist() == [0, 1, 2, 3]
            assert bits(model[1].running_mean) == bits(mean)
    save_file(values, weights)
    with pytest.raises(CheckpointError, match="no tensor table"):
        offload.initialize(build(), config(tmp_path, HOST), weights=weights)


def test_missing_tensors_are_named_together_and_unused_ones_in_a_warning(
    tmp_path: Path, caplog: Any
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    values = build().state_dict()
    renamed, more = tmp_path / "renamed.safetensors", tmp_path / "more.safetensors"
    save_file({f"model.{name}": tensor for name, tensor in values.items()}, renamed)
    with pytest.raises(CheckpointError) as caught:
        offload.initialize(build(), config(tmp_path, HOST), weights=renamed)
    assert str(caught.value).startswith(
        "weights: no tensor 0.weight, 0.bias, 1.weight and 3 more in the files, which have "
        "model.0.bias, model.0.weight, model.1.bias and 3 more (6 of 6 parameters); "
    )
    save_file({**values, "more": torch.ones(2)}, more)
    with offload.initialize(build(), config(tmp_path, HOST), weights=more):
        assert "1 tensors of the files are not the model's, and unused (more)" in caplog.text


def test_of_a_folders_links_those_of_a_hubs_cache_are_followed(tmp_path: Path) -> None:
    """There a snapshot's files are links to blobs beside it; no other leads out of a folder."""
    (tmp_path / "hub/blobs").mkdir(parents=True)
    snapshot = tmp_path / "hub/snapshots/1f2e"
    snapshot.mkdir(parents=True)
    files(snapshot, linear__bias=torch.full((32,), 7.0))
    (snapshot / "model.safetensors").rename(tmp_path / "hub/blobs/ab12")
    (snapshot / "model.safetensors").symlink_to("../../blobs/ab12")
    assert loaded(tmp_path, snapshot)["linear.bias"].eq(7).all()
    shutil.copy(tmp_path / "hub/blobs/ab12", tmp_path / "outside")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"leads to .*, outside of its folder"):
        loaded(tmp_path, snapshot)
    tensors = loaded(tmp_path, snapshot / "model.safetensors")  # named by the user
    assert tensors["linear.bias"].eq(7).all()
