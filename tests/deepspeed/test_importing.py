"""Training goes on from DeepSpeed's checkpoints as it would have in DeepSpeed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload.deepspeed as deepspeed
from offload.deepspeed.importing import import_checkpoint
from offload.tiers.errors import CheckpointError, ConfigError
from tests.deepspeed import zero_files
from tests.deepspeed.loops import BATCH, IN, batch, initialized, same, weights
from tests.offload.test_cli import run

ROOT = Path(__file__).parents[2]
mse = nn.functional.mse_loss
CONFIG: dict[str, Any] = {
    "train_batch_size": BATCH, "gradient_clipping": 0, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 0.1}},
}  # fmt: skip


class Net(nn.Module):
    """A frozen parameter, a buffer, sizes that no number of ranks divides."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.frozen, self.b = nn.Linear(IN, 17), nn.Linear(17, 5), nn.Linear(5, 4)
        self.register_buffer("scale", torch.full((3,), float(seed)))
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.frozen(torch.tanh(self.a(x))) * self.scale.mean())


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    params = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]


def trained() -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    optimizer = torch.optim.AdamW(groups_of(net), lr=0.02)
    plain_steps(net, optimizer, range(3))
    return net, optimizer


def plain_steps(net: nn.Module, optimizer: torch.optim.Optimizer, passes: range) -> None:
    for number in passes:
        optimizer.zero_grad()
        mse(net(batch(number)[0]), batch(number)[1]).backward()
        optimizer.step()


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)])
def test_training_goes_on(
    stage: int, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer = trained()
    zero_files.write(tmp_path / "theirs/step3", net, optimizer, stage, ranks, epoch=7)
    assert import_checkpoint(tmp_path / "theirs", tmp_path / "out") == tmp_path / "out/step3"
    with initialized(other := Net(2), CONFIG, model_parameters=groups_of(other)) as engine:
        _, client = engine.load_checkpoint(tmp_path / "out")
        assert "step3 has no state of the generators" in caplog.text
        assert client == {"epoch": 7}
        assert engine.global_steps == 3
        assert engine.lr_scheduler.last_epoch == 3
        assert same(weights(other), weights(net))
        assert torch.equal(other.scale, net.scale)
        for number in range(3, 6):
            engine.backward(mse(engine(batch(number)[0]), batch(number)[1]))
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        plain_steps(net, optimizer, range(3, 6))
        assert same(weights(other), weights(net))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_of_16_bit_weights_keep_every_bit(precision: str, tmp_path: Path) -> None:
    net, optimizer = trained()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    zero_files.write(tmp_path / "theirs/x", net, optimizer, 3, 2, dtype=dtype)
    import_checkpoint(tmp_path / "theirs", tmp_path / "out")
    config = {**CONFIG, precision: {"enabled": True}}
    with initialized(other := Net(2), config, model_parameters=groups_of(other)) as engine:
        engine.load_checkpoint(tmp_path / "out")
        for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
            assert torch.equal(mine, theirs.to(dtype))
            if mine.requires_grad:
                assert torch.equal(engine.optimizer.state[mine]["master"], theirs)


def test_a_file_can_run_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    net, optimizer = trained()
    zero_files.write(tmp_path / "theirs/x", net, optimizer, 2, 1, evil=Evil(), epoch=1)
    with pytest.raises(CheckpointError, match=r"posix\.mkdir"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "out")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "out").exists()


def test_a_tie_that_stage_3_does_not_note_is_asked_for(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    net = Tied()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    zero_files.write(tmp_path / "theirs/x", net, optimizer, 3, 2)
    with pytest.raises(CheckpointError, match=r"add --tied b\.weight=NAME"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "out")
    tied = {"b.weight": "a.weight"}
    import_checkpoint(tmp_path / "theirs", tmp_path / "out", tied=tied)
    with initialized(Tied(), CONFIG) as engine:
        engine.load_checkpoint(tmp_path / "out")
        assert torch.equal(engine.module.b.weight, net.a.weight)


def test_what_is_refused(tmp_path: Path) -> None:
    net, optimizer = trained()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint of ZeRO"):
        import_checkpoint(tmp_path / "empty", tmp_path / "out")
    folder = tmp_path / "theirs/x"
    zero_files.write(folder, net, optimizer, 2, 2, ds_config={})
    with pytest.raises(ConfigError, match="add --optimizer"):
        import_checkpoint(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="and sgd keeps none"):
        import_checkpoint(folder, tmp_path / "out", kind="sgd")
    experts = folder / "layer_0_expert_0_mp_rank_00_model_states.pt"
    experts.write_bytes(b"")
    with pytest.raises(CheckpointError, match="1 files of experts, the first layer_0_expert_0"):
        import_checkpoint(folder, tmp_path / "out", kind="adamw")
    experts.unlink()
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="files of 1 ranks, 2 had written"):
        import_checkpoint(folder, tmp_path / "out", kind="adamw")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"no file of torch")
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_checkpoint(folder, tmp_path / "out", kind="adamw")
    assert not (tmp_path / "out").exists()


def test_the_command_asks_for_trust(tmp_path: Path, capsys: Any) -> None:
    net, optimizer = trained()
    zero_files.write(tmp_path / "theirs/x", net, optimizer, 2, 2)
    places = "checkpoint", "import-deepspeed", str(tmp_path / "theirs"), str(tmp_path / "out")
    assert run(*places) == 2
    assert "add --trust" in capsys.readouterr().err
    assert run(*places, "--trust", "--tied", "nonsense") == 2
    assert run(*places, "--trust") == 0
    assert "wrote" in capsys.readouterr().out
    with initialized(Net(), CONFIG) as engine, pytest.raises(CheckpointError, match="--trust"):
        engine.load_checkpoint(tmp_path / "theirs")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_own_losses_go_on(stage: int, precision: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    program = Path(__file__).with_name("saving_program.py")
    done = subprocess.run(
        [sys.executable, str(program), str(stage), precision, str(tmp_path / "theirs")],
        capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ":".join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    import_checkpoint(tmp_path / "theirs", tmp_path / "out")
    from tests.deepspeed.saving_program import go_on, made

    engine = made(deepspeed, stage, precision, seed=2)
    engine.load_checkpoint(tmp_path / "out")
    expected = json.loads((tmp_path / "theirs/after.json").read_text())
    assert go_on(engine, range(5, 10)) == pytest.approx(expected, rel=1e-5)
    engine.destroy()
