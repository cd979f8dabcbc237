"""The process of one part: python -m offload.bench.gpu_parts NAME OPTIONS.json ANSWER.json

Everything that is printed goes to the log that the parent keeps; the answer is the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offload.bench.gpu_process import leave_answer
from offload.tiers.errors import OffloadError

Options = Mapping[str, Any]

_COPY_NBYTES = 512 << 20
_PAGE_NBYTES = 4096


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _probe(options: Options) -> dict[str, Any]:
    from offload.bench.gpu_machine import probe

    return probe(Path(options["folder"]), options["memory_nbytes"])


def _tests(options: Options) -> dict[str, Any]:
    from offload.bench.gpu_tests import run_tests

    return run_tests(options["limit_s"], Path(options["folder"]))


def _kernels(_: Options) -> dict[str, Any]:
    from offload.bench.gpu_kernels import run_kernels

    return run_kernels(_say).to_dict()


def _copies(_: Options) -> dict[str, Any]:
    import torch

    from offload import machine
    from offload.bench.copy import CopyOptions, run_copy

    free = min(torch.cuda.mem_get_info()[0], machine.available_memory_nbytes())
    nbytes = min(_COPY_NBYTES, free // 16 // _PAGE_NBYTES * _PAGE_NBYTES)
    return run_copy(CopyOptions(nbytes), _say).to_dict()


def _deepspeed(_: Options) -> dict[str, Any]:
    from offload.bench.gpu_deepspeed import compile_adam

    return {"compiled_s": compile_adam()}


def _step(options: Options) -> dict[str, Any]:
    from offload.bench.gpu_step import run_deepspeed, run_ours

    def measured(result: dict[str, Any]) -> None:
        # A hundred gigabytes of pinned memory take their time to be given back.
        leave_answer(Path(options["answer"]), result)

    if options["system"] == "deepspeed":
        return run_deepspeed(options["config"], options["steps"], measured)
    return run_ours(options["config"], options["steps"], Path(options["folder"]), measured)


PARTS: Mapping[str, Callable[[Options], dict[str, Any]]] = {
    "probe": _probe, "tests": _tests, "kernels": _kernels, "copies": _copies, "step": _step,
    "deepspeed": _deepspeed,
}  # fmt: skip


def main() -> None:
    name, options, answer = sys.argv[1:]
    try:
        given = json.loads(Path(options).read_text())
        leave_answer(Path(answer), PARTS[name]({**given, "answer": answer}))
    except OffloadError as error:  # expected, and shown by the parent: no traceback
        sys.exit(str(error))


if __name__ == "__main__":
    main()
