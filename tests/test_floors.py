"""Floors within `offload/` and `tools/memest/`: imports run down, and nowhere in a circle.

Imports within functions count, those for type checkers do not: at run time nothing comes of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEMEST = "offload.tools.memest"
# From the ground up: a floor may use those before it. Names of folders, and of modules beside them.
FLOORS: list[set[str]] = [
    {"display", "errors", "losses", "process"},
    {"config"},
    {"gpt", "loggers", "moe"},
    {"checkpoint"},
    {"planning"},
    {"kv", "memory", "models", "optimizers", "quantized", "report", "weights"},
    {"runs"},
    {"tiered_model"},
    {"inference", "engine"},
    {"engine_lookup"},
    {"deepspeed"},
    {"train"},
    {"bench"},
    {"integrations"},
    {"cli"},
    {"__main__"},
]  # fmt: skip
# The same of `tools/memest/`: its rooms, and modules beside them.
MEMEST_ROOMS: list[set[str]] = [
    {"generation"}, {"source", "hardware"}, {"estimate"}, {"show"}, {"commands"}, {"cli"},
    {"__main__"},
]  # fmt: skip
# The same of `planning/`; the package itself is below its rooms.
PLANNING_ROOMS: list[set[str]] = [
    {"plan"}, {"activations"}, {"step"}, {"machine"}, {"choice"},
]  # fmt: skip
# The same of `checkpoint/`; the format knows no engine.
CHECKPOINT_ROOMS: list[set[str]] = [{"format"}, {"foreign"}, {"engine"}]
LAYERS = {"tiers", "swap", "kernels", "zero", "tools"}  # linked: `test_house` knows them


def modules(folder: Path, package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.glob("**/*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[0] not in LAYERS:
            names = parts[:-1] if parts[-1] == "__init__" else parts
            yield ".".join([package, *names]), path


@cache
def graph() -> dict[str, set[str]]:
    """Of every module those that it imports; the facade `offload` names its own by strings."""
    paths = dict(modules(ROOT / "offload", "offload"))
    paths |= dict(modules(ROOT / "tools/memest", MEMEST))
    del paths["offload"]
    return {
        name: {other for other in imported(path, paths) if other in paths and other != name}
        for name, path in paths.items()
    }


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in run_nodes(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module)


def run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.expr):
            continue  # no import is in an expression
        yield child
        yield from run_nodes(child)


def floor_of(module: str) -> int:
    name = module.split(".")[1]
    (floor,) = [number for number, names in enumerate(FLOORS) if name in names]
    return floor


def within_offload() -> list[str]:
    return [name for name in graph() if name.split(".")[1] not in LAYERS]


def test_every_module_is_on_one_floor() -> None:
    there = {name.split(".")[1] for name in within_offload()}
    assert there == set().union(*FLOORS)
    assert len(there) == sum(map(len, FLOORS))


def test_no_import_runs_up() -> None:
    up = [
        f"{name} imports {other}"
        for name in within_offload()
        for other in sorted(graph()[name])
        if other.split(".")[1] not in LAYERS and floor_of(other) > floor_of(name)
    ]
    assert up == []


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("offload.checkpoint", CHECKPOINT_ROOMS), ("offload.planning", PLANNING_ROOMS),
        (MEMEST, MEMEST_ROOMS),
    ],
)  # fmt: skip
def test_no_import_among_rooms_runs_up(package: str, rooms: list[set[str]]) -> None:
    def room_of(module: str) -> int:
        name = module.removeprefix(f"{package}.").split(".")[0]
        (room,) = [number for number, names in enumerate(rooms) if name in names]
        return room

    inside = {name for name in graph() if name.startswith(f"{package}.")}
    up = [
        f"{name} imports {other}"
        for name in sorted(inside)
        for other in sorted(graph()[name] & inside)
        if room_of(other) > room_of(name)
    ]
    assert up == []


@pytest.mark.parametrize("package", ["offload", MEMEST])
def test_no_import_runs_in_a_circle(package: str) -> None:
    left = {
        name: {other for other in others if other.startswith(package)}
        for name, others in graph().items()
        if name.startswith(package)
    }
    while ends := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in ends}
    assert sorted(left) == []  # what is left imports itself in the end
