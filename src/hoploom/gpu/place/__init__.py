"""A store copied to where kernels read it: device memory, host memory, the memory of several GPUs."""
