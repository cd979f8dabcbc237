"""Where Linux AIO can be used: it needs the `libaio` package and the system's library."""

from __future__ import annotations

import pytest

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
