"""Probes that run inside a worker, on the loaded model's own modules and kernels."""
