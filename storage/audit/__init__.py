"""Replaying what was published: draws, verdicts, certificates, keys."""
