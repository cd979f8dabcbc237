"""Lightning's Trainer with offload's strategy trains as with its own, a loop of Fabric without one.

`make test-libraries` installs Lightning and runs this file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offload.checkpoint.foreign.exporting import export
from offload.errors import CheckpointError, ConfigError, OffloadError, PathError, UnsupportedError
from tests.libraries.rows import Result, adamw, row
from tests.offload.engine_cases import assert_same_bits, assert_scheduler_is_saved, seeded
from tests.outside.memory import assert_streams
from tests.outside.trainer_cases import (
    ACCUMULATE,
    BLOCKS,
    CLIP,
    NUMBERS,
    PLACEMENTS,
    Rows,
    assert_close,
    settings,
    tiny_llama,
    values_of,
)

lightning = pytest.importorskip("lightning")
strategies = pytest.importorskip("offload.integrations.lightning")

EPOCHS, PER_EPOCH = 3, 2  # steps per epoch


def rows(seed: int = 1, shuffle: bool = False) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Rows(2 * ACCUMULATE * PER_EPOCH, seed), batch_size=2, shuffle=shuffle)


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, decay: bool = True, optimizer: str = "AdamW", rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = tiny_llama()
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        loss = self.model(**batch).loss
        self.evaluated.append(loss.item())
        self.log("val_loss", loss)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ]
        kinds: dict[str, Any] = {"SGD": {"momentum": 0.9}, "Adagrad": {}}
        keys = {"lr": self.hparams.rate, **kinds.get(self.hparams.optimizer, {})}
        optimizer = getattr(torch.optim, self.hparams.optimizer)(groups, **keys)
        schedules = torch.optim.lr_scheduler
        warm = schedules.LinearLR(optimizer, total_iters=2)
        scheduler = schedules.SequentialLR(
            optimizer, [warm, schedules.CosineAnnealingLR(optimizer, 8)], milestones=[2]
        )
        return {
            "optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }  # fmt: skip


def keys_for(folder: Path, placement: str = "nvme", **keys: Any) -> dict[str, Any]:
    """Without an optimizer: that is the module's."""
    made = settings(folder, PLACEMENTS[placement], **keys)
    return made if "optimizer" in keys else {k: v for k, v in made.items() if k != "optimizer"}


def trainer_for(folder: Path, strategy: Any = "auto", **keys: Any) -> Any:
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, save_top_k=-1, filename="{epoch}", save_last=True
    )
    keys = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, **keys}
    return lightning.Trainer(
        accelerator="cpu", devices=1, callbacks=[saving, *keys.pop("callbacks", [])],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        strategy=strategy, **{"logger": False, **keys},
    )  # fmt: skip


def fit(
    folder: Path, strategy: Any = "auto", module: Any = None, *, resume: Any = None, **keys: Any
) -> tuple[Any, Any]:
    torch.manual_seed(3)
    module = seeded(Lit) if module is None else module
    trainer = trainer_for(folder, strategy, **keys)
    trainer.fit(module, rows(), rows(2), ckpt_path=None if resume is None else str(resume))
    return module, trainer


def fit_in(place: str, folder: Path, resume: Path | None = None, **keys: Any) -> Result:
    """Fit with a strategy of `place`, and return losses and weights."""
    strategy = "auto" if place == "plain" else strategies.OffloadStrategy(keys_for(folder, place))
    module, trainer = fit(folder, strategy, resume=resume, **keys)
    found = module.losses, module.evaluated, values_of(module)
    if place != "plain":
        assert trainer.callback_metrics.keys() >= {"train_loss", "val_loss"}
        assert_scheduler_is_saved(strategy.engine)
        strategy.engine.close()
    return found


@row("Lightning", "Trainer, OffloadStrategy, resumed", "Llama")
def test_a_strategy_trains_as_without_and_resumes_to_the_bit(place: str, folder: Path) -> Result:
    losses, evaluated, weights = fit_in(place, folder, gradient_clip_val=CLIP)
    resumed = fit_in(place, folder / "again", folder / "epoch=0.ckpt", gradient_clip_val=CLIP)
    assert resumed[0] == losses[len(losses) // EPOCHS :]
    assert_same_bits(resumed[2], weights)
    return losses, evaluated, weights


def test_a_plain_checkpoint_is_loaded_and_a_folder_is_exported(tmp_path: Path) -> None:
    expected, _ = fit(tmp_path / "plain")
    strategy = strategies.OffloadStrategy(keys_for(tmp_path))
    resumed, trainer = fit(tmp_path / "offload", strategy, resume=tmp_path / "plain/epoch=0.ckpt")
    assert_close(resumed.losses, expected.losses[len(expected.losses) // EPOCHS :])
    assert_close(values_of(resumed), values_of(expected))
    # after fit: saved again, tested, and made a file of Lightning's own
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    trainer.test(resumed, rows(2), verbose=False)
    weights = values_of(resumed)
    strategy.engine.close()
    export(tmp_path / "final.ckpt", tmp_path / "final.safetensors")
    loaded = seeded(Lit, 1)
    loaded.load_state_dict(load_file(tmp_path / "final.safetensors"))
    assert_same_bits(values_of(loaded), weights)


class Meta(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = tiny_llama()


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    strategy = strategies.OffloadStrategy(keys_for(tmp_path))
    begun, _ = fit(tmp_path / "offload", strategy, Meta())
    losses, weights = begun.losses, values_of(begun)
    strategy.engine.close()
    again = strategies.OffloadStrategy(keys_for(tmp_path))
    saved = tmp_path / "offload" / "epoch=1.ckpt"
    resumed, _ = fit(tmp_path / "again", again, Meta(), resume=saved)
    assert resumed.losses == losses[len(losses) * 2 // EPOCHS :]
    assert_same_bits(values_of(resumed), weights)
    again.engine.close()
    # its folder as weights=
    third = strategies.OffloadStrategy(keys_for(tmp_path), weights=saved)
    module = Meta()
    trainer_for(tmp_path / "third", third).validate(module, rows(2), verbose=False)
    assert module.evaluated == begun.evaluated[-2 * len(module.evaluated) : -len(module.evaluated)]
    third.engine.close()


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_precisions_are_the_engines(precision: str, tmp_path: Path) -> None:
    configured = {"bf16-true": "bf16", "16-true": "fp16"}[precision]
    losses = []
    for name, trainers, keys in [("a", precision, {}), ("b", None, {"precision": configured})]:
        strategy = strategies.OffloadStrategy(keys_for(tmp_path, "host", **keys))
        module, _ = fit(tmp_path / name, strategy, precision=trainers)
        assert strategy.engine.config.precision == configured
        losses.append(module.losses)
        strategy.engine.close()
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


class Manual(Lit):
    automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()


@row("Lightning", "Trainer, OffloadStrategy, manual optimization", "Llama")
def test_manual_optimization(place: str, folder: Path) -> Result:
    return fit_in(place, folder, module=seeded(Manual), accumulate_grad_batches=1)


def test_an_optimizer_of_parameters_outside_the_module_is_refused(tmp_path: Path) -> None:
    class Outside(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([*self.parameters(), nn.Parameter(torch.ones(3))])

    with pytest.raises(OffloadError, match=r"shape \(3,\)"):
        fit(tmp_path, strategies.OffloadStrategy(keys_for(tmp_path)), seeded(Outside))


def test_two_processes_train_as_ddp_does(tmp_path: Path) -> None:
    """Begun by `torchrun`."""
    import subprocess
    import sys

    for name in ("ddp", "offload"):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
            "-m", "tests.libraries.lightning_ranks", name, str(tmp_path),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    expected, actual = (torch.load(tmp_path / f"{name}.pt") for name in ("ddp", "offload"))
    assert_close(actual, expected)


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "precision": (
        ConfigError, {"precision": "bf16"}, {"precision": "16-true"},
        "precision: bf16.*precision='16-true'",
    ),
    "autocast": (
        ConfigError, {"precision": "bf16"}, {"precision": "bf16-mixed"}, "bf16-mixed",
    ),
    "double": (UnsupportedError, {}, {"precision": "64-true"}, "DoublePrecision"),
    "clipping": (
        ConfigError, {"clip_grad_norm": 1.0}, {"gradient_clip_val": 0.5},
        "clip_grad_norm: 1.0.*gradient_clip_val=0.5",
    ),
    "device": (ConfigError, {"device": "cuda"}, {}, "device: cuda"),
    "lr": (
        ConfigError, {"optimizer": {"type": "adamw", "lr": 0.5}}, {}, "optimizer.lr: 0.5.*lr=0.003",
    ),
    "type": (ConfigError, {"optimizer": {"type": "lion"}}, {}, "optimizer.type: lion"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_named_twice_is_refused(case: str, tmp_path: Path) -> None:
    error, configured, theirs, message = REFUSED[case]
    with pytest.raises(error, match=message):
        fit(tmp_path, strategies.OffloadStrategy(keys_for(tmp_path, **configured)), **theirs)


class Rms(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters())


class Two(Manual):
    def configure_optimizers(self) -> Any:
        half = list(self.parameters())
        return torch.optim.SGD(half[:3], lr=0.1), torch.optim.SGD(half[3:], lr=0.1)


ASYNC = lightning.pytorch.plugins.io.AsyncCheckpointIO
NO_COUNTERPART: list[tuple[Any, Any, dict[str, Any]]] = [
    (row("Lightning", "Trainer, OffloadStrategy, RMSprop", "any",
         refused="UnsupportedError: RMSprop has no rule here, and its states could not be kept in "
         "tiers; use one of AdamW, Adam, Adagrad, SGD, Muon"), Rms, {}),
    (row("Lightning", "Trainer, OffloadStrategy, several optimizers", "any",
         refused="UnsupportedError: configure_optimizers returned 2 optimizers, an engine has one; "
         "use one with several param groups, or offload.initialize for each model in a loop of "
         "your own"), Two, {}),
    (row("Lightning", "Trainer(sync_batchnorm=True), OffloadStrategy", "any",
         refused="UnsupportedError: sync_batchnorm=True replaces modules for DDP; convert the "
         "model before (torch.nn.SyncBatchNorm.convert_sync_batchnorm)"),
     Lit, {"sync_batchnorm": True}),
    (row("Lightning", "Trainer, OffloadStrategy, AsyncCheckpointIO", "any",
         refused="UnsupportedError: AsyncCheckpointIO: checkpoints are streamed into a folder by "
         "the engine; leave the plugin out"), Lit, {"plugins": [ASYNC()]}),
]  # fmt: skip


@pytest.mark.parametrize(("check", "kind", "keys"), NO_COUNTERPART)
def test_what_has_no_counterpart(check: Any, kind: Any, keys: Any, tmp_path: Path) -> None:
    strategy = strategies.OffloadStrategy(keys_for(tmp_path))
    check(lambda *_: fit(tmp_path, strategy, kind(), accumulate_grad_batches=1, **keys))(tmp_path)


def test_folders_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    strategy = strategies.OffloadStrategy(keys_for(tmp_path))
    module, trainer = fit(tmp_path / "offload", strategy)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    with pytest.raises(PathError, match="mine"):
        trainer.save_checkpoint(tmp_path / "mine")
    with pytest.raises(PathError, match="is a URL"):
        trainer.save_checkpoint("s3://bucket/x.ckpt")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        trainer.fit(module, rows(), ckpt_path=str(tmp_path / "mine"))
    strategy.engine.save_checkpoint(tmp_path / "engines")
    with pytest.raises(CheckpointError, match="was not saved by OffloadStrategy"):
        trainer.fit(module, rows(), ckpt_path=str(tmp_path / "engines"))
    strategy.engine.close()


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_lightnings_part_runs_no_code_unless_it_is_trusted(tmp_path: Path) -> None:
    strategy = strategies.OffloadStrategy(keys_for(tmp_path))
    module, trainer = fit(tmp_path / "offload", strategy)
    weights = values_of(module)
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update(a=Bomb(tmp_path / "off"))
    trainer.save_checkpoint(tmp_path / "bomb.ckpt")
    with torch.no_grad():
        module.model.lm_head.weight.zero_()
    with pytest.raises(CheckpointError, match="weights_only=False"):
        trainer.test(module, rows(2), ckpt_path=str(tmp_path / "bomb.ckpt"), verbose=False)
    assert not (tmp_path / "off").exists()
    trainer.test(module, rows(2), ckpt_path=str(tmp_path / "offload/last.ckpt"), verbose=False)
    assert_same_bits(values_of(module), weights)
    strategy.engine.close()


def test_saving_and_loading_stream(tmp_path: Path) -> None:
    assert_streams("trainer", tmp_path)


# ---------------------------------------------------------------- without a strategy
def fabric(model: Any, optimizer: Any) -> tuple[list[float], list[float]]:
    made = lightning.Fabric(accelerator="cpu")
    made.launch()
    model, optimizer = made.setup(model, optimizer)
    losses, norms = [], []
    for number, batch in enumerate(made.setup_dataloaders(rows()), 1):
        loss = model(**batch).loss
        made.backward(loss / ACCUMULATE)
        losses.append(loss.item())
        if number % ACCUMULATE == 0:
            norms.append(float(made.clip_gradients(model, optimizer, max_norm=CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


@row("Lightning", "a loop of Fabric", "Llama")
def test_a_fabric_loop_trains_as_without_an_engine(place: str, folder: Path) -> Result:
    model = tiny_llama()
    with adamw(place, folder, model, NUMBERS, **BLOCKS) as optimizer:
        return fabric(model, optimizer), values_of(model)
