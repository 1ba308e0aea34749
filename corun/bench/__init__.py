"""Benchmarks: workloads, runs, metrics and the figures made from recorded files."""
