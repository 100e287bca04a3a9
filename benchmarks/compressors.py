"""Accuracy against cache entries of compressors, on a model that was trained dense: with and without the prompt kept.

    python benchmarks/compressors.py --out runs/compressors --processes 2                     # tiny-sums, a CPU
    python benchmarks/compressors.py --out runs/compressors --processes 8 --seeds 3 \\
        --model models/countdown-search --task countdown --budgets 48 64 96 128 --interval 16 --new 640
    python benchmarks/compressors.py --out runs/compressors --table --plot docs/compressors.png

Every (seed, rule, budget, prompt kept or not) is a point: accuracy on held-out prompts sampled under the rule, and the
mean number of entries that a query saw. Points are appended to points.jsonl as they are finished, and none is made
twice. `learned` and `position` (the same networks on place, age and prompt alone) are trained for their point, on
training prompts and with the point's seed; `triattention` is calibrated on dense rollouts of training prompts.
`random` with the prompt kept is the rule to beat. RULE+mass and RULE+nats: the rule with budgets by layer of the same
sum, chosen on dense rollouts of training prompts by the attention or the log-prob that evictions cost a layer. Those
of `learned` and `position` are chosen after their training, which has equal budgets.

The oracle knows later queries, so it cannot sample. Offline points compare it with the others: on dense rollouts
(the same for all) a rule chooses what to evict from the keys and queries of the dense pass, and the log-probs of the
rollout under that trace are compared with the dense ones: nats lost per response token, and mean excess regret.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

from stay import provenance

os.environ.setdefault("OMP_NUM_THREADS", "1")
RULES = ("random", "window", "snapkv", "snapkv-original", "rkv", "vase", "triattention", "position", "learned")
TRAINED = ("position", "learned")
MEASURES = ("mass", "nats")


def points_of(args) -> list[dict]:
    """Every point, cheap rules first, and those that may evict the prompt."""
    found = []
    for seed in range(args.seeds):
        found.append({"seed": seed, "rule": "dense", "budget": 0, "protect": False})
        for rule in args.rules:
            for budget in args.budgets:
                for protect in (False, True):
                    found.append({"seed": seed, "rule": rule, "budget": budget, "protect": protect})
        if not args.no_offline:
            found += [
                {"seed": seed, "rule": rule, "budget": budget, "protect": protect, "offline": True}
                for rule in ("oracle", *(rule for rule in args.rules if "+" not in rule))
                for budget in args.budgets
                for protect in (False, True)
            ]
    return sorted(found, key=lambda point: (point["rule"].startswith(TRAINED), point["protect"]))


def key(point: dict) -> tuple:
    return tuple(point.get(name, False) for name in ("seed", "rule", "budget", "protect", "offline"))


class Bench:
    """A model, its task and what the points share."""

    def __init__(self, args):
        from sparse_rl import Sampling, load_model, tasks
        from sparse_rl.models import stop_ids

        self.args = args
        self.model, self.tokenizer = load_model(args.model)
        self.task = tasks.make(args.task, **args.options)
        self.held_out = self.task.held_out()
        self.sampling = Sampling(args.new, stop_ids=stop_ids(self.model, self.tokenizer))

    def ids(self, prompts) -> list[list[int]]:
        from sparse_rl.models import encode

        return [encode(self.tokenizer, prompt.text) for prompt in prompts]

    def engine(self, compressor, budget: int):
        from sparse_rl import Engine

        return Engine(self.model, compressor, budget or 64, self.args.interval, rows=self.args.rows)

    def rule(self, point: dict):
        """The compressor of a point, after what it needs to learn."""
        from sparse_rl.compressors import make

        rule, protect, seed = point["rule"], point["protect"], point["seed"]
        if "+" in rule:
            return self.unequal(point)
        if rule == "dense":
            return make("dense")
        if rule == "window":
            longest = max(map(len, self.ids(self.held_out.sample(0, self.args.prompts))))
            return make("window", sinks=longest if protect else 4)
        if rule == "triattention":
            self.calibrate(seed)
        if rule in TRAINED:
            return self.train(point)
        if rule == "snapkv-original":  # its window of 32, or half of a small budget
            window = min(32, point["budget"] // 2)
            return make("snapkv", original=True, window=window, protect_prompt=protect)
        return make(rule, protect_prompt=protect)

    def unequal(self, point: dict):
        """The rule, with budgets by layer; they are noted in the point."""
        from sparse_rl.train.allocate import choose_budgets

        plain, _, measure = point["rule"].partition("+")
        compressor = self.rule(point | {"rule": plain})
        prompts = self.ids(self.task.sample(point["seed"] * 1000, self.args.train))
        done = self.engine("dense", 0).generate(prompts, sampling=self.sampling, seed=point["seed"])
        bound = self.engine(compressor, point["budget"]).compressor
        point["layers"] = choose_budgets(self.model, done, bound, measure).layers
        compressor.layer_budgets = tuple(point["layers"])
        return compressor

    def calibrate(self, seed: int) -> None:
        from sparse_rl.learn.calibrate import calibrate

        prompts = self.ids(self.task.sample(seed * 1000, 64))
        done = self.engine("dense", 0).generate(prompts, sampling=self.sampling, seed=seed)
        calibrate(self.model, [t.tokens.tolist() for t in done])

    def train(self, point: dict):
        from sparse_rl.compressors import make
        from sparse_rl.compressors.learned import fresh
        from sparse_rl.models import set_companion
        from sparse_rl.train.scorer import train_rounds

        args, seed = self.args, point["seed"]
        companion = fresh(self.model, "all" if point["rule"] == "learned" else "position", seed)
        set_companion(self.model, "learned", companion)
        compressor = make("learned", protect_prompt=point["protect"])
        engine = self.engine(compressor, point["budget"])
        prompts = [self.ids(self.task.sample((seed * 100 + n) * args.train, args.train)) for n in range(args.rounds)]
        for _ in train_rounds(self.model, engine, prompts, self.sampling, companion, args.steps, 32, seed):
            pass
        return compressor

    def online(self, point: dict) -> dict:
        from sparse_rl.records import mean_entries

        prompts = self.held_out.sample(0, self.args.prompts)
        engine = self.engine(self.rule(point), point["budget"])
        done = engine.generate(self.ids(prompts), sampling=self.sampling, seed=1000 + point["seed"])
        texts = self.tokenizer.batch_decode([t.response_tokens for t in done], skip_special_tokens=True)
        right = [grade.right for grade in self.held_out.grade([prompts[t.prompt_index] for t in done], texts)]
        return {"accuracy": sum(right) / len(right), "entries": statistics.mean(map(mean_entries, done))}

    def offline(self, point: dict) -> dict:
        """Nats lost per response token, and mean excess, of traces chosen on dense rollouts."""
        import torch

        from sparse_rl import token_logprobs
        from sparse_rl.compressors import make
        from sparse_rl.learn.regret import regret

        budget, oracle = point["budget"], point["rule"] == "oracle"
        compressor = make("snapkv", protect_prompt=point["protect"]) if oracle else self.rule(point)
        compressor = compressor.bind(budget, self.args.interval)
        compressor.attach(self.model)
        prompts = self.ids(self.held_out.sample(0, self.args.offline))
        done = self.engine("dense", 0).generate(prompts, sampling=self.sampling, seed=point["seed"])
        lost, excess = [], []
        for t in done:
            trace = chosen_trace(self.model, t, compressor, oracle)
            if trace is None:
                continue
            with torch.no_grad():
                change = token_logprobs(self.model, t.tokens, trace) - token_logprobs(self.model, t.tokens)
            lost.append(-float(change[t.num_prompt_tokens :].mean()))
            excess.append(float(regret(self.model, t.tokens, trace).excess.nanmean()))
        return {
            "nats": statistics.mean(lost) if lost else math.nan,
            "excess": statistics.mean(excess) if excess else math.nan,
        }


def chosen_trace(model, trajectory, compressor, oracle: bool):
    """What a rule evicts on a dense rollout, from the keys and queries of the dense pass; None: the row never fills."""
    import torch

    from sparse_rl.cache import Trace
    from sparse_rl.compressors.base import best
    from sparse_rl.learn.regret import received
    from sparse_rl.learn.score import hidden_states, replay_of
    from sparse_rl.streams import eviction_streams
    from sparse_rl.train.scorer import slots_at

    tokens, prompt = len(trajectory.tokens), trajectory.num_prompt_tokens
    capacity, budget = compressor.capacity(0, 0), compressor.budget
    first = max(prompt, capacity)
    moments = [*range(first, tokens - 1, compressor.interval)]
    if not moments:
        return None
    dense = Trace.dense(*trajectory.trace.evicted_at.shape)
    layers, heads, _ = dense.evicted_at.shape
    evicted_at = dense.evicted_at.long()
    streams = eviction_streams(torch.tensor([trajectory.prompt_index]), layers, heads)  # [L, 1, H]

    def observe(seen) -> None:
        gone = evicted_at[seen.layer]
        begins = torch.tensor([0, *moments])
        worth = received(seen, begins, heads).flip(-1).cumsum(-1).flip(-1) if oracle else None  # [H, T, S]
        for number, begin in enumerate(moments, 1):
            view = slots_at(seen, gone, [begin], compressor, prompt, streams[seen.layer])
            assert view is not None, "a full row has more slots than its window"
            if worth is None:
                kept = compressor.keep(view, budget)[0]
            else:
                score = worth[..., number].gather(1, view.feed[0])
                forced = compressor.forced(view, budget).expand(view.feed.shape)[0]
                kept = best(score.masked_fill(forced, torch.inf)[None], budget)[0]
            stays = torch.zeros_like(view.feed[0], dtype=torch.bool).scatter(1, kept, True).cpu()
            feed = view.feed[0].cpu()  # traces are on the host
            for head in range(heads):
                gone[head, feed[head][~stays[head]]] = begin

    replay = replay_of(model, [(trajectory.tokens, dense)])
    replay.observe = observe
    with torch.no_grad():
        hidden_states(model, trajectory.tokens[None].to(next(model.parameters()).device), replay)
    return Trace(evicted_at.to(torch.uint16))


def rule_named(text: str) -> str:
    rule, plus, measure = text.partition("+")
    if rule not in RULES or (plus and measure not in MEASURES):
        raise argparse.ArgumentTypeError(
            f"there is no rule {text}; rules: {', '.join(RULES)}, and RULE+mass or RULE+nats"
        )
    return text


def work(args) -> None:
    """The points of one process: every N-th that is not there yet."""
    file = args.out / "points.jsonl"
    bench = Bench(args)
    done = {key(json.loads(line)) for line in file.open()} if file.exists() else set()
    todo = [point for point in points_of(args) if key(point) not in done]
    end = time.monotonic() + 60 * args.minutes
    took: dict[tuple, float] = {}  # seconds of the longest point of a kind so far
    failed = 0
    for point in todo[args.part :: args.processes]:
        kind, start = (point["rule"] in TRAINED, point.get("offline", False)), time.monotonic()
        if start + took.get(kind, 0.0) > end:
            print("time is over; give the same command again.", flush=True)
            break
        try:
            found = bench.offline(point) if point.get("offline") else bench.online(point)
            row = point | found
        except Exception as error:
            if type(error).__name__ != "SparseRLError":  # the other points go on, and this one is tried again
                traceback.print_exc()
                failed += 1
                continue
            row = point | {"refused": str(error)}  # a budget that the prompt leaves nothing of
        took[kind] = max(took.get(kind, 0.0), time.monotonic() - start)
        row |= {"seconds": round(time.monotonic() - start, 1), **provenance()}
        with file.open("a") as lines:  # one write of a line: processes append to the same file
            lines.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    if failed:
        sys.exit(f"compressors: {failed} points failed; give the same command again for them.")


def table(rows: list[dict]) -> str:
    """A row a rule, a column a budget: the mean over seeds (the least to the most)."""
    lines = []
    for name, value in (("online", "accuracy"), ("offline", "nats")):
        own = [row for row in rows if row.get("offline", False) == (name == "offline") and value in row]
        budgets = sorted({row["budget"] for row in own if row["budget"]})
        if not budgets:
            continue
        lines += [f"| {value} | prompt kept | {' | '.join(map(str, budgets))} |", "|---" * (2 + len(budgets)) + "|"]
        if dense := [row[value] for row in own if row["rule"] == "dense"]:
            lines.append(f"| dense | | {' | '.join([spread(dense)] + [''] * (len(budgets) - 1))} |")
        for rule, protect in dict.fromkeys((row["rule"], row["protect"]) for row in own if row["budget"]):
            group = [row for row in own if (row["rule"], row["protect"]) == (rule, protect)]
            cells = [spread([row[value] for row in group if row["budget"] == budget]) for budget in budgets]
            lines.append(f"| {rule} | {'yes' if protect else 'no'} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """The mean, and the seeds' least and most; empty where no seed has the point."""
    return f"{statistics.mean(values):.3f} ({min(values):.2f} to {max(values):.2f})" if values else ""


def plot(rows: list[dict], path: Path) -> None:
    """Accuracy against the entries that a query saw, with and without the prompt kept."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    own = [row for row in rows if "accuracy" in row]
    dense = statistics.mean(row["accuracy"] for row in own if row["rule"] == "dense")
    rules = [rule for rule in dict.fromkeys(row["rule"] for row in own) if rule != "dense"]
    for axis, protect in zip(axes, (False, True)):
        axis.axhline(dense, color="black", linewidth=1, linestyle=":", label="dense cache")
        for rule in rules:
            group = [row for row in own if (row["rule"], row["protect"]) == (rule, protect)]
            points = {budget: [r for r in group if r["budget"] == budget] for budget in {r["budget"] for r in group}}
            curve = [
                [statistics.mean(r[k] for r in points[b]) for k in ("entries", "accuracy")] for b in sorted(points)
            ]
            bold = rule.startswith(TRAINED)
            axis.plot(*zip(*curve), marker="o", markersize=3, linewidth=2.5 if bold else 1.2, label=rule)
        axis.set_title("prompt kept" if protect else "prompt evicted like the rest")
        axis.set_xlabel("entries that a query saw, mean")
    axes[0].set_ylabel("held-out accuracy")
    axes[1].legend(fontsize=8, frameon=False, bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="tiny-sums")
    parser.add_argument("--task", default="sums")
    parser.add_argument("--options", type=json.loads, default={}, help="of the task, JSON")
    parser.add_argument("--budgets", type=int, nargs="+", default=[26, 30, 34, 38, 42])
    parser.add_argument("--interval", type=int, default=4)
    parser.add_argument("--new", type=int, default=72, help="tokens of a response, at most")
    parser.add_argument("--rules", nargs="+", default=list(RULES), type=rule_named, metavar="RULE")
    parser.add_argument("--prompts", type=int, default=256, help="held out")
    parser.add_argument("--offline", type=int, default=32, help="dense rollouts of an offline point")
    parser.add_argument("--no-offline", action="store_true")
    parser.add_argument("--rounds", type=int, default=4, help="of training")
    parser.add_argument("--train", type=int, default=32, help="rollouts of a round")
    parser.add_argument("--steps", type=int, default=150, help="of a round")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no point after this")
    parser.add_argument("--part", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.table or args.plot:
        rows = [json.loads(line) for line in (args.out / "points.jsonl").open()]
        print(table(rows))
        if args.plot:
            plot(rows, args.plot)
    elif args.part is not None or args.processes == 1:
        args.part = args.part or 0
        work(args)
    else:
        command = [sys.executable, __file__, *sys.argv[1:]]
        parts = [subprocess.Popen([*command, "--part", str(part)]) for part in range(args.processes)]
        if any([part.wait() for part in parts]):
            sys.exit("compressors: a process failed; give the same command again for the points that are missing.")


if __name__ == "__main__":
    main()
