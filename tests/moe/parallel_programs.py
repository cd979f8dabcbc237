"""What every rank runs in the tests of experts that are spread over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from offload.errors import UnsupportedError
from offload.moe import MoE
from offload.moe.exchange import expert_groups
from tests.ranks.processes import heard

WIDTH, EXPERTS = 8, 8


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


class Net(nn.Module):
    """Two layers of experts; `recompute` "" or how; `frozen`: what is below them."""

    def __init__(
        self, recompute: str = "", frozen: bool = False, autocast: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)
        self.layers = nn.ModuleList(
            MoE(WIDTH, expert, num_experts=EXPERTS, **options) for _ in range(2)
        )
        self.recompute, self.autocast = recompute, autocast

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, loss = self.first(x), torch.zeros(())
        for layer in self.layers:
            again = {"use_reentrant": self.recompute == "reentrant"}
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                y, l_aux, _ = checkpoint(layer, x, **again) if self.recompute else layer(x)
            x, loss = x + y, loss + l_aux
        return x, loss


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def x_of(rank: int, step: int, tokens: int = 20) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(tokens, WIDTH, generator=generator)


Steps = tuple[list[Tensor], list[dict[str, Tensor | None]], dict[str, Tensor]]


def gradients_of(model: Net) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def average_gradients(model: Net) -> None:
    """Make gradients those of the mean loss over all ranks, as an engine's step does."""
    spread = {p for layer in model.layers if layer.ep_size > 1 for p in layer.experts.parameters()}
    for param in model.parameters():
        own = torch.zeros_like(param) if param.grad is None else param.grad
        group = expert_groups(model.layers[0].ep_size).data if param in spread else None
        there = torch.tensor(float(param.grad is not None))
        dist.all_reduce(own, group=group)
        dist.all_reduce(there, group=group)
        param.grad = own / dist.get_world_size() if there else None


def train(model: Net, tokens: list[int], aux: float, steps: int) -> Steps:
    """This rank's outputs, the gradients after averaging, and the state at the end."""
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs, gradients = [], []
    for step in range(steps):
        y, l_aux = model(x_of(rank, step, tokens[rank]))
        share = dist.get_world_size() / sum(tokens)  # ranks have different numbers of tokens
        (y.square().sum() * share + aux * l_aux).backward()
        average_gradients(model)
        outputs.append(y.detach())
        gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return outputs, gradients, model.state_dict()


def run_cases(cases: list[tuple[dict[str, Any], list[int], float]]) -> list[Steps]:
    """Cases one after the other: options of the model, tokens per rank, weight of `l_aux`."""
    return [train(net(**options), tokens, aux, steps=1) for options, tokens, aux in cases]


def alone(options: dict[str, Any], tokens: list[int]) -> Steps:
    """The same in one process, with all ranks' tokens; without `l_aux`."""
    model = net(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    y, _ = model(torch.cat([x_of(rank, 0, count) for rank, count in enumerate(tokens)]))
    (y.square().sum() / sum(tokens)).backward()
    gradients = gradients_of(model)
    optimizer.step()
    return [y.detach()], [gradients], model.state_dict()


def load_and_save(state: dict[str, Tensor]) -> tuple[list[str], dict[str, Tensor], Tensor]:
    """The state of ep_size 1, loaded at 2: names that were missing, the state again, an output."""
    model = net(ep_size=2, k=2, top2_2nd_expert_sampling=False)
    keys = model.load_state_dict(state)
    assert not keys.unexpected_keys
    return keys.missing_keys, model.state_dict(), model(x_of(dist.get_rank(), 5))[0].detach()


def errors() -> list[str]:
    """What is said of sizes that do not fit two ranks."""
    said = []
    for options in ({"ep_size": 3}, {"ep_size": 4}, {"ep_size": 0}, {"ep_size": 16}):
        try:
            net(**options)
        except Exception as error:  # noqa: BLE001 - its type is asserted
            said.append(f"{type(error).__name__}: {error}")
    model = net(ep_size=2)
    try:
        DistributedDataParallel(model)(x_of(0, 0))
    except UnsupportedError as error:
        said.append(str(error))
    try:
        model.load_state_dict({**model.state_dict(), "layers.0.experts.8.0.weight": torch.ones(1)})
    except RuntimeError as error:
        said.append(str(error))
    return said


def warnings() -> list[str]:
    """What is logged without an engine: before training, and in two forwards of it."""
    said = heard()
    model = net(ep_size=2)
    with torch.no_grad():
        model(x_of(0, 0))
    said.append("training")
    for _ in range(2):
        model(x_of(0, 0))
    return said
