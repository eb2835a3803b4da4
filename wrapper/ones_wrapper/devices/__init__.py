"""Support for CUDA and NCCL: defaults, choice of each rank's device, and waits for a device.

None of this has run on a GPU yet; `docs/gpu.md` lists what is proven and how.
"""
