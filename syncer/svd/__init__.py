"""Exact SVD in worker processes."""
