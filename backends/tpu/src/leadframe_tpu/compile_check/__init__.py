"""Compiles whole steps for TPUs that are not here, and checks what came out.

Interpreting a kernel shows that its results are right; it shows nothing about layouts, on-chip
memory or what XLA puts around the kernel. libtpu's ahead-of-time compiler shows all of that, on
any Linux host. Without libtpu steps are lowered only, which finds far less and is reported so.
"""
