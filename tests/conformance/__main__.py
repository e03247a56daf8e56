"""`make conformance`: the same bits under every instruction set, thread count and rounding mode of this machine.

Each row runs all vectors and a short trajectory in a process of its own. Exit code 1 on any difference, or when fewer
than two rows ran.
"""

import sys

from tests.conformance.table import Row, show

ROWS = (
    Row("reference", backend="reference"),
    Row("everything this machine has", isa="DEFAULT"),
    Row("one thread", threads=1),
    Row("subnormals flushed", flush=True),
    Row("AMX", needs="amx_int8", isa="AVX512_CORE_AMX", cpu="sapphirerapids"),
    Row("AVX-512 with VNNI, no AMX", needs="avx512_vnni", isa="AVX512_CORE_VNNI", cpu="cascadelake"),
    Row("AVX-512 without VNNI", needs="avx512bw", isa="AVX512_CORE", cpu="skylake-avx512"),
    Row("AVX2", needs="avx2", isa="AVX2", mkl="AVX2", aten="avx2", cpu="haswell"),
    Row("SSE4.1", needs="sse4_1", isa="SSE41", mkl="SSE4_2", aten="default", cpu="nehalem"),
    Row("torch operations alone", backend="generic:cpu"),
    Row("torch operations, one thread", backend="generic:cpu", threads=1),
    Row("torch on CUDA", backend="generic:cuda"),
    Row("Triton on an NVIDIA GPU", backend="nvidia"),
    Row("torch on an Apple GPU", backend="generic:mps"),
    Row("arm64, emulated", emulated=True),
)

if __name__ == "__main__":
    import flows  # noqa: F401  (importing it applies the environment)

    sys.exit(show(ROWS))
