"""The figures of the paper's evaluation, drawn from recorded files alone (needs matplotlib)."""
