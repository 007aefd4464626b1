"""Leadframe on AMD GPUs, with Triton kernels."""
