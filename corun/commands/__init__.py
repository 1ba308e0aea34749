"""One module per subcommand of ``corun``: ``add_arguments(parser)`` and ``run(args) -> int``.

The integer is the exit status: 0 the contract was kept, 1 it was broken, 2 the command could not
run. A command that passes engine flags on to vLLM sets ``PASS_THROUGH = True`` and finds them, in
their order, in ``args.rest``. One that sets ``QUIET = True`` keeps vLLM's own log to errors.
"""
