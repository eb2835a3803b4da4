"""Support for CUDA and NCCL: default settings, choice of each rank's device, and waits for a device.

`docs/gpu.md` lists which parts have run on a GPU, and how other parts are tested.
"""
