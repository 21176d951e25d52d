"""The operations of hoploom.ops as Triton kernels, for tensors on any device.

Kernels need no CUDA toolkit. Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), a program at a time.
Importing a module of this package imports Triton, so they are imported only when a tensor on a device needs them.
"""
