"""Verification: does this engine keep the contract, and if not, which module breaks it first?

record and compare are pure; workload writes the scenarios; drive plays one on an engine; engine
opens and closes engines; run is ``corun verify`` as a function; localize is ``corun localize``.
"""
