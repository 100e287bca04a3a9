"""A warm-up that a stay may cut: the same command goes on with it.

    python benchmarks/warm.py linsys-warmup --out models/linsys --minutes 11

It is `sparse-rl warmup RECIPE --out FOLDER`, and with --resume where the folder has a part of it. --minutes is the time
of training; when it is over, a checkpoint is written.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from pathlib import Path

from stay import Stay

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="of the recipe")
    args = parser.parse_args()
    from sparse_rl.config import load_recipe
    from sparse_rl.train.warmup import is_finished, warmup

    if is_finished(args.out):
        print(f"{args.out} is finished", flush=True)
        return
    with contextlib.suppress(OSError):  # of a start that was cut before it had a recipe
        if not (args.out / "recipe.yaml").exists():
            (args.out / ".lock").unlink(missing_ok=True)
            args.out.rmdir()
    recipe, begun = load_recipe(args.recipe, list(map(tuple, args.set))), (args.out / "recipe.yaml").exists()
    if Stay(args.minutes).train(lambda: print(warmup(recipe, args.out, resume=begun), flush=True)):
        print(f"{args.out} is finished", flush=True)


if __name__ == "__main__":
    main()
