"""Merge mathematics of one round (numerics.md)."""
