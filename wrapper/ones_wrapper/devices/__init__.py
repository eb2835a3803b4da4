"""What CUDA and NCCL need of us: defaults, which device a rank takes, and waiting for it.

Nothing here was run on a GPU yet; `docs/gpu.md` lists what is proven and how.
"""
