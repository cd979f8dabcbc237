"""The house: imports run down only, links resolve, importing `offload` stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "tiers": set(),
    "swap": {"tiers"},
    "zero": {"tiers", "swap", "kernels"},
    "offload": {"tiers", "swap", "kernels", "zero"},
    "tools": {"tiers", "zero", "offload", "kernels"},
}
LINKED = [name for name in ALLOWED if name != "offload"]
ACCELERATOR = "offload.tiers.accelerator"  # every layer may import it: it imports no other
# What only that module asks of PyTorch. A tensor's own device is no secret.
DEVICE_MODULES = re.compile(
    r"torch\.(cuda|xpu|npu|mtia|mps|accelerator|get_device_module|Stream|Event)\b"
)
# The choice of attention kernels in a trace is CUDA's own.
NAMES_CUDA = {"offload/planning/activations/trace.py"}


def sources(layer: str) -> Iterator[Path]:
    for path in sorted((ROOT / layer).glob("**/*.py")):
        inner = path.relative_to(ROOT / layer).parts[0]
        if not (layer == "offload" and inner in LINKED):
            yield path


@cache
def _nodes(text: str) -> list[ast.Import | ast.ImportFrom | ast.Attribute | ast.Compare]:
    kinds = ast.Import, ast.ImportFrom, ast.Attribute, ast.Compare
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def nodes(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Attribute | ast.Compare]:
    """Everything that these tests look at in a file, which is parsed once."""
    return _nodes(path.read_text())


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of everything imported, wherever in the file."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "offload" or len(parts) < 2:
        return None
    return parts[1] if parts[1] in LINKED else "offload"


@pytest.mark.parametrize("layer", ALLOWED)
def test_imports_run_down_only(layer: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(layer)
        for module in imported_modules(path)
        if layer_of(module) not in (None, layer, *ALLOWED[layer]) and not is_accelerator(module)
    ]
    assert wrong == []


def is_accelerator(module: str) -> bool:
    # `from offload.tiers import accelerator` is an import of the package `offload.tiers`, too
    return module in ("offload.tiers", ACCELERATOR)


def test_the_accelerator_module_imports_nothing_of_offload() -> None:
    names = imported_modules(ROOT / "tiers/accelerator.py")
    assert [name for name in names if name.split(".")[0] == "offload"] == []


@pytest.mark.parametrize("layer", [*ALLOWED, "benchmarks"])
def test_only_the_accelerator_module_asks_pytorch_for_devices(layer: str) -> None:
    may = {ROOT / "tiers/accelerator.py"}
    paths = [path for path in sources(layer) if path not in may]
    assert [str(place) for path in paths for place in device_calls(path)] == []


@pytest.mark.parametrize("layer", ALLOWED)
def test_nothing_asks_whether_an_accelerator_is_of_cuda(layer: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(layer)
        for node in nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr == "is_cuda")
        or (isinstance(node, ast.Compare) and "'cuda'" in ast.unparse(node))
    ]
    assert {place.split(":")[0] for place in wrong} <= NAMES_CUDA, wrong


def device_calls(path: Path) -> Iterator[str]:
    """Places that speak to a device's module of PyTorch, by attribute or by import."""
    for node in nodes(path):
        spoken = []
        if isinstance(node, ast.Attribute):
            spoken = [f"{node.value.id}.{node.attr}"] if isinstance(node.value, ast.Name) else []
        elif isinstance(node, ast.Import):
            spoken = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            spoken = [f"{node.module}.{alias.name}" for alias in node.names]
        if any(DEVICE_MODULES.match(name) for name in spoken):
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_a_call_of_a_devices_module_is_seen(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    source = tmp_path / "source.py"
    for line in (
        "torch.cuda.synchronize()", "import torch.xpu", "from torch import accelerator",
        "from torch.cuda import Event", "x = torch.Stream(device)",
    ):  # fmt: skip
        source.write_text(line)
        assert list(device_calls(source)), line
    source.write_text("torch.version.cuda, tensor.cuda()")
    assert list(device_calls(source)) == []


@pytest.mark.parametrize("layer", [*ALLOWED, "tests", "benchmarks"])
def test_no_folder_is_imported_bare(layer: str) -> None:
    bare = re.compile(rf"^ *(from|import) ({'|'.join(LINKED)})\b(?= import|\.\w|$)", re.MULTILINE)
    matches = [(path, bare.search(path.read_text())) for path in sources(layer)]
    assert [f"{path.relative_to(ROOT)}: {match[0]}" for path, match in matches if match] == []


@pytest.mark.parametrize("layer", ALLOWED)
def test_nothing_that_is_installed_imports_a_benchmark(layer: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(layer)
        for module in imported_modules(path)
        if module.split(".")[0] == "benchmarks"
    ]
    assert wrong == []


def test_only_the_package_has_init_files() -> None:
    assert [name for name in LINKED if (ROOT / name / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_resolve(name: str) -> None:
    link = ROOT / "offload" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert link.resolve() == ROOT / name


def test_a_module_is_importable_through_its_link() -> None:
    from offload.tiers.units import parse_bytes

    assert parse_bytes("1KiB") == 1024


def test_importing_offload_is_light() -> None:
    program = (
        "import sys, offload\nassert offload.__version__\n"
        "heavy = {'torch', 'numba', 'numpy', 'pydantic', 'rich', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_public_names_resolve() -> None:
    import offload
    from offload.tiers import errors

    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OffloadError)
    }
    assert tree <= set(offload.__all__)
    for name in tree | {"OffloadConfig", "__version__"}:
        assert getattr(offload, name) is not None
    assert set(offload.__all__) <= set(dir(offload))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = offload.nonsense


def test_every_listed_package_is_a_folder_with_code() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in project["tool"]["setuptools"]["packages"]:
        assert (ROOT / package.replace(".", "/")).is_dir(), package
    assert project["project"]["version"] == __import__("offload").__version__


def test_the_files_begun_first_are_there() -> None:
    from tests.conftest import LONG_FILES

    assert [name for name in LONG_FILES if not (ROOT / "tests" / name).is_file()] == []
    assert len(set(LONG_FILES)) == len(LONG_FILES)


# Lines of Python by room. A number is only ever lowered: a change that adds somewhere takes away
# as much there. Files below 60 lines, imports in a circle and the loose files are counted, too.
LINES = {
    "benchmarks": 1372,
    "kernels": 4466,
    "offload": 2348,
    "offload/bench": 1059,
    "offload/checkpoint": 4300,
    "offload/cli": 1017,
    "offload/config": 1975,
    "offload/deepspeed": 2121,
    "offload/display": 431,
    "offload/integrations": 3695,
    "offload/kv": 1210,
    "offload/losses": 865,
    "offload/memory": 1223,
    "offload/models": 745,
    "offload/moe": 701,
    "offload/optimizers": 868,
    "offload/planning": 5766,
    "offload/process": 786,
    "offload/quantized": 1538,
    "offload/runs": 791,
    "offload/train": 815,
    "offload/weights": 1576,
    "swap": 7000,
    "tiers": 1803,
    "tools/memest": 3972,
    "zero": 12500,
}
TEST_LINES = 59997
SMALL_FILES = 18
LOOSE_FILES = 10


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


def _room_of(path: Path) -> str:
    """The folder that a source file is counted in: `zero`, `offload/config`, `offload`."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] in ("offload", "tools") and parts[2:] else parts[0]


def _source_files() -> list[Path]:
    return [path for layer in [*ALLOWED, "benchmarks"] for path in sources(layer)]


def test_no_room_has_grown() -> None:
    counted = Counter[str]()
    for path in _source_files():
        counted[_room_of(path)] += _lines(path)
    assert counted.keys() <= LINES.keys(), "a new room has a number of its own"
    grown = {room: (lines, LINES[room]) for room, lines in counted.items() if lines > LINES[room]}
    assert grown == {}, "lines now, and at most"


def test_the_tests_have_not_grown() -> None:
    assert sum(map(_lines, sources("tests"))) <= TEST_LINES


def test_files_are_neither_small_nor_loose() -> None:
    small = [path for path in _source_files() if _lines(path) < 60 and path.name != "__init__.py"]
    assert len(small) <= SMALL_FILES, small
    assert len(list((ROOT / "offload").glob("*.py"))) <= LOOSE_FILES
