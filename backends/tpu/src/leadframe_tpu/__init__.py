"""Leadframe on TPUs, with JAX and Pallas; needs no torch."""
