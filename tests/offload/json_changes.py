"""Changes of JSON at random: of a tree that is sound but for them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

HOSTILE = [
    None, True, False, 0, -1, 1, 7, 1 << 31, 1 << 62, 1 << 63, 1 << 70, -(1 << 70), 1e308, -0.0,
    0.5, float("nan"), float("inf"), "", "..", "/etc/passwd", "../x", "a\0b", "\ud800", "[/x]",
    "\x1b[2J\x1b]0;x\x07", "a\nb", "x" * 3000, "F32", "BF16", "I64", "fp32", "none", "split",
    "buffers.safetensors", "parameters/000.safetensors", "optimizer/001.safetensors",
    "manifest.json", "0" * 16, "{0}", "%s", [], {}, [[]], [{}], {"": None}, [None] * 50,
    {"__class__": "os.system"}, {"shape": [1 << 40]}, [1 << 40, 1 << 40], "auto_map", "true",
]  # fmt: skip
VALUES = st.sampled_from(HOSTILE) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
ACTIONS = st.sampled_from(["replace", "remove", "rename", "repeat", "swap", "add"])


def changes(max_changes: int = 3) -> st.SearchStrategy[Any]:
    """Some of: where (a number), what is done, and values for it."""
    change = st.tuples(
        st.integers(0, 1 << 20), ACTIONS, VALUES, st.integers(0, 1 << 20), st.text(max_size=12)
    )
    return st.lists(change, min_size=1, max_size=max_changes)


def changed(tree: Any, made: Any) -> Any:
    """`tree`, which is changed in place."""
    for where, action, given, other, name in made:
        value = copy.deepcopy(given)  # which the next change may be of
        places = list(_places(tree))
        if not places:
            return tree
        parent, key = places[where % len(places)]
        if action == "replace":
            parent[key] = value
        elif action == "remove":
            del parent[key]
        elif action == "rename" and isinstance(parent, dict):
            parent[name] = parent.pop(key)
        elif action == "repeat" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        elif action == "swap":
            to, there = places[other % len(places)]
            parent[key], to[there] = copy.deepcopy(to[there]), copy.deepcopy(parent[key])
        elif action == "add" and isinstance(parent[key], dict):
            parent[key][name] = value
        elif action == "add" and isinstance(parent[key], list):
            parent[key].append(value)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)
