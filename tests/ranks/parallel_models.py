"""What every rank runs in the tests of tensor parallelism, pipelines and dispatched models."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import offload
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, bits, config, seeded

WIDTH, HEADS, LENGTH, BATCH = 24, 4, 6, 2
BUDGET = {"host": "64MiB", "nvme": "64MiB"}
CLIP = 0.2
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "chunk": 2048}


class Attention(nn.Module):
    """As many heads as this rank's projections have."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.second_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.5))  # never a DTensor

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y: Tensor = self.down(nn.functional.gelu(self.up(self.second_norm(x))))
        return x + y * self.gain


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 5)
        for name, param in self.named_parameters():
            if name.endswith("bias"):  # what starts at zero is nothing but rounding in a few steps
                nn.init.normal_(param, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.last(self.frozen(x))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def parallelised(model: Model, mesh: DeviceMesh) -> Model:
    """Attention by heads, the MLP by columns and rows, the second norm along the sequence; `first`,
    the gains and the first norms stay plain."""
    for block in model.blocks:
        along = {"second_norm": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1)
        )}  # fmt: skip
        parallelize_module(block, mesh, along)
        plan = {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(),
            "second_norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    ends = {"frozen": ColwiseParallel(), "last": RowwiseParallel()}
    parallelize_module(model, mesh, ends)
    return model


@dataclass(frozen=True)
class Case:
    """One training run of the model above on a mesh (dp, tp)."""

    stage: int
    placement: dict[str, Any]
    steps: int = 3
    keys: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]  # of this rank
    norms: list[float]
    weights: dict[str, Tensor]  # whole
    states: dict[str, Tensor]  # of the optimizer, whole


def data_of(steps: int, ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [
            (torch.randn(BATCH, LENGTH, WIDTH, generator=generator),
             torch.randint(5, (BATCH, LENGTH), generator=generator))
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]  # fmt: skip


def keys_of(case: Case, folder: str) -> dict[str, Any]:
    keys = config(
        Path(folder), case.placement, budget=BUDGET, optimizer=OPTIMIZER,
        zero={"stage": case.stage}, clip_grad_norm=CLIP,
    )  # fmt: skip
    return {**keys, **case.keys}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def outcome_of(engine: offload.Engine, losses: list[float], norms: list[float]) -> Outcome:
    weights = {name: whole(value) for name, value in engine.module.state_dict().items()}
    names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
    states = {
        f"{names[number]} {key}": whole(value)
        for number, state in engine.optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    return Outcome(losses, norms, weights, states)


def train(case: Case, shape: tuple[int, int], folder: str) -> Outcome:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = parallelised(seeded(Model, seed=dist.get_rank()), mesh["tp"])
    losses, norms = [], []
    with offload.initialize(model, keys_of(case, folder), mesh=mesh["dp"]) as engine:
        for step in data_of(case.steps, shape[0]):
            losses.append(_step(engine, step[mesh.get_local_rank("dp")]))
            norms.append(engine.report().gradient_norm or 0.0)
        engine.check_integrity()
        return outcome_of(engine, losses, norms)


def train_all(cases: Sequence[Case], shape: tuple[int, int], folder: str) -> list[Outcome]:
    return [train(case, shape, folder) for case in cases]


def alone(case: Case, ranks: int, folder: str) -> Outcome:
    """One rank with the batches of all, and the model as it is."""
    losses, norms = [], []
    with offload.initialize(seeded(Model), keys_of(case, folder)) as engine:
        for step in data_of(case.steps, ranks):
            for batch in step:
                loss = loss_of(engine.module, batch)
                engine.backward(loss / ranks)
                losses.append(loss.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            norms.append(engine.report().gradient_norm or 0.0)
        return outcome_of(engine, losses, norms)


def overflow(folder: str) -> tuple[int, list[float], dict[str, Tensor]]:
    """The second of two steps has an infinite gradient in one rank's part of one parameter."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelised(seeded(Model), mesh["tp"])
    case = Case(1, HOST, keys={"skip_nonfinite": True})
    with offload.initialize(model, keys_of(case, folder), mesh=mesh["dp"]) as engine:
        for number, step in enumerate(data_of(2, 1)):
            if number == 1 and dist.get_rank() == 1:
                weight = engine.module.blocks[0].up.weight
                weight.register_hook(lambda gradient: gradient * math.inf)
            _step(engine, step[0])
        report = engine.report()
        outcome = outcome_of(engine, [], [report.gradient_norm or 0.0])
        return report.skipped_steps, outcome.norms, outcome.weights


def interrupted(folder: str, shape: tuple[int, int], stages: tuple[int, int]) -> list[Outcome]:
    """Four steps at once, and the last two of them after a distributed checkpoint, at another
    stage of ZeRO."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    path = f"{folder}/checkpoint"
    data = [step[mesh.get_local_rank("dp")] for step in data_of(4, shape[0])]
    outcomes = []
    for stage, first in zip(stages, (0, 2), strict=True):
        model = parallelised(seeded(Model, seed=first), mesh["tp"])
        keys = keys_of(Case(stage, NVME), folder)
        with offload.initialize(model, keys, mesh=mesh["dp"]) as engine:
            if first:
                _step(engine, data[0])  # a distributed checkpoint fills states that are there
                states = _states_of(engine)
                dcp.load(states, checkpoint_id=path)
                engine.module.load_state_dict(states["model"])
                engine.optimizer.load_state_dict(states["optimizer"])
            losses = []
            for number, batch in enumerate(data[first:], first):
                losses.append(_step(engine, batch))
                if number == 1:
                    dcp.save(_states_of(engine), checkpoint_id=path)
            outcomes.append(outcome_of(engine, losses[-2:], []))
    return outcomes


def _step(engine: offload.Engine, batch: tuple[Tensor, Tensor]) -> float:
    loss = loss_of(engine.module, batch)
    engine.backward(loss)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return loss.item()


def _states_of(engine: offload.Engine) -> dict[str, Any]:
    return {"model": engine.module.state_dict(), "optimizer": engine.optimizer.state_dict()}


def in_turn(folder: str) -> tuple[Any, list[Outcome], dict[str, str]]:
    """What needs two ranks, in one world."""
    return overflow(folder), interrupted(folder, (1, 2), (3, 1)), refusals(folder)


def left_alone(folder: str) -> str:
    """What the first of two ranks is told of a step that the other one does not take."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelised(seeded(Model), mesh["tp"])
    with offload.initialize(model, keys_of(Case(1, HOST), folder), mesh=mesh["dp"]) as engine:
        loss_of(engine.module, data_of(1, 1)[0][0]).backward()
        try:
            if dist.get_rank() == 0:
                engine.optimizer.step()
        except offload.OffloadError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def refusals(folder: str) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    keys, errors = keys_of(Case(1, HOST), folder), {}

    def attempt(what: str, ask: Callable[[], object]) -> None:
        try:
            ask()
        except offload.OffloadError as error:
            errors[what] = f"{type(error).__name__}: {error}"

    def model() -> Model:
        return parallelised(seeded(Model), mesh["tp"])

    def on_two_dimensions() -> nn.Module:
        built = seeded(Model)
        spread = distribute_tensor(built.last.weight, mesh, [Replicate(), Shard(0)])
        built.last.weight = nn.Parameter(spread)
        return built

    attempt("no mesh", lambda: offload.initialize(model(), keys))
    attempt("two dimensions", lambda: offload.initialize(model(), keys, mesh=mesh))
    attempt("on two", lambda: offload.initialize(on_two_dimensions(), keys, mesh=mesh["dp"]))
    attempt("meta", lambda: offload.initialize(model().to("meta"), keys, mesh=mesh["dp"]))
    attempt("weights", lambda: offload.initialize(model(), keys, mesh=mesh["dp"], weights=folder))
    with offload.initialize(model(), keys, mesh=mesh["dp"]) as engine:
        attempt("save", lambda: engine.save_checkpoint(f"{folder}/saved"))
        attempt("load", lambda: engine.load_checkpoint(f"{folder}/saved"))
    return errors


# ------------------------------------------------------------------------- a language model
VOCABULARY = 37
PARKED = {**NVME, "activations": {"tier": "nvme", "checkpoint": False}}


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelised_language(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for index in range(2):
        plan = {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(use_local_output=False),  # a DTensor between the two
            "down": RowwiseParallel(),
        }
        parallelize_module(model.get_submodule(f"blocks.{index}"), mesh, plan)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    embed = RowwiseParallel(input_layouts=Replicate())
    return parallelize_module(model, mesh, {"embed": embed, "head": head})


def train_language(parallel: bool, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Two passes per step; losses and, by name, gradients of the last step, weights, and one weight
    written to at the end."""
    mesh, model = None, seeded(LanguageModel)
    if parallel:
        both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        mesh, model = both["dp"], parallelised_language(model, both["tp"])
    generator = torch.Generator().manual_seed(3)
    losses, tensors = [], {}
    with offload.initialize(model, keys_of(Case(1, PARKED), folder), mesh=mesh) as engine:
        for _ in range(3):
            for _ in range(2):
                tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
                with loss_parallel() if parallel else nullcontext():
                    logits = model(tokens[:, :-1]).flatten(0, 1)
                    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
                    (loss / 2).backward()
                losses.append(whole(loss).item())
            for name, param in model.named_parameters():
                gradient = engine.gradient(param)
                assert gradient is not None, name
                tensors[f"{name} gradient"] = whole(gradient)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        tensors.update({name: whole(value) for name, value in model.state_dict().items()})
        with torch.no_grad(), engine.gathered(model.head.weight):
            model.head.weight.mul_(2)
        tensors["twice"] = whole(model.state_dict()["head.weight"])
    return losses, tensors


# ------------------------------------------------------------------------- dispatched models
PLACEMENTS: list[Any] = ["host", "nvme", {"host": "50%", "nvme": "50%"}]
PLAN = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def dispatch_keys(folder: str, parameters: Any) -> dict[str, Any]:
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
        model = offload.dispatch(
            parallelised(seeded(Model), mesh), dispatch_keys(folder, parameters)
        )
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
        offload.dispatch(model, dispatch_keys(folder, "nvme"))
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
    model = offload.dispatch(seeded(TinyLM, dist.get_rank()), dispatch_keys(folder, "nvme"))
    with offload.dispatched(model):
        return [bits(model(tokens)) for _ in range(1 + 2 * dist.get_rank())]


def dispatched_all(folder: str) -> tuple[Any, Any, Any]:
    return outputs(folder), generated(folder), by_itself(folder)
