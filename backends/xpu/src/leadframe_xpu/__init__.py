"""Leadframe on Intel GPUs, through whichever attention kernels are installed.

`installed` and `ranking` read package metadata and decide which kernels serve; `detection` looks
for devices; none of them imports an array library. `guard` and `paged_plan` prepare a batch for
native kernels and refuse what would crash them; `ipex_kernels`, `vllm_kernels` and
`triton_kernels` make the calls; `backend` is the `TorchBackend` around them.
"""
