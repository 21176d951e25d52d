"""The operations of hoploom.ops in Triton, for tensors on any device.

Kernels need no CUDA toolkit. Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), a program at a time.
Importing a module of this package imports Triton, so only what is placed on a device does.
"""
