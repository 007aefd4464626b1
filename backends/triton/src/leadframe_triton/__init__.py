"""The Triton kernels that the CUDA and ROCm backends of Leadframe share."""
