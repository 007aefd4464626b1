"""Leadframe on NVIDIA GPUs, with Triton kernels."""
