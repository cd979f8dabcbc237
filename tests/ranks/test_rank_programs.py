"""What users do with `param.grad` means on several ranks what it means to one process with all
their data, at every stage and placement."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.offload.engine_cases import HOST, NVME, assert_same_bits
from tests.ranks.gradient_programs import (
    Outcome,
    Pass,
    Program,
    Use,
    Variant,
    alone,
    draw,
    on_ranks,
)
from tests.ranks.processes import run_ranks
from tests.ranks.programs import assert_near

BF16 = {"precision": "bf16"}
RECORDS = {**HOST, "optimizer": "nvme"}
VARIANTS = [
    Variant(1, HOST), Variant(2, NVME), Variant(3, NVME), Variant(1, NVME, speculates=True),
    Variant(3, RECORDS, speculates=True), Variant(3, HOST, speculates=True, beside_gpu=True),
    Variant(3, NVME, speculates=True),
]  # fmt: skip
BF16_VARIANTS = [
    Variant(1, NVME, BF16), Variant(3, HOST, BF16), Variant(2, NVME, BF16, speculates=True),
    Variant(3, RECORDS, BF16, speculates=True), Variant(3, NVME, BF16, speculates=True),
    Variant(3, HOST, BF16, speculates=True, beside_gpu=True),
]  # fmt: skip


def taking(*branches: int) -> Pass:
    generator = torch.Generator().manual_seed(len(branches))
    tokens = []
    for branch in branches:
        batch = torch.randint(37, (2, 7), generator=generator)
        batch[0, 0] = branch
        tokens.append(batch)
    return Pass(tuple(tokens))


BRANCHES = tuple(f"choice.branches.{number}.weight" for number in range(2))
STEP, CLEAR = Use("step"), Use("clear", BRANCHES[:1])
# The first rank has all of both branches, small as they are: also of the one it does not use.
PROGRAMS: dict[str, Program] = {
    "all are cleared amid passes, one after a step": [
        taking(1, 0), Use("zero", ("model",)), taking(1, 0), STEP, CLEAR, taking(0, 1), STEP,
    ],
    "zeroed amid passes of the same branch": [
        taking(0, 0), Use("clear to zero", BRANCHES[:1]), taking(0, 0), STEP,
    ],
}  # fmt: skip


def check(program: Program, by_rank: list[list[Outcome]], *, is_fp32: bool = True) -> None:
    """`by_rank`: of variants that have to be the same bit for bit."""
    first = by_rank[0][0]
    for found in (outcome for outcomes in by_rank for outcome in outcomes):
        assert not found.error
        assert found.numbers == first.numbers
        assert_same_bits(found.states, first.states)
    if is_fp32:
        expected = alone(program, len(by_rank))
        assert first.numbers == pytest.approx(expected.numbers, rel=1e-6, abs=1e-9)
        for name, value in expected.states.items():
            if name in first.states:  # and not a second name of one
                assert_near(first.states[name], value, 1e-6, name, least=1e-3)


def test_what_all_ranks_clear_is_gone_on_all(tmp_path: Path, long: bool) -> None:
    programs, variants = list(PROGRAMS.values()), VARIANTS if long else VARIANTS[-1:]
    for program, by_rank in outcomes_of(programs, 2, variants, tmp_path):
        check(program, by_rank)


def test_a_gradient_that_some_ranks_clear_and_others_never_had_is_refused(tmp_path: Path) -> None:
    programs: list[Program] = [[taking(1, 0), CLEAR, STEP]]
    for _, by_rank in outcomes_of(programs, 2, VARIANTS[-1:], tmp_path):
        for outcomes in by_rank:
            assert "different ways" in outcomes[0].error
            assert f"{BRANCHES[0]}.grad is cleared" in outcomes[0].error


def test_drawn_loops_train_as_one_process_does(tmp_path: Path, long: bool) -> None:
    programs = [draw(seed, 3, apart=bool(seed % 2)) for seed in range(20 if long else 1)]
    kept = 0
    for program, by_rank in outcomes_of(programs, 3, VARIANTS if long else VARIANTS[2:], tmp_path):
        check(program, by_rank)
        kept += sum(outcome.kept for outcomes in by_rank for outcome in outcomes)
    assert kept


@pytest.mark.slow
def test_drawn_loops_in_16_bits_are_the_same_everywhere(tmp_path: Path, long: bool) -> None:
    programs = [draw(seed, 2, apart=bool(seed % 2)) for seed in range(10, 50 if long else 11)]
    for program, by_rank in outcomes_of(programs, 2, BF16_VARIANTS, tmp_path):
        check(program, by_rank, is_fp32=False)


def outcomes_of(
    programs: list[Program], ranks: int, variants: list[Variant], folder: Path
) -> Iterator[tuple[Program, list[list[Outcome]]]]:
    """Each program, and by rank what became of it in every variant."""
    for first in range(0, len(programs), 10):  # each of their tensors takes a file descriptor
        some = programs[first : first + 10]
        found = run_ranks(ranks, folder, on_ranks, some, variants, str(folder), timeout_s=600.0)
        for number, program in enumerate(some):
            yield program, [outcomes[number] for outcomes in found]
