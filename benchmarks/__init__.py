"""Recorded benchmarks and the scripts that make them."""
