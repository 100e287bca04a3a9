"""`sparse-rl calibrate`: measure a model on text, for the compressor triattention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SparseRLError, require_int
from .options import Dtype, ModelName


def calibrate(
    model: ModelName,
    data: Annotated[
        Path,
        typer.Option(
            help="The text to read: a JSONL file whose lines have `tokens` (as `sparse-rl rollout` writes them) or "
            "text in --field; any other file is read as one text."
        ),
    ],
    field: Annotated[str, typer.Option(help="The field of a JSONL line that holds the text.")] = "text",
    tokens: Annotated[int, typer.Option(help="The most tokens to read.")] = 32_768,
    out: Annotated[
        Path | None,
        typer.Option(help="Save the model and the file here. Default: write the file beside the model."),
    ] = None,
    dtype: Dtype = None,
) -> None:
    """Measure a model's queries for the compressor `triattention`, and write triattention.safetensors."""
    from ..learn.calibrate import calibrate as measure
    from ..models import encode, load_model
    from .companion import place_for, write

    require_int(at_least=2, tokens=tokens)
    place = place_for(model, out)
    texts = read_texts(data, field)
    lm, tokenizer = load_model(model, dtype)
    sequences = (line["tokens"] if "tokens" in line else encode(tokenizer, line["text"]) for line in texts)
    companion = measure(lm, sequences, tokens)
    write(lm, tokenizer, place, whole=out is not None)
    typer.echo(f"measured on {int(companion.about['tokens']):,} tokens; written to {place}/triattention.safetensors")


def read_texts(path: Path, field: str) -> list[dict]:
    """[{"tokens": ids} or {"text": ...}]"""
    from .rollout import read_prompts

    if path.suffix == ".jsonl":
        return read_prompts(path, field)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SparseRLError(f"{path} is not UTF-8 text ({error}); save it as UTF-8.") from error
    return [{"text": text}]
