"""Every code block of README.md and docs/*.md is run, or read by the program that it is for."""

import ast
import gc
import json
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

from offload import Engine, OffloadConfig
from offload.config.file import parse_document
from offload.deepspeed.migration import migrate
from tests.docs import command_lines
from tests.docs.code_blocks import PAGES, ROOT, Block, BlockError, at_line, blocks_of

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def of(page: str, language: str) -> list[Block]:
    return [b for b in BLOCKS if (b.page, b.language) == (ROOT / page, language)]


def pages_with(language: str) -> list[str]:
    return [name for name in NAMES if of(name, language)]


@pytest.mark.filterwarnings("ignore")  # of other libraries: offload logs its own
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    """The blocks of a page are one program, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    program = types.ModuleType("a_page_of_docs")
    monkeypatch.setitem(sys.modules, program.__name__, program)
    try:
        for block in of(page, "python"):
            if not block.why_not(long=long):
                execute(block.said.setup, block.said.setup_line, page, program)
                execute(block.text, block.line, page, program)
    finally:  # a page leaves engines open, and libraries keep them alive
        for engine in [each for each in gc.get_objects() if type(each) is Engine]:
            engine.close()


def execute(code: str, line: int, page: str, program: types.ModuleType) -> None:
    exec(compile(at_line(code, line), str(ROOT / page), "exec"), vars(program))


@pytest.mark.parametrize("page", pages_with("python"))
def test_names_of_offload_are_there(page: str) -> None:
    """Also in blocks that are not run."""
    for block in of(page, "python"):
        for node in ast.walk(ast.parse(at_line(block.text, block.line), str(block.page))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("offload"):
                check_import(str(node.module), [alias.name for alias in node.names])


def check_import(name: str, attributes: list[str]) -> None:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("offload"):
            raise
        return  # of a library that is not installed
    assert [each for each in attributes if not hasattr(module, each)] == []


@pytest.mark.parametrize("page", [name for name in NAMES if of(name, "yaml") or of(name, "json")])
def test_yaml_is_a_configuration_and_json_one_of_deepspeeds(page: str) -> None:
    for block in of(page, "yaml"):
        if not block.why_not(long=True):
            where = str(block.page.relative_to(ROOT))
            OffloadConfig.load(parse_document(at_line(block.text, block.line), where).value or {})
    for block in of(page, "json"):
        if not block.why_not(long=True):
            migrate(json.loads(block.text), None)


@pytest.mark.parametrize("page", pages_with("console"))
def test_commands_and_their_options_are_there(page: str) -> None:
    wrong = []
    for block in of(page, "console"):
        if not block.why_not(long=True):
            for number, words in command_lines.lines_of(block.text):
                try:
                    command_lines.check(list(words))
                except command_lines.CommandError as error:
                    wrong.append(f"{page}:{block.line + number}: {' '.join(words)}: {error}")
    assert wrong == []


NOT_RUN = [block for block in BLOCKS if block.why_not(long=False)]


@pytest.mark.parametrize("block", NOT_RUN, ids=[block.place for block in NOT_RUN])
def test_this_block_is_not_run(block: Block, long: bool) -> None:
    """Lists them with their reasons, among the skipped tests."""
    if block.why_not(long=long):
        pytest.skip(f"{block.place}: {block.why_not(long=long)}")


# ---------------------------------------------------------------- the machinery
def test_what_comments_say_belongs_to_the_next_block(tmp_path: Path) -> None:
    page = ROOT / "docs" / "a-page-that-is-not-there.md"
    text = (
        "<!-- not run: needs a GPU -->\n```python\n1\n```\n"
        "<!-- setup\nx = 1\ny = 2\n-->\n<!-- needs: torch, no_such -->\n\n```python\nx\n```\n"
        "<!-- slow -->\nwords between\n  ```yaml\n  a: 1\n  ```\n"
    )
    first, second, third = read(page, text, tmp_path)
    assert (first.why_not(long=True), first.text, first.line) == ("needs a GPU", "1\n", 3)
    assert second.said.setup.split() == ["x", "=", "1", "y", "=", "2"]
    assert at_line(second.said.setup, second.said.setup_line).split("\n").index("x = 1") == 5
    assert second.why_not(long=True) == "needs no_such"
    assert (third.text, third.why_not(long=False)) == ("a: 1\n", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```\nx\n```", "no language"),
        ("```perl\nx\n```", "perl"),
        ("```python\nx", "does not end"),
        ("<!-- not run: -->\n```text\n```", "why"),
        ("<!-- setup\n", "does not end"),
    ],
)
def test_a_block_that_cannot_be_read_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BlockError, match=said):
        read(ROOT / "docs" / "a-page.md", text, tmp_path)


def read(page: Path, text: str, folder: Path) -> list[Block]:
    """The blocks of `text`, as if it were that page."""

    class Written(type(page)):  # type: ignore[misc]
        def read_text(self, *_: object, **__: object) -> str:
            return text

    return list(blocks_of(Written(page)))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("offload trian FILE", "trian"),
        ("offload train", "FILE"),
        ("offload train a.yaml --no-such", "--no-such"),
        ("offload train a.yaml -o optimizer.lrr=1", r"optimizer\.lr"),
        ("offload checkpoint export A B --dtype fp8", "fp8"),
        ("memest folder --no-such 3", "memest"),
        ("make nonsense", "nonsense"),
        ("python examples/nothing.py", "no such file"),
        ("python -m benchmarks.nothing", "no such module"),
        ("torchrun --no-such-option train.py", "no-such-option"),
        ("pip install 'offload[nothing]'", "nothing"),
        ("rm -rf .", "rm"),
    ],
)
def test_a_command_that_is_not_there_is_found(line: str, said: str) -> None:
    ((_, words),) = command_lines.lines_of(line)
    with pytest.raises(command_lines.CommandError, match=said):
        command_lines.check(words)
