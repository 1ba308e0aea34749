"""Certificates: which shapes of each operation give bit-identical rows, measured here."""
