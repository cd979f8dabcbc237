"""Links between the pages lead somewhere, on GitHub and on the site."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.code_blocks import ROOT

PAGES = [*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", *(ROOT / "docs").glob("*.md")]
_CODE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$|(?<!`)(`+)(?!`).*?(?<!`)\3(?!`)", re.S | re.M)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.M)
_FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.S | re.M)


def links(page: Path) -> Iterator[str]:
    return (match[1] for match in _LINK.finditer(_CODE.sub("", page.read_text())))


@cache
def anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them: what is no letter, digit, - or _ goes, spaces are hyphens."""
    slugs = [_slug(match[1]) for match in _HEADING.finditer(_FENCE.sub("", page.read_text()))]
    again = [f"{slug}-{slugs[:i].count(slug)}" for i, slug in enumerate(slugs) if slug in slugs[:i]]
    return frozenset([*slugs, *again])


def _slug(heading: str) -> str:
    text = re.sub(r"\]\([^)]*\)|[`*\[\]]", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def made_on_the_site(page: Path, anchor: str) -> bool:
    """Whether an anchor is a key's or an error's, which are on the site's page alone."""
    from offload.config.reference import reference

    if page.name == "configuration.md":
        return anchor in {key.name for key in reference().all()}
    return page.name == "api.md" and anchor.startswith("offload.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not (target.exists() and (not anchor or has(target, anchor))):
            lost.append(link)
    assert lost == []


def has(page: Path, anchor: str) -> bool:
    return anchor in anchors(page) or made_on_the_site(page, anchor)
