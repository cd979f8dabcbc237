"""What the pages of docs/ say of the sources is still so: messages that they quote, arguments of
PyTorch's FSDP that they map, files that they name."""

import ast
import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch.distributed.fsdp as fsdp
from torch.distributed.checkpoint import state_dict as dcp_state

from tests.libraries import rows

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = ("offload", "tiers", "swap", "zero", "kernels", "tools")
FILLED = "…"  # in a page: what the message fills in
# in the sources: whatever stands for it there
HOLE = "\0"
_FORMATTED = re.compile(r"%[-+ #0-9.]*[sdrgf]")


def quoted_messages() -> list[str]:
    """`> `message`` of a line of its own."""
    lines = (DOCS / "troubleshooting.md").read_text().splitlines()
    return [line[2:].strip("`").strip() for line in lines if line.startswith("> `")]


@cache
def templates() -> tuple[str, ...]:
    """Every string in the sources, holes where values go."""
    strings = []
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            strings += _strings(ast.parse(path.read_text()))
    return tuple(dict.fromkeys(text.replace("\n", " ") for text in strings))


def _strings(tree: ast.AST) -> list[str]:
    return [
        _text(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)
    ]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.Constant):
        return _FORMATTED.sub(HOLE, node.value) if isinstance(node.value, str) else ""
    return HOLE


def is_in_the_sources(message: str) -> bool:
    """As one string, or a part of one."""
    parts = message.split(FILLED)
    pattern = re.compile(".*?".join(map(re.escape, parts)))
    longest = max(parts, key=len)
    return any(longest in text and pattern.search(text) for text in templates())


def test_messages_are_quoted() -> None:
    assert len(quoted_messages()) >= 40


@pytest.mark.parametrize("message", quoted_messages(), ids=lambda text: text[:40])
def test_a_message_that_the_page_quotes_is_in_the_sources(message: str) -> None:
    assert is_in_the_sources(message), "no such message: quote it anew, or remove it"


def test_a_message_that_is_nowhere_is_found_out() -> None:
    assert not is_in_the_sources("budget.… is far too short")


def _named(function: object) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "module"}  # type: ignore[arg-type]


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("`fully_shard`", _named(fsdp.fully_shard)),
        ("`MixedPrecisionPolicy`", _fields(fsdp.MixedPrecisionPolicy)),
        ("`CPUOffloadPolicy`", _fields(fsdp.CPUOffloadPolicy)),
        ("Methods of `FSDPModule`", {n for n in vars(fsdp.FSDPModule) if not n.startswith("_")}),
        ("`FullyShardedDataParallel`", _named(fsdp.FullyShardedDataParallel.__init__)),
        ("`MixedPrecision`", _fields(fsdp.MixedPrecision) - {"_module_classes_to_ignore"}),
        ("`CPUOffload`", _fields(fsdp.CPUOffload)),
        ("`ShardingStrategy`", set(fsdp.ShardingStrategy.__members__) - {"_HYBRID_SHARD_ZERO2"}),
        (
            "Methods of `FullyShardedDataParallel`",
            {
                name
                for name, value in vars(fsdp.FullyShardedDataParallel).items()
                if not name.startswith("_") and (callable(value) or isinstance(value, staticmethod))
            }
            - {"forward"},
        ),
        ("`StateDictOptions`", _fields(dcp_state.StateDictOptions) - {"dsd_fqn_modifiers"}),
    ],
)
def test_the_page_for_fsdp_has_every_name(heading: str, names: set[str]) -> None:
    page = (DOCS / "fsdp.md").read_text()
    _, _, section = page.partition(f"\n## {heading}\n")
    section = section.partition("\n## ")[0]
    assert names, "there is something to look for"
    assert not [name for name in sorted(names) if f"`{name}" not in section]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(
        r"\b((?:tests|examples|benchmarks|offload|tools)/[\w/]+\.(?:py|yaml|md|txt))\b",
        page.read_text(),
    )
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_table_of_libraries_has_the_rows_of_their_tests() -> None:
    assert rows.PAGE.read_text() == rows.page()
