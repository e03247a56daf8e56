"""The element-wise passes of attention, one Numba loop over rows each; the integer products happen between them.

A row is one query of one head (forward, dQ) or one key (dK, dV), its columns the keys or the queries that its block may see.
Rows of queries are ordered (query, head of the group), so r // group is the query. A row works only on the columns that it
really sees, a contiguous run, and zeroes the codes of the others. Loops of float32 work hold no branch and write one or two arrays:
LLVM's vectoriser gives up beyond eight overlap checks. A product's int32 buffer is reused in place for the float32 bits made of it.
"""

import numba
import numpy as np

from kernels.cpu.numeric import bf16_bits, bits_of, float_of, int_to_float

MAGIC = np.float32(12582912.0)  # 1.5 · 2²³: adding it rounds |x| ≤ 2²² to a whole number, nearest even, in the low bits
MAGIC_BITS = np.int32(0x4B400000)
MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITE = np.int32(0x7F800000)
"""placeholder"""
