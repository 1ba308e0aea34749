"""The first thing to run: the same prompts through plain vLLM and CoRun, to the bit.

questions is the workload; measure runs it on one engine, process gives each engine a process
of its own, show prints the comparison; ``python -m corun.quickstart MODEL`` is all of it.
"""
