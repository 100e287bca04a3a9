r"""Prompt templates by name: the words around a question, as text or as chat messages.

Evaluation must use the prompts of training. So `qwen-boxed` and `abel` are, byte for byte, the prompts of the SimpleRL
files, including the doubled braces of their `\boxed{{}}`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SparseRLError, nearest

_ASK = "\nPlease reason step by step, and put your final answer within "
_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class Template:
    """The words around a question."""

    idea: str
    before: str = ""
    after: str = ""
    messages: bool = False  # chat messages for the tokenizer's chat template, instead of text
    system: str | None = None  # the system message before the user's


TEMPLATES = {
    "plain": Template("the question as it stands"),
    "chat": Template(
        r"one user message, which asks for \boxed{}, through the tokenizer's chat template",
        after=_ASK + r"\boxed{}.",
        messages=True,
    ),
    "qwen-boxed": Template(
        r"ChatML text, as in simplerl_qwen_level3to5.jsonl (its \boxed{{}} included)",
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n",
        _ASK + "\\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n",
    ),
    "abel": Template(
        r"system and user message, as in simplerl_abel_level3to5.jsonl (its \boxed{{}} included)",
        after=_ASK + r"\boxed{{}}.",
        messages=True,
        system=_SYSTEM,
    ),
}


def find(template: str) -> Template:
    if template not in TEMPLATES:
        raise SparseRLError(f"there is no template {template!r}; {nearest(str(template), TEMPLATES)}")
    return TEMPLATES[template]


def dress(question: str, template: str) -> str | list[dict]:
    """The question as a prompt in this template."""
    form = find(template)
    text = form.before + question + form.after
    if not form.messages:
        return text
    system = [] if form.system is None else [{"role": "system", "content": form.system}]
    return [*system, {"role": "user", "content": text}]


def template_of(prompt: str | list[dict]) -> str | None:
    """The template of a prompt; None if there is none, as for plain text."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    for name, form in TEMPLATES.items():
        around = len(form.before + form.after)
        framed = len(text) > around and text.startswith(form.before) and text.endswith(form.after)
        if framed and around and dress(text[len(form.before) : len(text) - len(form.after)], name) == prompt:
            return name
    return None
