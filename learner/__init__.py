"""The training side: what a training loop holds to join a run."""
