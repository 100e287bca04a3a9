"""Run the evaluations that the command line asks for: models x caches on the same problems, each in its folder."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import tasks
from ..chat import Turns
from ..errors import SparseRLError, check_count, require_int
from ..files import write_text
from ..models import Record, encode, load_model, record_of, stop_ids
from ..rollout import Engine, Sampling
from ..tasks.answering import Answers, Names, cannot_answer
from ..tasks.benchmarks import Benchmark
from ..tasks.math import Math
from ..tasks.mixture import Mixture
from ..tasks.templates import find
from .ask import Exam, ask, fingerprint, items_of
from .cache import Cache
from .results import Item, Results
from .summary import Summary

ENDLESS = 256  # problems of an endless task that are asked
DEFAULTS = {  # for tasks without a protocol
    "samples": 1, "max_new_tokens": 256, "temperature": 1.0, "top_p": 1.0, "max_turns": 8, "max_given_tokens": 512,
}  # fmt: skip
PUBLISHED = {"temperature": 0.8, "top_p": 0.95}  # for the seven benchmarks; each has its own samples and new tokens


@dataclass(frozen=True)
class Asked:
    """What every model is asked on every cache. None: as published, otherwise the default."""

    benches: Sequence[str]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # benchmark -> options of its task
    data: str | None = None  # the folder with the files of the benchmarks
    template: str | None = None
    samples: int | None = None
    limit: int | None = None  # problems of each benchmark
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0
    rows: int = 64
    dtype: str | None = None
    trained: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # benchmark -> sampling as in training
    max_turns: int | None = None  # of tasks that reply
    max_given_tokens: int | None = None

    def __post_init__(self):
        given = {"samples": self.samples, "limit": self.limit, "max_new_tokens": self.max_new_tokens}
        given |= {"max_turns": self.max_turns, "max_given_tokens": self.max_given_tokens}
        require_int(**{name: value for name, value in given.items() if value is not None})
        check_count("samples of every problem", self.samples or 1, 100_000)
        if self.template is not None:
            find(self.template)
            if not any(issubclass(tasks.TASKS.get(bench, tasks.Task), Math) for bench in self.benches):
                raise SparseRLError(
                    f"--template {self.template} is for questions, but {', '.join(self.benches)} writes its own "
                    "prompts; omit it."
                )
        if not self.benches or len(set(self.benches)) < len(self.benches):
            raise SparseRLError(
                f"--bench is {','.join(self.benches)}; name each benchmark or task once, separated by commas."
            )


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of a model on a cache."""

    model: str
    cache: Cache
    rule: str  # which slots the cache keeps
    folder: Path
    summaries: list[Summary]
    items: list[Item]
    tokens_per_second: float  # of the engine runs
    cache_bytes: int  # allocated

    @property
    def accuracy(self) -> float:
        """The mean over benchmarks."""
        return statistics.fmean(summary.accuracy for summary in self.summaries)

    @property
    def reward(self) -> float:
        """The mean reward over benchmarks."""
        return statistics.fmean(summary.reward for summary in self.summaries)

    def to_dict(self) -> dict[str, Any]:
        speed = {"tokens_per_second": self.tokens_per_second, "cache_bytes": self.cache_bytes}
        about = {
            "model": self.model,
            "cache": self.cache.label,
            "rule": self.rule,
            "accuracy": self.accuracy,
            "reward": self.reward,
        }
        return {**about, **speed, "benches": [asdict(summary) for summary in self.summaries]}


def evaluate(
    name: str,
    caches: Sequence[Cache],
    asked: Asked,
    folder: Callable[[Cache], Path],
    say: Callable[[str], None],
    progress: bool = False,
) -> Iterator[Evaluated]:
    """Evaluate a model on one cache after the other. Completions that are in their folders are not sampled again."""
    with ExitStack() as stack:
        found = problems_of(asked)  # finds mistakes before the model is loaded
        limits = [name for name in ("max_turns", "max_given_tokens") if getattr(asked, name) is not None]
        if limits and not any(task.converses for _, task, _ in found.values()):
            raise SparseRLError(
                f"--{limits[0].replace('_', '-')} is for tasks that reply, but {', '.join(asked.benches)} does not "
                "reply; omit it."
            )
        for cache in caches:
            cache.make().bind(*cache.slots)  # refuses wrong budgets before the model is loaded
        model, tokenizer = load_model(name, asked.dtype, seed=asked.seed)
        trained = (record_of(model) or Record()).template
        exams = []
        for label, (bench, task, options) in found.items():
            if isinstance(task, Benchmark) and "template" not in options:
                template = trained or ("chat" if tokenizer.chat_template is not None else "plain")
                options = {"template": template, **options}
                task = tasks.make(task.full_name, **options).held_out()
            if trained is not None and task.template not in (None, trained):
                say(
                    f"{label}: prompts use the template {task.template}, but {name} was trained with {trained}; "
                    "accuracy may suffer."
                )
            stack.callback(task.close)
            way = asked.trained.get(bench, {})
            exams.append(make_exam(label, task, options, asked, way, model, tokenizer, say))
        about = {"model": name, "weights": fingerprint(model), "dtype": str(model.dtype).removeprefix("torch.")}
        settings = {"seed": asked.seed, "benches": {exam.name: exam.settings() for exam in exams}}
        told: set[tuple[str, str]] = set()  # (benchmark, what its completions lack) that was said already
        for cache in caches:
            engine = Engine(model, cache.make(), *cache.slots, asked.rows)
            results = stack.enter_context(Results(folder(cache), {**about, "cache": cache.to_dict(), **settings}))
            summaries = ask(engine, tokenizer, exams, asked.seed, results, progress)
            done = _evaluated(name, cache, engine, exams, results, summaries)
            write_text(results.folder / "summary.json", json.dumps(done.to_dict(), indent=1) + "\n")
            for exam, summary in zip(exams, summaries, strict=True):
                template = "--template, `sparse-rl list templates`" if exam.task.template is not None else None
                names = Names("--max-new-tokens", template, max_turns="--max-turns")
                lacking = cannot_answer(answers(exam, summary), names)
                if lacking is not None and (exam.name, lacking[0]) not in told:
                    told.add((exam.name, lacking[0]))
                    say(f"{exam.name}, {cache.label}: {lacking[1]}")
                if exam.task.last_error:
                    why = exam.task.last_error[:300]
                    say(f"grading failed in {exam.name} ({why}); such completions count as wrong, under ungraded.")
            yield done


def _evaluated(
    name: str, cache: Cache, engine: Engine, exams: Sequence[Exam], results: Results, summaries: list[Summary]
) -> Evaluated:
    calls = results.calls()
    return Evaluated(
        model=name,
        cache=cache,
        rule=engine.compressor.rule(),
        folder=results.folder,
        summaries=summaries,
        items=[item for exam in exams for item in items_of(exam, results)],
        tokens_per_second=sum(c["tokens"] for c in calls) / max(sum(c["seconds"] for c in calls), 1e-9),
        cache_bytes=max((c["cache_bytes"] for c in calls), default=0),
    )


def answers(exam: Exam, summary: Summary) -> Answers:
    """The completions of a benchmark summed up for hints about what is wrong (tasks/answering.py)."""
    count = summary.problems * summary.samples
    ungraded = {"timeout": summary.timeouts, "error": summary.errors, "bad gold": summary.bad_golds}
    longest, turns = exam.sampling.max_new_tokens, 0.0 if exam.turns is None else summary.turns
    cut, lost = summary.truncated, summary.no_answer
    return Answers(count, summary.accuracy, cut, lost, longest, ungraded=ungraded, turns=turns)


def problems_of(asked: Asked) -> dict[str, tuple[str, tasks.Task, dict[str, Any]]]:
    """(benchmark, held-out problems, options of their task) by the name of a table: one for each benchmark, and one for
    each task of a mixture.
    """
    found: dict[str, tuple[str, tasks.Task, dict[str, Any]]] = {}
    for bench in asked.benches:
        task, options = task_of(bench, asked)
        if isinstance(task, Mixture):
            parts = list(zip(task.labels, task.tasks, task.options, strict=True))
        else:
            parts = [(bench, task, options)]
        for label, part, own in parts:
            if label in found:
                raise SparseRLError(
                    f"--bench {','.join(asked.benches)} has two tasks called {label}; give those of the mixture other "
                    "labels, or evaluate them separately."
                )
            found[label] = bench, part, own
    return found


def task_of(bench: str, asked: Asked) -> tuple[tasks.Task, dict[str, Any]]:
    """(the problems that training does not see, the options of their task)"""
    options = dict(asked.options.get(bench, {}))
    kind = tasks.TASKS.get(bench, tasks.Task)
    if asked.data is not None and issubclass(kind, Benchmark):
        options = {"folder": asked.data, **options}
    if asked.template is not None and issubclass(kind, Math):
        options = {"template": asked.template, **options}
    return tasks.make(bench, **options).held_out(), options


def make_exam(
    bench: str,
    task: tasks.Task,
    options: dict,
    asked: Asked,
    trained: Mapping[str, Any],
    model,
    tokenizer,
    say: Callable[[str], None],
) -> Exam:
    """A benchmark with its prompts and sampling settings: as asked, as published, as in training, or the default."""
    protocol = DEFAULTS | dict(trained)
    if isinstance(task, Benchmark):
        protocol |= PUBLISHED | {"samples": task.source.samples, "max_new_tokens": task.source.new_tokens}
    protocol |= {key: value for key in protocol if (value := getattr(asked, key)) is not None}
    count = task.num_prompts
    limit = min(asked.limit or count or ENDLESS, count or asked.limit or ENDLESS)
    prompts = task.sample(0, limit)
    if asked.max_new_tokens is None:
        every = task.sample(0, count) if count else prompts  # all, so that the length does not depend on the limit
        protocol["max_new_tokens"] = fitting(bench, protocol["max_new_tokens"], every, model, tokenizer, say)
    for line in tasks.notices(task):
        say(f"{bench}: {line}")
    if isinstance(task, Benchmark) and len(prompts) < task.source.rows:
        say(f"{bench}: {len(prompts):,} of its {task.source.rows:,} problems are asked.")
    return Exam(
        name=bench,
        task=task,
        prompts=prompts,
        samples=protocol["samples"],
        sampling=Sampling(
            protocol["max_new_tokens"],
            protocol["temperature"],
            top_p=protocol["top_p"],
            stop_ids=stop_ids(model, tokenizer),
        ),
        options={
            key: str(value) if isinstance(value, Path) else value for key, value in options.items() if key != "folder"
        },
        turns=Turns(protocol["max_turns"], protocol["max_given_tokens"]) if task.converses else None,
    )


def fitting(
    bench: str, new_tokens: int, prompts: Sequence[tasks.Prompt], model, tokenizer, say: Callable[[str], None]
) -> int:
    """`new_tokens`, or fewer if the model lacks the positions for them after the longest prompt."""
    longest = max(len(encode(tokenizer, prompt.text)) for prompt in prompts)
    context = model.config.max_position_embeddings
    if longest >= context:
        raise SparseRLError(
            f"a prompt of {bench} has {longest:,} tokens, but this model has {context:,} positions; use another model."
        )
    if new_tokens > context - longest:
        say(f"{bench}: {context - longest:,} new tokens, not {new_tokens:,}; this model has no positions for more.")
    return min(new_tokens, context - longest)
