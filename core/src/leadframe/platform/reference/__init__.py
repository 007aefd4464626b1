"""The NumPy backend: slow, simple, and the meaning of every op. Selected as `reference`."""
