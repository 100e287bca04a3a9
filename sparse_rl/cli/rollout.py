"""`sparse-rl rollout`: sample completions of the prompts in a file."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..errors import RolloutInterrupted, SparseRLError, nearest
from ..files import first_line, is_text
from ..signals import stoppable
from .options import Dtype, InheritedBudget, InheritedInterval, ModelName, Trust, overrides

NEW_TOKENS = 256  # unless training or the user says


def rollout(
    context: typer.Context,
    model: ModelName,
    prompts: Annotated[
        Path, typer.Option(help="A JSONL file; each line holds a prompt as `prompt` (text) or `tokens` (ids).")
    ],
    out: Annotated[Path, typer.Option(help="Folder for trajectories.jsonl and traces/.")] = Path("rollouts"),
    compressor: Annotated[
        str | None,
        typer.Option(
            help="A name from `sparse-rl list compressors`; its options are --compressor.KEY VALUE. Default: as in "
            "training, else rkv."
        ),
    ] = None,
    budget: InheritedBudget = None,
    interval: InheritedInterval = None,
    rows: Annotated[int, typer.Option(help="Sequences decoded at a time.")] = 8,
    group_size: Annotated[int, typer.Option(help="Completions per prompt.")] = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="The longest response. Default: as in training, else 256.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling; 0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw only from this many likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw only from the likeliest tokens of this mass; 1 is off.")] = 1.0,
    stop_id: Annotated[
        list[int] | None,
        typer.Option(help="A token id that ends a response; may be repeated. Default: the model's own."),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="The template put around each text, from `sparse-rl list templates`. Default: as in training."
        ),
    ] = None,
    field: Annotated[str, typer.Option(help="The field of a line that holds the prompt's text.")] = "prompt",
    chat: Annotated[
        bool, typer.Option("--chat", help="Format each text as a user's turn in the model's chat template.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of sampling and of random weights.")] = 0,
    dtype: Dtype = None,
    trust: Trust = False,
) -> None:
    """Sample completions on a compressed cache; write their text, log-probs and traces."""
    from ..compressors import make
    from ..models import encode, load_model, stop_ids
    from ..records import Trajectory, TrajectoryWriter, kv_tokens_saved
    from ..rollout import Engine, Sampling
    from .inherit import Trained, always, cache_of, line_about

    if chat and template is not None:
        raise SparseRLError(f"--chat and --template {template} both set the text around a prompt; give one of them.")
    trained = Trained.of(model)
    given = {"compressor": compressor, "budget": budget, "interval": interval}
    cache, taken = cache_of(trained, given, compressor_options(context), "rkv", trust)
    if max_new_tokens is None and trained.record.max_new_tokens is not None:
        taken["max_new_tokens"] = trained.record.max_new_tokens
    own = always([trained], "chat" if chat else template)
    own = {name: value for name, value in own.items() if not (name == "stop_ids" and stop_id)}
    if line := line_about([trained.model], {**taken, **own}.items()):
        typer.echo(f"sparse-rl: {line}", err=True)
    length = max_new_tokens or taken.get("max_new_tokens", NEW_TOKENS)
    sampling = Sampling(length, temperature, top_k, top_p, tuple(stop_id or ()))
    lines = read_prompts(prompts, field)
    writer = TrajectoryWriter(out)  # refuses a folder that is in use
    lm, tokenizer = load_model(trained.model, dtype, seed=seed)
    sampling = sampling if stop_id else replace(sampling, stop_ids=stop_ids(lm, tokenizer))
    if chat and tokenizer.chat_template is None:
        raise SparseRLError("this tokenizer has no chat template; omit --chat.")
    around = None if chat else template or trained.record.template
    texts = [surrounded(line["text"], chat, around) for line in lines if "text" in line]
    encoded = iter([encode(tokenizer, text) for text in texts])
    ids = [line["tokens"] if "tokens" in line else next(encoded) for line in lines]
    engine = Engine(lm, make(cache.compressor, **cache.options), cache.budget, cache.interval, rows)
    with writer, stoppable():

        def save(trajectory: Trajectory) -> None:
            prompt = tokenizer.decode(trajectory.prompt_tokens)
            text = tokenizer.decode(trajectory.response_tokens, skip_special_tokens=True)
            writer.write(trajectory, str(prompt), str(text))

        try:
            done = engine.generate(ids, group_size, sampling, seed, progress=sys.stderr.isatty(), on_finish=save)
        except RolloutInterrupted as stop:
            typer.echo(
                f"sparse-rl: interrupted; the {len(stop.trajectories)} finished trajectories are saved in {out}.",
                err=True,
            )
            raise typer.Exit(130) from None
    tokens = sum(len(t.response_tokens) for t in done)
    named = "trajectory" if len(done) == 1 else "trajectories"
    saved = engine.kv_bytes_saved(done)
    size = f"KV bytes saved {saved:.1%}" if saved >= 0 else "no KV bytes saved on texts this short"
    typer.echo(
        f"{len(done)} {named}, {tokens:,} tokens; KV tokens saved {kv_tokens_saved(done):.1%}, {size}; written to "
        f"{out}/trajectories.jsonl"
    )


def compressor_options(context: typer.Context) -> dict:
    """The options of the compressor, whose values are written as in a recipe."""
    from ..config import parse_value

    found = {}
    for name, value in overrides(context.args, "--compressor.protect_prompt true"):
        owner, _, key = name.rpartition(".")
        if owner != "compressor":
            known = [option.opts[0].removeprefix("--") for option in context.command.params]
            command = f"sparse-rl {context.info_name} --help"
            raise SparseRLError(f"there is no option --{name}; {nearest(name, known, listed_by=command)}")
        found[key] = parse_value(value)
    return found


def surrounded(text: str, chat: bool, template: str | None) -> str | list[dict]:
    """A text as the model sees it: as a user's turn, inside a template unless it is inside one already, or as it is."""
    from ..tasks.templates import dress, template_of

    if chat:
        return [{"role": "user", "content": text}]
    return text if template is None or template_of(text) is not None else dress(text, template)


def read_prompts(path: Path, field: str) -> list[dict]:
    """The prompts of a JSONL file: {"tokens": ids} of a line that has them, else {"text": the value of `field`}."""
    if not path.is_file():
        raise SparseRLError(f"there is no file {path}; give a JSONL file with one prompt per line.")
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise SparseRLError(f"{path} is not UTF-8 text ({error}); save it as UTF-8.") from error
    lines = [parse_prompt(text, field, f"{path}, line {i}") for i, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise SparseRLError(f"{path} holds no prompts; give a JSONL file with one prompt per line.")
    return lines


def parse_prompt(text: str, field: str, where: str) -> dict:
    """One line of a file of prompts."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise SparseRLError(f"{where} is not JSON ({first_line(error)}); give one JSON object per line.") from error
    if not isinstance(line, dict):
        raise SparseRLError(f"{where} holds {type(line).__name__}, not an object; give one JSON object per line.")
    tokens = line.get("tokens")
    if isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens):
        return {"tokens": tokens}
    if isinstance(line.get(field), str):
        if not is_text(line[field]):
            raise SparseRLError(f"{where}: {field!r} holds half of a surrogate pair, which is not text; repair it.")
        return {"text": line[field]}
    raise SparseRLError(
        f"{where} has no text {field!r} and no list of token ids `tokens` (it has: {', '.join(line)[:300]}); "
        "name its field with --field."
    )
