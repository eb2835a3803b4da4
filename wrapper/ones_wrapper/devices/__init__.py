"""Support for CUDA and NCCL: defaults, which device a rank takes, and waiting for it.

Nothing here was run on a GPU yet; `docs/gpu.md` lists what is proven and how.
"""
