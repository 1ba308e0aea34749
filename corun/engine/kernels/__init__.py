"""CoRun's own GPU kernels: each row's bits are a function of that row's request alone."""
