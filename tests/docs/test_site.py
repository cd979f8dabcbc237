"""The site's own part (docs/site_hooks.py); `make docs` builds all of it."""

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.docs.code_blocks import ROOT

pytest.importorskip("mkdocs", reason="of `make docs`")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(hooks: ModuleType, text: str, page: str = "index.md") -> str:
    return str(hooks.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=page))))


@pytest.mark.parametrize(
    ("text", "page", "expected"),
    [
        ("so:\n- a\n- b\n", "index.md", "so:\n\n- a\n- b\n"),
        ("**so:**\n1. a\n2. b\n", "index.md", "**so:**\n\n1. a\n2. b\n"),
        ("- a\n  more\n- b\n", "index.md", "- a\n  more\n- b\n"),
        ("so:\n| a |\n|---|\n", "index.md", "so:\n\n| a |\n|---|\n"),
        ("a <!-- b --> c\n<!-- setup\nx = 1\n-->\nd", "index.md", "a <!-- b --> c\nd"),
        ("[a](docs/ranks.md#speed)", "repository/README.md", "[a](../ranks.md#speed)"),
        ("[a](ARCHITECTURE.md)", "repository/README.md", "[a](ARCHITECTURE.md)"),
        ("[a](../README.md)", "ranks.md", "[a](repository/README.md)"),
        ("[a](../examples/own_loop.py)", "ranks.md", "[a](repository/examples/own_loop.py.md)"),
        ("[a](../docs/ranks.md)", "repository/benchmarks/README.md", "[a](../../ranks.md)"),
        ("[a](nothing.md)", "index.md", "[a](nothing.md)"),
        ("state[p]['exp_avg']", "loops.md", "state[p]\\['exp_avg']"),
    ],
)
def test_pages_are_read_as_github_reads_them(
    hooks: ModuleType, text: str, page: str, expected: str
) -> None:
    assert shown(hooks, text, page) == expected


def test_code_stays_as_it_is(hooks: ModuleType) -> None:
    code = "```python\nso:\n- a\n<!-- b -->\nx[0][1] = [a](README.md)\n```\n"
    assert code in shown(hooks, f"text\n{code}text")


def test_every_key_and_error_is_on_its_page(hooks: ModuleType) -> None:
    from offload import errors
    from offload.config.reference import reference

    page = shown(hooks, (ROOT / "docs/configuration.md").read_text(), "configuration.md")
    for key in reference().all():
        if key.name:
            assert f"{{#{key.name}}}" in page
            assert key.meaning in page
    page = shown(hooks, (ROOT / "docs/api.md").read_text(), "api.md")
    assert [name for name in errors.__all__ if f"{{#offload.{name}}}" not in page] == []
    assert "└── IntegrityError" in page


@pytest.mark.parametrize(
    ("name", "text", "fetches"),
    [
        ("a.html", '<script src="https://elsewhere.org/x.js"></script>', True),
        ("a.html", "<link rel=stylesheet href=//elsewhere.org/x.css>", True),
        ("a.html", '<img alt="x" src="http://elsewhere.org/x.png">', True),
        ("a.css", '@import "https://elsewhere.org/font.css";', True),
        ("a.css", "a { background: url(https://elsewhere.org/x.png) }", True),
        ("a.html", '<a href="https://elsewhere.org">read</a>', False),
        ("a.html", '<svg xmlns="http://www.w3.org/2000/svg"></svg><img src="x.png">', False),
    ],
)
def test_a_page_that_fetches_from_elsewhere_is_an_error(
    hooks: ModuleType, name: str, text: str, fetches: bool, tmp_path: Any
) -> None:
    (tmp_path / name).write_text(text)
    config = SimpleNamespace(site_dir=str(tmp_path))
    if not fetches:
        hooks.on_post_build(config)
        return
    with pytest.raises(hooks.PluginError, match=r"elsewhere\.org"):
        hooks.on_post_build(config)
