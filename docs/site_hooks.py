"""What the site adds to docs/*.md (`make docs`, mkdocs.yml), and checks of what it must not have.

README.md, and files of the repository that pages link to, are pages, too. The
reference of the configuration is made of its models, that of errors of their classes. Pages are
written as GitHub reads them.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from offload.config.reference import Key, reference
from offload.tiers import errors

ROOT = Path(__file__).parents[1]
# what is put in the place of these comments
REFERENCE = "<!-- reference: docs/site_hooks.py -->"
ERRORS = "<!-- errors: docs/site_hooks.py -->"

_CODE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.S | re.M)
_COMMENT = re.compile(r"^<!--.*?-->\n?", re.S | re.M)
_LINK = re.compile(r"(!?\[[^\]\n]*\])\(([^)\s#:]+)(#[^)\s]*)?\)")
_INLINE_CODE = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", re.S)
# what GitHub begins without an empty line before it
_LIST_OR_TABLE = re.compile(r"^(?![-*] |\d+\. |[|#>\s])(.+)\n(?=(?:[-*] |\d+\. |\|))", re.M)
# anything that a browser fetches by itself
_FETCHED = re.compile(
    r"<(?:link|script|img|iframe|source|video|audio|object|embed|use)\b[^>]*?"
    r"(?:src|href|data)\s*=\s*[\"']?(?:https?:)?//(?P<html>[^\"'\s>]+)"
    r"|(?:@import\s+|url\()[\"']?(?:https?:)?//(?P<css>[^\"')\s]+)",
    re.I,
)


# ---------------------------------------------------------------- pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md, and what pages link to."""
    left = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(left)
    while left:
        source = left.pop()
        if not source.startswith("docs/"):
            files.append(File.generated(config, page_of(source), content=_content(source)))
        for target in _linked(source):
            if target not in seen and not target.startswith("docs/"):
                seen.add(target)
                left.append(target)
    return files


def page_of(source: str) -> str:
    """The page that shows a file of the repository; both as paths in their folders."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"repository/{source.removesuffix('.md')}.md"


def source_of(page: str) -> str:
    """The other way round. A page that is not there says so when its links are checked."""
    if not page.startswith("repository/"):
        return f"docs/{page}"
    name = page.removeprefix("repository/")
    return name if (ROOT / name).is_file() else name.removesuffix(".md")


def _content(source: str) -> str:
    text = (ROOT / source).read_text()
    if source.endswith(".md"):
        return text
    language = {".py": "python", ".yaml": "yaml", ".json": "json"}.get(Path(source).suffix, "text")
    return f"# {source}\n\n```{language}\n{text}```\n"


def _linked(source: str) -> Iterator[str]:
    """Files of the repository that are linked to, by their paths in it."""
    if source.endswith(".md"):
        for match in _LINK.finditer(_without_code((ROOT / source).read_text())):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
            if (ROOT / target).is_file():
                yield target


def _without_code(text: str) -> str:
    return _INLINE_CODE.sub("", _CODE.sub("", text))


# ---------------------------------------------------------------- text
def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files are links to their pages, and what GitHub understands without empty lines has
    them; comments are for GitHub and tests."""
    source = source_of(page.file.src_uri)
    text = markdown.replace(REFERENCE, "\n\n".join(_sections()))
    text = text.replace(ERRORS, "\n\n".join(_errors()))
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_prose(text[end : code.start()], source), "\n" + code[0]]
        end = code.end()
    return "".join([*parts, _prose(text[end:], source)])


def _prose(text: str, source: str) -> str:
    text = _LIST_OR_TABLE.sub(r"\1\n\n", _COMMENT.sub("", text))
    text = text.replace("][", "]\\[")  # never a reference here: `state[p]['name']` of a message
    return _LINK.sub(lambda match: _link(match, source), text)


def _link(match: re.Match[str], source: str) -> str:
    here = posixpath.dirname(source)
    target = posixpath.normpath(posixpath.join(here, match[2]))
    if not (ROOT / target).is_file():
        return match[0]  # said by MkDocs, unless it is code
    shown = posixpath.relpath(page_of(target), posixpath.dirname(page_of(source)) or ".")
    return f"{match[1]}({shown}{match[3] or ''})"


# ---------------------------------------------------------------- the configuration's reference
def _sections() -> Iterator[str]:
    """Every key, under its section at the top."""
    whole = reference()
    yield "## Keys\n\n" + "\n".join(f"- {_name(key)}: {key.meaning}" for key in whole.keys)
    for key in whole.keys:
        for inner in key.all():
            yield "\n\n".join(_entry(inner, level=2 if len(inner.path) == 1 else 3))


def _entry(key: Key, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{key.name}` {{#{key.name}}}"
    yield key.meaning
    facts = {
        "type": key.type if not key.keys or key.type.startswith("auto") else "",
        "unit": key.unit,
        "default": f"`{key.default}`" if key.default else "",
        "keys": ", ".join(map(_name, key.keys)),
    }
    yield " · ".join(f"*{name}* {text}" for name, text in facts.items() if text)
    if key.example:
        yield f"```yaml\n{key.example}\n```"


def _name(key: Key) -> str:
    return f"[`{key.name}`](#{key.name})"


# ---------------------------------------------------------------- the errors
def _errors() -> Iterator[str]:
    """Their tree, and what each says of itself. mkdocstrings finds no modules behind links."""
    tree = inspect.cleandoc(errors.__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[0]
    yield f"```text\n{textwrap.dedent(tree)}\n```"
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, errors.OffloadError):
            yield f"### `{name}` {{#offload.{name}}}\n\n{inspect.getdoc(error)}"


# ---------------------------------------------------------------- what a browser would fetch
def on_post_build(config: MkDocsConfig) -> None:
    """PluginError for a page or style that loads anything from elsewhere: it has to work alone."""
    fetched = []
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css", ".svg"):
            for match in _FETCHED.finditer(path.read_text(errors="replace")):
                fetched.append(f"{path.name}: {match['html'] or match['css']}")
    if fetched:
        raise PluginError("the site fetches from elsewhere:\n" + "\n".join(fetched[:20]))
