"""What a verification ran on, for its report."""


def versions() -> dict[str, str]:
    """Of CoRun, vLLM, torch and Python."""
    import platform

    import torch

    from corun import __version__
    from corun.engine.seams import vllm_version

    return {
        "corun": __version__,
        "vllm": vllm_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def device() -> str:
    """The device's name."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import torch

        return f"CPU, {torch.backends.cpu.get_cpu_capability()}"
    return str(current_platform.get_device_name())
