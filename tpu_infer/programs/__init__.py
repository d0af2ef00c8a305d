"""Fixed-shape programs, compiled ahead of time, and the runner that launches them."""
