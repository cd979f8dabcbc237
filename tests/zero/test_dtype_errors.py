"""Tensors of two formats: an error that names module and remedy, and the remedies work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import DtypeError, UnsupportedError
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    ON,
    config,
    on_the_cpu_alone,
    seeded,
)

pytestmark = MARKS

WIDTH = 8


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...], str]] = [
    (lambda: nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH)), (4, WIDTH), r"1 \(Linear\)"),
    (lambda: nn.Conv1d(WIDTH, WIDTH, 1), (4, WIDTH, 3), r"the model \(Conv1d\)"),
    (lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 1), (4, WIDTH, 2, 2), r"\(ConvTranspose2d\)"),
    (lambda: nn.LSTM(WIDTH, WIDTH), (4, WIDTH), r"\(LSTM\)"),
    (lambda: nn.LayerNorm(WIDTH), (4, WIDTH), r"\(LayerNorm\)"),
    (lambda: nn.GroupNorm(2, WIDTH), (4, WIDTH), r"\(GroupNorm\)"),
    (lambda: nn.PReLU(), (4, WIDTH), r"\(PReLU\)"),
]


@pytest.mark.filterwarnings("ignore:RNN module weights are not part:UserWarning")  # on a GPU
@pytest.mark.parametrize(("build", "shape", "name"), CASES)
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_fp32_inputs_of_a_bf16_model_are_named_with_the_remedy(
    tmp_path: Path, build: Callable[[], nn.Module], shape: tuple[int, ...], name: str,
    placement: Any,
) -> None:  # fmt: skip
    x = torch.randn(shape, device=ON)
    message = rf"{name}, whose parameters are bf16, is given fp32.*x\.to\(torch\.bfloat16\)"
    model = build()
    with offload.initialize(model, config(tmp_path, placement, precision="bf16")):
        with pytest.raises(DtypeError, match=message) as caught:
            model(x)
        assert isinstance(caught.value, (UnsupportedError, RuntimeError))
        assert caught.value.__cause__ is not None
        model(x.bfloat16())


def test_bf16_inputs_of_an_fp32_model_are_named(tmp_path: Path) -> None:
    model = normed()
    with offload.initialize(model, config(tmp_path, HOST)):
        with pytest.raises(DtypeError, match=r"0 \(Linear\), .* fp32, is given bf16"):
            model(torch.randn(4, WIDTH, device=ON).bfloat16())
        with torch.autocast(ON, torch.bfloat16):
            model(torch.randn(4, WIDTH, device=ON).bfloat16())


@on_the_cpu_alone("a GPU computes with fp32 statistics beside bf16 weights")
def test_a_batch_norm_with_fp32_statistics_is_named_and_a_cast_model_trains(
    tmp_path: Path,
) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(ON).bfloat16()
    model = seeded(normed)
    with (
        offload.initialize(model, config(tmp_path, HOST, precision="bf16")),
        pytest.raises(DtypeError, match=r"1 \(BatchNorm1d\).* buffers in fp32.*before offload\.in"),
    ):
        model(x)
    plain, model = seeded(normed).to(ON).bfloat16(), seeded(normed).bfloat16()
    plain(x).square().sum().backward()
    with offload.initialize(model, config(tmp_path, NVME, precision="bf16")) as engine:
        model(x).square().sum().backward()
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            found = engine.gradient(ours)
            assert found is not None
            assert expected.grad is not None
            assert torch.equal(found, expected.grad)


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    class Raising(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("two of the same type")

    model = Raising(WIDTH, WIDTH)
    with offload.initialize(model, config(tmp_path, HOST)), pytest.raises(ValueError, match="two"):
        model(torch.randn(4, WIDTH, device=ON))
