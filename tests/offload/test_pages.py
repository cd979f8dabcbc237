"""Pages: nothing of a text is markup."""

from __future__ import annotations

from offload.pages.page import Cell, Figure, Page, Section, Table, to_html


def test_a_page_has_both_schemes_and_escapes_all_texts() -> None:
    evil = "<script>&\x1b[31m"
    cell = Cell(evil, code=[evil], state="bad", strong=True)
    section = Section(evil, tables=[Table([evil, "n"], [[cell, "1"]])], lines=[evil], code=evil)
    figure = Figure(evil, evil, evil)
    html = to_html(Page(evil, evil, [evil], evil, "good", [figure], [section]), by=evil)
    assert html.count("&lt;script&gt;&amp;\\x1b[31m") == 14
    assert "<script" not in html
    assert "\x1b" not in html
    assert "screen and (prefers-color-scheme: dark)" in html
