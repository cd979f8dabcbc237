"""The benches: measurements of the hardware and of offload, interleaved in one run.

    record      a bench's results: rows of measurements per round, and ratios within rounds
    rounds      the order in which systems are measured
    table       a record on a terminal
    stream      the memory bus: a loop with given traffic and no arithmetic
    io          files                                    io_raw
    step        whole training steps                     contenders, systems

A checkout's `benchmarks/` measures other things over the same harness.
"""
