"""Is regret the right target? Attention mass of evicted entries against what giving them back does to log-probs.

    python benchmarks/regret.py --out regret.jsonl                              # tiny-sums, a CPU, minutes
    python benchmarks/regret.py --model MODEL --task countdown --budget 96 --interval 16 --new 640 --out regret.jsonl
    python benchmarks/regret.py --table regret.jsonl

For every compressor and seed, some trajectories are sampled. Of each, entries (one layer, one KV head, one token) are
given back one at a time, half of them those of largest mass, half drawn from all evicted ones; and whole tokens, in all
layers and heads. Two changes are compared with the mass: the sum over later tokens of |change of the log-prob|, and its
signed sum (nats that the sampled response gains). Beside them: how well mass of the compressed run agrees with that of
dense queries.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
COMPRESSORS = ("random", "window", "snapkv", "rkv", "vase")


def ranks(values: list[float]) -> list[float]:
    """Mean ranks where values are tied."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found, start = [0.0] * len(values), 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for i in order[start : end + 1]:
            found[i] = (start + end) / 2
        start = end + 1
    return found


def pearson(x: list[float], y: list[float]) -> float:
    """NaN where one of them does not vary."""
    if len(x) < 2 or len(set(x)) < 2 or len(set(y)) < 2:
        return math.nan
    return statistics.correlation(x, y)


def measure(args, compressor: str, seed: int) -> list[dict]:
    """A row for every trajectory."""
    import torch

    from sparse_rl import Engine, Sampling, load_model, tasks
    from sparse_rl.compressors import make
    from sparse_rl.learn.regret import counterfactuals, give_back, regret
    from sparse_rl.models import encode, stop_ids

    model, tokenizer = load_model(args.model)
    task = tasks.make(args.task).held_out()
    ids = [encode(tokenizer, prompt.text) for prompt in task.sample(1000 * seed, args.trajectories)]
    options = {"sinks": 4} if compressor == "window" else {"protect_prompt": args.protect_prompt}
    engine = Engine(model, make(compressor, **options), args.budget, args.interval, rows=8)
    sampling = Sampling(args.new, stop_ids=stop_ids(model, tokenizer))
    generator, rows = torch.Generator().manual_seed(seed), []
    for t in engine.generate(ids, sampling=sampling, seed=seed):
        found = regret(model, t.tokens, t.trace)
        dense = regret(model, t.tokens, t.trace, "dense")
        evicted = (found.gone.any(-1)).nonzero()  # [n, 3]: layer, head, token
        if not len(evicted):
            continue
        mass = found.mass[tuple(evicted.T)]
        half = args.entries // 2
        chosen = torch.cat(
            [mass.topk(min(half, len(mass))).indices, torch.randperm(len(mass), generator=generator)[:half]]
        )
        chosen = chosen.unique()
        traces, masses = [], []
        for entry in evicted[chosen]:
            one = torch.zeros_like(found.evicted_at, dtype=torch.bool)
            one[tuple(entry)] = True
            traces.append(give_back(t.trace, one))
            masses.append(float(found.mass[tuple(entry)]))
        tokens = evicted[:, 2].unique()
        tokens = tokens[torch.randperm(len(tokens), generator=generator)[: args.entries]]
        for token in tokens:
            traces.append(give_back(t.trace, torch.arange(t.trace.num_tokens) == token))
        of_tokens = [float(found.mass[..., token].sum()) for token in tokens]
        changes = counterfactuals(model, t.tokens, t.trace, traces)[:, t.num_prompt_tokens :].double()
        size, gain = changes.abs().sum(1).tolist(), changes.sum(1).tolist()
        row: dict = {"compressor": compressor, "seed": seed, "entries": len(masses), "tokens": len(of_tokens)}
        parts = {"entry": (masses, slice(0, len(masses))), "token": (of_tokens, slice(len(masses), None))}
        for kind, (x, part) in parts.items():
            for name, y in (("size", size[part]), ("gain", gain[part])):
                row[f"{kind}/{name}/pearson"] = pearson(x, y)
                row[f"{kind}/{name}/rank"] = pearson(ranks(x), ranks(y))
        other = dense.mass[tuple(evicted.T)]
        row["dense/pearson"] = pearson(mass.tolist(), other.tolist())
        row["dense/rank"] = pearson(ranks(mass.tolist()), ranks(other.tolist()))
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    """Means over trajectories; those in which something did not vary are left out."""
    columns = [name for name in rows[0] if "/" in name]
    lines = [f"| compressor | {' | '.join(columns)} | trajectories |", "|" + "---|" * (len(columns) + 2)]
    for compressor in dict.fromkeys(row["compressor"] for row in rows):
        own = [row for row in rows if row["compressor"] == compressor]
        cells = []
        for name in columns:
            known = [row[name] for row in own if not math.isnan(row[name])]
            cells.append(f"{statistics.mean(known):.2f}" if known else "")
        lines.append(f"| {compressor} | {' | '.join(cells)} | {len(own)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-sums")
    parser.add_argument("--task", default="sums")
    parser.add_argument("--budget", type=int, default=24)
    parser.add_argument("--interval", type=int, default=4)
    parser.add_argument("--new", type=int, default=72)
    parser.add_argument("--protect-prompt", action="store_true")
    parser.add_argument("--trajectories", type=int, default=8)
    parser.add_argument("--entries", type=int, default=48, help="given back, of each trajectory")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--compressors", nargs="+", default=COMPRESSORS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table is not None:
        print(table([json.loads(line) for line in args.table.open()]))
        return
    rows = []
    for compressor in args.compressors:
        for seed in range(args.seeds):
            rows += (new := measure(args, compressor, seed))
            if args.out is not None:
                with args.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in new)
    print(table(rows))


if __name__ == "__main__":
    main()
