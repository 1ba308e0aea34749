"""Seam: environment variables that reach the arithmetic or the choice of a kernel.

Taken by exclusion where a library's variables are many and change with its versions: a variable
that does nothing costs a fingerprint that differs; one that was missed costs the contract.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from vllm import envs

SEAMS: tuple[tuple, ...] = (("vllm.envs", "compile_factors"),)

PREFIXES = (
    *("ONEDNN_", "DNNL_", "MKL_", "KMP_", "OMP_", "OPENBLAS_"),  # CPU
    *("CUBLAS_", "CUBLASLT_", "CUDNN_", "NVIDIA_TF32_", "PYTORCH_TUNABLEOP_"),
    *("TORCH_ALLOW_", "TORCH_BLAS_", "TORCH_CUDNN_", "TORCH_LINALG_"),
    *("TORCHINDUCTOR_", "TRITON_", "FLASHINFER_"),
)
PREFIXES_PARALLEL = ("NCCL_",)  # nothing is reduced between devices otherwise
# vLLM's own are those that it counts as factors of a compiled model, and these.
ALSO = ("VLLM_CPU_MOE_PREPACK", "VLLM_ZENTORCH_WEIGHT_PREPACK")
# Words of names that say where something is, or what is told about it; they differ between equal
# engines on two machines.
_NO_ARITHMETIC = frozenset(
    (
        *("PATH", "ROOT", "DIR", "BASE", "HOME", "HOST", "HOSTNAME", "IP", "IPS", "PORT", "KEY"),
        *("NAME", "RANK", "INDICES", "SOCKET", "IB", "ASYNC", "TIMEOUT", "INTERVAL", "INSECURE"),
        *("LOG", "LOGS", "LOGINFO", "LOGDEST", "LOGGING", "LOGO", "DEBUG", "VERBOSE", "DUMP"),
        *("PRINT", "PROFILE", "PROFILING", "TRACE", "SETTINGS", "WARNINGS", "DISPLAY", "USAGE"),
        *("BUILD", "IMAGE", "PLUGINS", "RAY", "LORA", "NIXL", "MOONCAKE", "GC", "MQ", "MSGPACK"),
    )
)
_ELSEWHERE = frozenset(
    (
        # How many threads there are is in the domain; where they run changes nothing.
        *("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"),
        *("OMP_PLACES", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "OMP_STACKSIZE"),
        *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_TPAUSE", "KMP_DUPLICATE_LIB_OK"),
        "VLLM_USE_V2_MODEL_RUNNER",  # the runner is in the domain
        "VLLM_DP_SIZE",  # replicas are one domain
        # vLLM sets these itself, by the model and the platform.
        *("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"),
        *("TRITON_CACHE_AUTOTUNING", "VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_MLA_DISABLE"),
        *("VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_USE_TRITON_AWQ"),
        *("VLLM_USE_DEEP_GEMM_E8M0", "NCCL_GRAPH_REGISTER", "NCCL_NO_CACHE"),
    )
)
TUNED = "VLLM_TUNED_CONFIG_FOLDER"


def reaching_arithmetic(
    environ: Mapping[str, str] | None = None, *, parallel: bool = False
) -> dict[str, str]:
    """The variables of `environ` (default: this process) that are set, by name.

    parallel: whether devices reduce tensors among each other. The folder of tuned kernel
    configurations is given as a digest of its files.
    """
    env = os.environ if environ is None else environ
    prefixes = (*PREFIXES, *(PREFIXES_PARALLEL if parallel else ()))
    of_vllm = {name for name in envs.compile_factors() if name.startswith("VLLM_")} | {*ALSO}
    found = {
        name: value
        for name, value in sorted(env.items())
        if (name in of_vllm or name.startswith(prefixes))
        and name not in _ELSEWHERE
        and not _NO_ARITHMETIC.intersection(name.split("_"))
    }
    if folder := env.get(TUNED):
        found[TUNED] = files_digest(sorted(Path(folder).glob("*.json")))
    return found


def files_digest(files: list[Path]) -> str:
    """SHA-256 (hex, 16 digits) over names and contents; an unreadable file counts as its name."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes() if file.is_file() else b""
        for part in (file.name.encode(), content):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
