"""The rows of docs/libraries.md: each is a test of one library's trainer with one kind of model.

    @row("TRL", "SFTTrainer", "Llama, LoRA")
    def test_name(place: str, folder: Path) -> Result: ...

The loop is run in three places, "plain" (no engine), "host" and "nvme" (all states there), each
with a folder of its own, and returns losses and weights. Those of host and nvme must have equal
bits, and be within `CLOSE` of plain's, or with `exact=True` have plain's bits. A combination that
is refused is given its error's class and a part of its message, `refused="StateError: ..."`: it is
run in "host" alone, and must raise that error.

python -m tests.libraries.rows         # writes the page anew
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import offload
from offload import errors
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, config

PLACEMENTS = {"host": HOST, "nvme": NVME}
CLOSE = 1e-6
PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
HEAD = """# Libraries, row by row

What people train with, and the result with an engine. Each row is a test that runs the loop as the
library's users write it, with a tiny model in fp32, three times: in plain PyTorch, through an
engine with all states in host memory, and through one with all states on nvme. It compares all
losses, logged gradient norms and weights, or the images or logits of models that are dispatched.
Blocks that are compiled are so in all three.

- *As plain PyTorch*: host and nvme have equal bits, and each value differs from plain PyTorch's by
  1e-6 at most (values above 1: by 1e-6 of the value). The bits are not plain PyTorch's, because an
  engine's AdamW rounds otherwise than `torch.optim.AdamW`.
- *Bits of plain PyTorch*: all three have equal bits.
- An error: the combination is refused with this error, which says what to do instead.

`make test-libraries` installs the libraries and runs the tests, which are in `tests/libraries/`;
`python -m tests.libraries.rows` writes this page.

| library | trainer or loop | model | result |
|---|---|---|---|
"""
Result = Any  # numbers, tensors, and nested lists, tuples and dictionaries of them
Run = Callable[[str, Path], Result]


class Row(NamedTuple):
    """One line of the table."""

    library: str
    trainer: str
    model: str
    exact: bool = False
    refused: str = ""  # the error and its remedy

    @property
    def result(self) -> str:
        return self.refused or ("bits of plain PyTorch" if self.exact else "as plain PyTorch")


def row(library: str, trainer: str, model: str, **how: Any) -> Callable[[Run], Callable[..., None]]:
    """Make a test of a run, the proof of a row."""
    claim = Row(library, trainer, model, **how)

    def proof(run: Run) -> Callable[..., None]:
        def test(tmp_path: Path) -> None:
            if claim.refused:
                error, remedy = claim.refused.split(": ", 1)
                with pytest.raises(getattr(errors, error), match=re.escape(remedy)):
                    run("host", tmp_path)
                return
            folders = {place: tmp_path / place for place in ("plain", *PLACEMENTS)}
            for folder in folders.values():
                folder.mkdir()
            assert_equal([run(at, folder) for at, folder in folders.items()], claim.exact)

        test.__doc__ = run.__doc__
        return test

    return proof


@contextmanager
def adamw(
    place: str, folder: Path, model: nn.Module, numbers: dict[str, Any], **keys: Any
) -> Iterator[torch.optim.Optimizer]:
    """Yield PyTorch's AdamW of the model's trained parameters, or that of an engine."""
    if place == "plain":
        trained = [param for param in model.parameters() if param.requires_grad]
        yield torch.optim.AdamW(trained, **numbers)
        return
    optimizer = {"type": "adamw", **numbers, **keys.pop("optimizer", {})}
    keys = config(folder, PLACEMENTS[place], optimizer=optimizer, **keys)
    with offload.initialize(model, keys) as engine:
        yield engine.optimizer


def flat(result: Result) -> dict[str, Tensor]:
    """Its numbers and tensors, by their place in it."""
    leaves, _ = _pytree.tree_flatten_with_path(result)
    assert leaves, "nothing to compare"
    return {
        _pytree.keystr(path): value.detach()
        if isinstance(value, Tensor)
        else torch.tensor(value, dtype=torch.float64)
        for path, value in leaves
    }


def assert_equal(results: Sequence[Result], exact: bool = False) -> None:
    """The first result is plain PyTorch's; the others have equal bits."""
    plain, first, *more = map(flat, results)
    for other in [*more, plain] if exact else more:
        assert_same_bits(other, first)
    assert first.keys() == plain.keys()
    for name, expected in plain.items():
        scale = expected.abs().clamp(min=1)
        error = ((first[name] - expected).abs() / scale).max() if expected.numel() else 0.0
        assert error <= CLOSE, f"{name} differs by {float(error):.2e}"


def rows() -> Iterator[Row]:
    """Yield the rows of all tests, read from their sources: most libraries may be missing here."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "row":
                texts = [ast.literal_eval(each) for each in node.args]
                yield Row(*texts, **{str(k.arg): ast.literal_eval(k.value) for k in node.keywords})


def page() -> str:
    """The page's text."""
    lines = [
        f"| {each.library} | {each.trainer} | {each.model} | {each.result} |"
        for each in sorted(rows())
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
