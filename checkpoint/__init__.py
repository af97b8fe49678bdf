"""Snapshots of the coordinator on disk."""
