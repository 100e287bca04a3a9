"""`sparse-rl serve`: answer OpenAI's protocol on a compressed cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SparseRLError, require_int
from .options import Dtype, InheritedBudget, InheritedInterval, ModelName, Trust
from .rollout import compressor_options

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    context: typer.Context,
    model: ModelName,
    compressor: Annotated[
        str | None,
        typer.Option(
            help="A name from `sparse-rl list compressors`; its options are --compressor.KEY VALUE. Default: as in "
            "training, else rkv."
        ),
    ] = None,
    budget: InheritedBudget = None,
    interval: InheritedInterval = None,
    rows: Annotated[int, typer.Option(help="Answers sampled at a time.")] = 64,
    dense_rows: Annotated[
        int,
        typer.Option(help="Answers sampled at a time on a second, dense cache, served as NAME:dense; 0: no such one."),
    ] = 1,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="The longest prompt, in tokens. Default: half of --max-tokens.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The longest prompt together with its answer, in tokens.")] = 8192,
    waiting: Annotated[
        int, typer.Option(help="Answers that may wait for a free row; further ones are refused (429).")
    ] = 256,
    name: Annotated[
        str | None, typer.Option(help="The name by which clients ask for the model. Default: the last part of MODEL.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; any but loopback needs --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0: any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients must send; may be repeated. Default: $SPARSE_RL_API_KEY."),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(help="The key for loading weights, pausing and resuming. Default: $SPARSE_RL_ADMIN_KEY."),
    ] = None,
    weights_root: Annotated[
        Path | None, typer.Option(help="The folder from which clients with the admin key may load weights.")
    ] = None,
    drain: Annotated[
        float, typer.Option(help="Seconds that running answers have to end after SIGTERM or Ctrl-C.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    dtype: Dtype = None,
    trust: Trust = False,
) -> None:
    """Serve a model on its compressed cache: OpenAI's protocol, a web page, and what RL clients need."""
    from ..compressors import make
    from ..models import load_model
    from ..rollout import Engine
    from .inherit import Trained, always, cache_of, line_about

    require_int(rows=rows, waiting=waiting)
    require_int(at_least=0, dense_rows=dense_rows)
    require_int(at_least=0, at_most=65_535, port=port)
    require_int(at_least=2, max_tokens=max_tokens)
    prompt_tokens = max(1, max_tokens // 2) if prompt_tokens is None else prompt_tokens
    require_int(prompt_tokens=prompt_tokens)
    keys = tuple(api_key or filter(None, [os.environ.get("SPARSE_RL_API_KEY")]))
    admin = admin_key or os.environ.get("SPARSE_RL_ADMIN_KEY")
    for option, key in (*(("--api-key", key) for key in keys), ("--admin-key", admin)):
        if key is not None and not (key.isascii() and key.isprintable() and key == key.strip() and key):
            raise SparseRLError(f"{option} must be one or more printable ASCII characters without spaces around them.")
    if admin in keys:
        raise SparseRLError("--admin-key is also an --api-key, so any client could change the model; choose another.")
    if not 0 <= drain <= 86_400:
        raise SparseRLError(f"--drain is {drain}; it must be from 0 to 86,400 seconds.")
    if host not in _LOOPBACK and not keys:
        raise SparseRLError(f"--host {host} lets other machines in; set --api-key, or listen on 127.0.0.1.")
    if weights_root is not None and admin is None:
        raise SparseRLError("--weights-root lets clients change the model, so it needs --admin-key; set one.")
    if weights_root is not None and not weights_root.is_dir():
        raise SparseRLError(f"--weights-root {weights_root} is not a folder; create it, or name another.")
    try:
        from ..serve.run import Placed, run
    except ImportError as error:
        raise SparseRLError(
            f"serving needs {error.name}: install the extra with `pip install 'sparse-rl[serve]'`."
        ) from error
    trained = Trained.of(model)
    given = {"compressor": compressor, "budget": budget, "interval": interval}
    cache, taken = cache_of(trained, given, compressor_options(context), "rkv", trust)
    if line := line_about([trained.model], {**taken, **always([trained], None)}.items()):
        typer.echo(f"sparse-rl: {line}", err=True)
    lm, tokenizer = load_model(trained.model, dtype, seed=seed)
    called = name or Path(model.rstrip("/")).name or model
    engine = Engine(
        lm, make(cache.compressor, **cache.options), cache.budget, cache.interval, rows, max_tokens=max_tokens
    )
    engines = {called: engine}
    if dense_rows and engine.compressor.name != "dense":
        engines[f"{called}:dense"] = Engine(lm, "dense", rows=dense_rows, max_tokens=max_tokens)
    run(
        Placed(lm, tokenizer, engines, trained.record.template, waiting),
        host=host,
        port=port,
        prompt_tokens=min(prompt_tokens, max_tokens - 1),
        max_tokens=max_tokens,
        api_keys=keys,
        admin_key=admin,
        weights_root=weights_root,
        loopback=host in _LOOPBACK,
        drain=drain,
        say=typer.echo,
    )
