"""The arithmetic contract: NumPy reference, fast backends, digests."""
