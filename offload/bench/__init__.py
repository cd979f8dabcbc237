"""The benches: what the hardware can do, what we do, what others do, interleaved in one run.

    record      what a bench found: rows of measurements per round, and ratios within rounds
    rounds      who is measured when
    table       a record on a terminal
    stream      the memory bus: a loop with given traffic and no arithmetic
    adam        optimizer steps on flat arrays           adam_ours, adam_peers
    io          files                                    io_raw, io_store, io_fio
    copy        host and device memory
    step        whole training steps                     step_child, step_systems, step_deepspeed
    gpu_check   everything on a GPU, one record          gpu_*

Peers are reached through their public interfaces only, are imported only by the modules named for
them, and are optional: a row says what to install.
"""
