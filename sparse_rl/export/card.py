"""Write the model card of an exported checkpoint: what it was trained for, how good it is, and how to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..files import code_in, names_code, names_python_file
from ..models import Record


@dataclass(frozen=True)
class Card:
    name: str
    record: Record
    recipe: str | None  # YAML, if the run is known
    evaluation: Mapping[str, Any] | None  # the evaluation in metrics.jsonl at this step, if there is one
    base: str | None = None  # the base of adapters that were not merged

    def text(self) -> str:
        parts = [self._head(), self._about(), self._cache(), self._numbers(), self._use(), self._recipe()]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _head(self) -> str:
        start = self.base or self.record.start
        hub = start if start and start.count("/") == 1 and start[0] not in "./~" else None
        lines = ["library_name: " + ("peft" if self.base else "transformers"), "pipeline_tag: text-generation"]
        lines += ["tags: [sparse-rl, reinforcement-learning, kv-cache-compression]"]
        lines += [f"base_model: {hub}"] if hub and not hub.startswith(("models/", "runs/")) else []
        return "\n".join(["---", *lines, "---"])

    def _about(self) -> str:
        record, kind = self.record, "Adapters" if self.base else "A model"
        start = f" from {record.start}" if record.start else ""
        how = f" with the method `{record.method}`" if record.method else ""
        task = f", on the task `{record.task}`{_options(record.task_options)}" if record.task else ""
        steps = f", {record.step} steps" if record.step is not None else ""
        view = f" The learner saw trajectories in the `{record.view}` view." if record.view else ""
        return f"# {self.name}\n\n{kind} trained by Sparse-RL{start}{how}{task}{steps}.{view}"

    def _cache(self) -> str:
        record = self.record
        if record.compressor is None:
            return ""
        rows = {"compressor": record.compressor, "options": _options(record.options).strip(" ()") or "none"}
        rows |= {"budget": record.budget, "interval": record.interval, "template": record.template}
        rows |= {"stop ids": ", ".join(map(str, record.stop_ids)), "longest response": record.max_new_tokens}
        rows |= {"logits": record.logits}
        table = [f"| {key} | {value} |" for key, value in rows.items() if value not in (None, "")]
        return "\n".join(["## The cache that it was trained on", "", "| setting | value |", "|---|---|", *table])

    def _numbers(self) -> str:
        if self.evaluation is None:
            return ""
        names = {"dense": "dense", "sparse": f"{self.record.compressor}, budget {self.record.budget}"}
        rows = [
            f"| {label} | {self.evaluation[key]:.1%} | {self.evaluation[f'eval/{cache}/length']:.0f} |"
            for cache, label in names.items()
            if self.evaluation.get(key := f"eval/{cache}/accuracy") is not None
        ]
        title = f"## Held-out accuracy at step {self.evaluation['step']}"
        note = "Measured by the run itself on its own held-out prompts; few of them, so take it as a hint."
        return "\n".join([title, "", "| cache | accuracy | mean length |", "|---|---|---|", *rows, "", note])

    def _use(self) -> str:
        record = self.record
        dense = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{self.name}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{self.name}")'
        )
        parts = ["## Use", "On the dense cache, with transformers alone:", f"```python\n{dense}\n```"]
        if record.compressor not in (None, "dense"):
            parts += ["On the cache of training, which the folder remembers:", f"```python\n{self._sparse()}\n```"]
            trust = " --trust" if names_python_file(record.compressor or "") else ""
            parts += ["Served on it, to clients of OpenAI's protocol:", f"```\nsparse-rl serve {self.name}{trust}\n```"]
            brought = code_in(record.task_options).values()
            own = [name for name in (record.task, *brought, record.compressor) if name and names_code(name)]
            given = record.task_options.get("files") or []
            files = [name for name in ([given] if isinstance(given, str) else given) if not name.startswith("hub:")]
            more = (" --trust" if own else "") + (" --task.files FILES" if files else "")
            command = f"sparse-rl eval {self.name}{more}"
            parts += ["Measured on either:", f"```\n{command}\n{command} --compressor dense\n```"]
            named = ", ".join(f"`{name}`" for name in dict.fromkeys(own))
            parts += [f"Read {named} first: `--trust` runs it with your rights."] if own else []
            data = ", ".join(f"`{name}`" for name in files)
            parts += [f"FILES stands for the problems, {data}, which are not part of this folder."] if files else []
        return "\n\n".join(parts)

    def _sparse(self) -> str:
        """Python code that runs the model on the cache of training. A compressor that is a Python file
        must be named.
        """
        record = self.record
        prompt = '[{"role": "user", "content": "..."}]' if record.template in ("chat", "abel") else '"..."'
        lines = ["import sparse_rl", "", f'model, tokenizer = sparse_rl.load_model("{self.name}")']
        if record.compressor and names_python_file(record.compressor):
            lines += [f"cache = model.config.sparse_rl  # its compressor is {record.compressor}: read that file first"]
            options = 'compressor=cache["compressor"], compressor_options=cache["options"]'
            return "\n".join([*lines, f"print(sparse_rl.generate(model, tokenizer, {prompt}, {options}))"])
        return "\n".join([*lines, f"print(sparse_rl.generate(model, tokenizer, {prompt}))"])

    def _recipe(self) -> str:
        return f"## Recipe\n\n```yaml\n{self.recipe.strip()}\n```" if self.recipe else ""


def _options(options: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{key} {value}' for key, value in options.items())})" if options else ""
