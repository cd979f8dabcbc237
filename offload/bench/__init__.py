"""The benches: measurements of the hardware and of offload, interleaved in one run.

    record      a bench's results: rounds in which systems are measured in turn, and their ratios
    table       a record on a terminal
    stream      the memory bus: a loop with given traffic and no arithmetic
    io_raw      the disk: a raw loop
    step        whole training steps                     contenders, systems

A checkout's `benchmarks/` measures other things over the same harness.
"""
