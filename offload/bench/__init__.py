"""The benches: measurements of the hardware and of our systems, interleaved in one run.

    record      what a bench found: rows of measurements per round, and ratios within rounds
    rounds      who is measured when
    table       a record on a terminal
    stream      the memory bus: a loop with given traffic and no arithmetic
    adam        optimizer steps on flat arrays
    io          files                                    io_raw
    copy        host and device memory
    step        whole training steps, of one rank        contenders, systems
    ranks       ... and of several

Others are measured in the same run by `benchmarks/` of a checkout, over the same harness.
"""
