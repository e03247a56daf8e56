import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports kernels.nvidia
