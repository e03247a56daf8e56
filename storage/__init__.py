"""Stores, records, runs: everything that is written down, and everything that is read back and verified."""
