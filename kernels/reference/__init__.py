"""The definition of every operation, in plain NumPy."""
