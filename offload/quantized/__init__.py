"""Weights quantized to 4 or 8 bits, in the files of other libraries: the module of a format
knows the tensors of a weight, and computes the values that the library computes with, to the bit.

    reading.py              which format a folder has; what of it is read, and what refused
    parts.py                the tensors of one weight, checked before any of them is read
    matrix.py               a quantized weight, read piece by piece
    compressed_tensors.py, gptq_and_awq.py, bitsandbytes.py, float8.py
    writing.py              a weight that is to be written, quantized before a format packs it
"""
