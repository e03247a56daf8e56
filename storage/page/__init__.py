"""The report page of a run: one HTML file that needs nothing but itself (make.py)."""
