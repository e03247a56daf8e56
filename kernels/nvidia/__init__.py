"""The NVIDIA backend: every operation of a step as Triton kernels, exact by the contract."""
