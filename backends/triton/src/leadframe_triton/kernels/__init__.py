"""Triton kernels: indexing and arithmetic only; launches and configurations live one level up.

No kernel here names a vendor: no inline assembly, no TMA, no warp-size arithmetic. What differs
between chips is in `leadframe_triton.arch`, as data. Importing this package imports Triton, so
`TRITON_INTERPRET` must be decided before it is.
"""
