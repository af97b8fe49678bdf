"""What `make demo` runs: real processes, a live display, a picture, and a verdict."""
