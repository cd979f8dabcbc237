"""A layer of experts beside the same computed token by token; inputs and experts of all kinds."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.deepspeed as deepspeed
from offload.errors import ConfigError
from offload.moe import Experts, MoE

WIDTH, SEED = 16, 5


class Expert(nn.Module):
    """Notes how many tokens it is called with."""

    def __init__(self, inner: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.down(torch.tanh(self.up(x)))


def layer(seed: int = 0, **options: Any) -> MoE:
    torch.manual_seed(seed)
    return MoE(WIDTH, Expert, **{"num_experts": 6, **options})


def x_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


def one_by_one(moe: MoE, x: Tensor) -> Tensor:
    """The experts' part of the output, a token at a time, with random numbers of `SEED`."""
    flat = x.reshape(-1, WIDTH)
    torch.manual_seed(SEED)
    routing = moe.gate(flat)
    rows = [
        sum(
            (w * moe.experts[int(e)](token[None])[0] for e, w, there in zip(*row, strict=True)
             if there),
            torch.zeros(WIDTH),
        )
        for token, row in zip(
            flat, zip(routing.experts, routing.weights, routing.kept, strict=True), strict=True
        )
    ]  # fmt: skip
    return torch.stack(rows).view_as(x)


OPTIONS: list[dict[str, Any]] = [
    {"k": 1}, {"k": 2}, {"k": 3}, {"k": 6}, {"k": 1, "num_experts": 1},
    {"k": 2, "capacity_factor": 0.4, "min_capacity": 0}, {"k": 2, "drop_tokens": False},
    {"k": 4, "capacity_factor": 0.5},
    {"k": 1, "noisy_gate_policy": "RSample"}, {"k": 2, "noisy_gate_policy": "Jitter"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_are_computed_by_their_experts(options: dict[str, Any]) -> None:
    moe = layer(**options)
    x, y = x_of(3, 7).requires_grad_(), x_of(3, 7).requires_grad_()
    torch.manual_seed(SEED)
    output, l_aux, counts = moe(x)
    expected = one_by_one(moe, y)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert counts.sum() == 21 * options["k"]
    assert counts.dtype == torch.int64
    output.square().sum().backward()
    mine = {name: p.grad for name, p in moe.named_parameters()}
    moe.zero_grad()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    for name, param in moe.named_parameters():
        assert (mine[name] is None) == (param.grad is None), name
        torch.testing.assert_close(mine[name], param.grad, rtol=1e-4, atol=1e-5)
    assert l_aux.shape == ()
    assert l_aux.dtype == torch.float32


def test_an_expert_without_tokens_is_not_called() -> None:
    moe = layer(k=1, drop_tokens=False)
    with torch.no_grad():
        moe.gate.weight.zero_()[2] = 1.0
    called: list[list[int]] = []
    moe.experts.on_chosen = lambda numbers: called.append([*numbers])
    output, l_aux, counts = moe(x_of(10).abs())
    (output.sum() + l_aux).backward()
    assert counts.tolist() == [0, 0, 10, 0, 0, 0]
    assert called == [[2]]
    assert [expert.seen for expert in moe.experts] == [[], [], [10], [], [], []]
    assert [expert.up.weight.grad is None for expert in moe.experts] == [n != 2 for n in range(6)]


def test_evaluation_has_a_capacity_of_its_own() -> None:
    moe = layer(k=1, capacity_factor=0.5, eval_capacity_factor=6.0, min_capacity=0)
    x = x_of(30)
    assert moe(x)[0].any(1).sum() < 30
    moe.eval()
    assert moe(x)[0].any(1).all()
    assert torch.equal(moe(x)[0], moe(x)[0])


def test_the_residual_form_mixes_a_dense_expert() -> None:
    moe = layer(use_residual=True, k=2)
    x = x_of(12)
    share = torch.softmax(moe.coefficient(x), -1)
    expected = one_by_one(moe, x) * share[:, :1] + moe.mlp(x) * share[:, 1:]
    torch.manual_seed(SEED)
    torch.testing.assert_close(moe(x)[0], expected, rtol=1e-5, atol=1e-6)


def test_unused_tokens_are_left_out() -> None:
    moe = layer(k=2, capacity_factor=0.5, min_capacity=0, seed=2)
    x = x_of(2, 6)
    padding = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    output, _, counts = moe.eval()(x, padding)
    assert counts.sum() == 8 * 2
    assert not output[padding == 0].any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_nan_reaches_the_output_of_its_token_alone(options: dict[str, Any]) -> None:
    moe = layer(**options).eval()
    x = x_of(20)
    x[3, 0] = float("nan")
    output, l_aux, counts = moe(x)
    assert output[3].isnan().all()
    assert not output[[*range(3), *range(4, 20)]].isnan().any()
    assert l_aux.isnan()
    assert counts.sum() == 20 * options["k"]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_nan_is_not_hidden_by_dropping_its_token(k: int) -> None:
    moe = layer(k=k, eval_capacity_factor=0.01, min_capacity=0).eval()  # one place per expert
    x = x_of(20)
    x[3:6] = float("nan")
    assert moe(x)[0][3:6].isnan().all()
    assert not moe(x)[0][6:].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_output_has_the_format_of_the_input(dtype: torch.dtype) -> None:
    moe = layer(k=2).to(dtype)
    output, l_aux, _ = moe(x_of(9).to(dtype))
    assert output.dtype == dtype
    assert l_aux.dtype == torch.float32
    (output.sum() + l_aux).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(k=2)(x_of(9))[0].dtype == torch.float32


def test_a_module_is_copied_and_a_function_called_per_expert() -> None:
    torch.manual_seed(3)
    one = Expert()
    copies = MoE(WIDTH, one, num_experts=3)
    for expert in copies.experts:
        assert expert is not one
        assert torch.equal(expert.up.weight, one.up.weight)
    made = layer(num_experts=3)
    values = {expert.up.weight.sum().item() for expert in made.experts}
    assert len(values) == 3
    more = layer(num_experts=5)  # an expert's values follow from its number
    assert torch.equal(more.experts[2].up.weight, made.experts[2].up.weight)


def test_experts_are_found_by_their_number_among_all() -> None:
    here = [Expert() for _ in range(3)]
    experts = Experts(here, first=3, total=6)  # as on the second of two ranks
    assert next(iter(experts.state_dict())).startswith("3.")
    assert experts[4] is here[1]
    assert [*experts[1:]] == here[1:]
    experts[5] = here[0]
    assert experts[5] is here[0]
    for number in (0, 6, -1):
        with pytest.raises(IndexError, match="this rank has 3 to 5"):
            experts[number]
    with pytest.raises(IndexError):
        experts[6] = here[0]


def test_an_expert_with_another_output_shape_is_named() -> None:
    moe = layer(k=6, drop_tokens=False)
    moe.experts[3] = nn.Linear(WIDTH, 5)
    with pytest.raises(ConfigError, match=r"expert 3 makes \(8, 5\) of tokens of shape \(8, 16\)"):
        moe(x_of(8))
    moe.experts[3] = nn.LSTM(WIDTH, WIDTH)  # of a tuple the first
    assert moe(x_of(8))[0].shape == (8, WIDTH)


def test_arguments_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigError, match=r"capacity_factor is '1\.0'"):
        layer(capacity_factor="1.0")
    with pytest.raises(TypeError):
        MoE(WIDTH, [Expert()], num_experts=2)
    with pytest.raises(TypeError):
        MoE(WIDTH, lambda: torch.ones(3), num_experts=2)
    with pytest.raises(ConfigError, match="hidden_size, 16"):
        layer()(torch.ones(3, 8))
    with pytest.raises(ConfigError, match="floating-point"):
        layer()(torch.ones(3, 16, dtype=torch.long))
    with pytest.raises(RuntimeError, match="must match the size"):
        layer()(torch.ones(3, 16), torch.ones(2))


def test_copies_and_saved_layers_compute_the_same() -> None:
    moe = layer(k=2, top2_2nd_expert_sampling=False)
    x = x_of(30)
    expected = moe(x)[0]
    assert torch.equal(copy.deepcopy(moe)(x)[0], expected)
    assert torch.equal(pickle.loads(pickle.dumps(moe))(x)[0], expected)
    other = layer(seed=9, k=2, top2_2nd_expert_sampling=False)
    assert not torch.equal(other(x)[0], expected)
    other.load_state_dict(moe.state_dict())
    assert torch.equal(other(x + 1)[0], moe(x + 1)[0])
    assert set(moe.state_dict()) >= {"gate.weight", "experts.5.up.weight"}


def test_a_deepspeed_loop_trains_experts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.moe = nn.Linear(WIDTH, WIDTH), layer(k=2, num_experts=2)

        def forward(self, x: Tensor) -> Tensor:
            output, l_aux, _ = self.moe(self.dense(x))
            return output.square().mean() + l_aux

    net = Net()
    before = net.moe.experts[0].up.weight.detach().clone()
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters()), config={"train_batch_size": 20}
    )
    engine.backward(engine(x_of(20)))
    engine.step()
    with engine.offload.gathered():
        assert not torch.equal(net.moe.experts[0].up.weight, before)
    engine.destroy()
