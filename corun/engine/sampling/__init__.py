"""Seeded sampling whose result for a row depends on that row alone."""
