"""The benches: measurements of the hardware and of offload, interleaved in one run.

    record      a bench's results: rows of measurements per round, and ratios within rounds
    rounds      the order in which systems are measured
    table       a record on a terminal
    stream      the memory bus: a loop with given traffic and no arithmetic
    adam        optimizer steps on flat arrays
    io          files                                    io_raw
    copy        host and device memory
    step        whole training steps, of one rank        contenders, systems
    ranks       ... and of several

A checkout's `benchmarks/` measures other systems in the same run, over the same harness.
"""
