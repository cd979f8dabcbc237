"""Where Linux AIO can be used: it needs the `libaio` package and the system's library. Swap files
through the page cache."""

from __future__ import annotations

import errno
import os

import pytest

from offload.swap.io import swap_file
from offload.swap.io.libaio_backend import import_libaio
from offload.tiers.errors import UnsupportedError


def _why_not() -> str:
    try:
        import_libaio()
    except UnsupportedError as error:
        return str(error)
    return ""


WHY_NO_LIBAIO = _why_not()
needs_libaio = pytest.mark.skipif(bool(WHY_NO_LIBAIO), reason=WHY_NO_LIBAIO)
IO_BACKENDS = ["threads", pytest.param("libaio", marks=needs_libaio)]


def refuse_o_direct(patch: pytest.MonkeyPatch) -> None:
    """Swap files that are made from now on go through the page cache."""

    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    patch.setattr(swap_file, "_probe_direct", refuse)
