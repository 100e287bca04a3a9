r"""How a question is put to a model, by name: the words around it, as text or as chat messages.

A model must be asked in evaluation exactly as in training, so `qwen-boxed` and `abel` are, to the byte, the prompts of the SimpleRL files,
doubled braces of `\boxed{{}}` included.
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
    messages: bool = False  # chat messages, for the tokenizer's chat template; otherwise text
    system: str | None = None  # the message before the user's


TEMPLATES = {
    "plain": Template("the question as it stands"),
    "chat": Template(
        r"one user message through the tokenizer's chat template, which asks for \boxed{}",
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
    """The question as a prompt of that form."""
    form = find(template)
    text = form.before + question + form.after
    if not form.messages:
        return text
    system = [] if form.system is None else [{"role": "system", "content": form.system}]
    return [*system, {"role": "user", "content": text}]


def template_of(prompt: str | list[dict]) -> str | None:
    """The template that a ready-made prompt has the form of; None where there is none, for any text could be `plain`."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    for name, form in TEMPLATES.items():
        framed = (
            len(text) > len(form.before + form.after) and text.startswith(form.before) and text.endswith(form.after)
        )
        if (
            framed
            and form.before + form.after
            and dress(text[len(form.before) : len(text) - len(form.after)], name) == prompt
        ):
            return name
    return None
