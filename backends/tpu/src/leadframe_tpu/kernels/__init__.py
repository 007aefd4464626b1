"""Pallas kernels for TPUs, and the work lists that they walk.

Everything here runs inside a traced step. A kernel takes `interpret`: False compiles it with
Mosaic, True runs it as XLA on any device, and `pltpu.InterpretParams` simulates a TPU's memories
and semaphores to find races and uninitialised reads.
"""
