"""What the training systems are measured by: a module each, with `measure() -> dict[str, float]`."""
