"""The coordinator and the daemon around it."""
