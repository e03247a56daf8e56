"""The CPU backend: element-wise kernels compiled by Numba, exact int8 products through oneDNN or BLAS."""
