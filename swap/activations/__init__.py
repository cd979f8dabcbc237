"""Saved activations away from the device between forward and backward.

The limits that decide whether one travels are here, without torch: planning needs them, too.
"""

MIN_NBYTES = 128 << 10  # moving less costs more time than the memory is worth
WHOLE = 4  # a storage travels whole unless it is more than so many times what is saved of it
TRIM_NBYTES = 256 << 20  # freed memory kept by the C library: returning it costs page faults
# device memory that copies in flight may hold, or one of them that is larger, in each direction
DEVICE_NBYTES = 256 << 20
