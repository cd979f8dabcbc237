"""The stores that one hook of torch's, shared by all models, looks at.

A hook for each store would be taken away by the garbage collector, amid torch's own iteration over
all hooks: an error in whatever builds a module or makes a step then.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator

from torch.utils.hooks import RemovableHandle

from offload.zero.groups.store import WeightStore


class WatchedStores:
    """`listen` adds the hook, once and for good, when there is a store to look at."""

    def __init__(self, listen: Callable[[], object]) -> None:
        self._listen = listen
        self._listens = False
        self._stores: OrderedDict[int, weakref.ref[WeightStore]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stores)

    def __iter__(self) -> Iterator[WeightStore]:
        stores = [reference() for reference in list(self._stores.values())]
        return (store for store in stores if store is not None)

    def add(self, store: WeightStore) -> RemovableHandle:
        """Watch `store` until the returned handle is removed."""
        if not self._listens:
            self._listen()
            self._listens = True
        handle = RemovableHandle(self._stores)
        self._stores[handle.id] = weakref.ref(store)
        return handle
