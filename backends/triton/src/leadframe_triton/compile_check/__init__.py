"""Compiles the kernels for chips that are not here, and judges what comes out.

Three things that only a compiler can tell, and that a laptop can ask: does a kernel spill its
registers, does it fit the chip's shared memory, does it use the matrix unit; and, on a second
launch with other lengths, is it compiled again. See `cases` for what is compiled, `gate` for the
rules, `driver` for how.
"""
