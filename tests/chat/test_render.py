"""Token in, token out: what a chat template makes of replies, and which templates cannot hold a conversation."""

import json

import pytest

from sparse_rl.chat import Chats, first_messages
from sparse_rl.errors import SparseRLError
from sparse_rl.models.tiny import tiny_tokenizer
from sparse_rl.tasks import make
from sparse_rl.tasks.conversing import answered, called, said

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FORGETS = TEMPLATE.replace("{{ message.content }}", "{{ message.content if loop.last else '' }}")
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def chat_tokenizer(template: str = TEMPLATE):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def chats_of(tokenizer, task):
    return Chats(tokenizer, task, tokenizer.convert_tokens_to_ids("<|im_end|>"))


@pytest.mark.parametrize("response", [None, RESPONSE])
def test_what_is_fed_is_the_whole_chat_as_the_template_writes_it(response):
    """Prompt, turns and replies one after the other are the tokens of the whole conversation, rendered at once."""
    task, tokenizer = make("notes", chat=True, hops=2), chat_tokenizer()
    if response is not None and not hasattr(tokenizer, "response_template"):
        pytest.skip("this transformers has no response templates")
    tokenizer.response_template = response
    (prompt,) = task.sample(0, 1)
    chat, messages = chats_of(tokenizer, task).of(prompt), first_messages(prompt)
    fed, worked = chat.start(prompt), task.solution(prompt)
    for message in worked:
        if message["role"] != "assistant":
            continue
        tokens = chat.said(messages, message)
        fed += tokens
        messages.append(chat.heard(tokens))
        assert [c["function"] for c in messages[-1].get("tool_calls", [])] == [
            c["function"] for c in message.get("tool_calls", [])
        ]
        reply = answered(task, prompt, messages)
        if reply.messages is not None:
            fed += chat.given(messages, reply.messages)
            messages += reply.messages
    whole = tokenizer.apply_chat_template(
        [*first_messages(prompt), *worked], tools=list(task.tools), tokenize=False
    ).removesuffix("\n")
    assert tokenizer.decode(fed) == whole and '"person"' in whole
    assert task.grade([prompt], [task.transcript(messages)])[0].right


def test_sampled_tokens_are_not_encoded_again():
    """A turn that the template would write otherwise (blanks, spaces in JSON) stays as it was sampled."""
    task, tokenizer = make("notes", chat=True), chat_tokenizer()
    (prompt,) = task.sample(0, 1)
    chat = chats_of(tokenizer, task).of(prompt)
    call = {"arguments": {"person": prompt.answer["path"][0]}, "name": "look"}
    text = f"  hm  <tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call> "
    messages = [*first_messages(prompt), chat.heard([*tokenizer.encode(text), chat.end])]
    assert messages[-1]["content"] == text  # as it is
    given = tokenizer.decode(chat.given(messages, answered(task, prompt, messages).messages))
    assert given.startswith("\n<|im_start|>tool\n" + prompt.answer["path"][0])
    assert given.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("response", [None, RESPONSE])
@pytest.mark.parametrize(
    "text", ["<tool_call>", "<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>7"]
)
def test_a_call_that_cannot_be_read_is_told_to_the_model(text, response):
    task, tokenizer = make("notes", chat=True), chat_tokenizer()
    tokenizer.response_template = response
    (prompt,) = task.sample(0, 1)
    chat = chats_of(tokenizer, task).of(prompt)
    messages = [*first_messages(prompt), chat.heard([*tokenizer.encode(text), chat.end])]
    reply = answered(task, prompt, messages)
    if response is None or messages[-1].get("tool_calls"):
        assert reply.tool_errors == 1 and "error: " in reply.messages[0]["content"]
        assert chat.given(messages, reply.messages)
    else:  # the model's own format says that this is no call
        assert reply.messages is None and reply.fault is None


def test_templates_that_cannot_hold_a_conversation_are_refused():
    notes, guess = make("notes", chat=True), make("guess")
    (prompt,) = notes.sample(0, 1)
    with pytest.raises(SparseRLError, match="rewrites earlier turns once a message follows"):
        chats_of(chat_tokenizer(FORGETS), notes).of(prompt)
    with pytest.raises(SparseRLError, match="does not say how the model calls them"):
        chats_of(chat_tokenizer(TEMPLATE.replace("<tool_call>", "")), notes).of(prompt)
    with pytest.raises(SparseRLError, match="does not end a turn with"):
        chats_of(chat_tokenizer(TEMPLATE.replace("<|im_end|>", "")), notes).of(prompt)
    refuses = TEMPLATE + "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    with pytest.raises(SparseRLError, match=r"cannot write this conversation .*no tools here"):
        chats_of(chat_tokenizer(refuses), notes).of(prompt)

    def untyped(x):
        return x

    notes.tools = (untyped,)
    with pytest.raises(SparseRLError, match="its tools need types and a docstring"):
        chats_of(chat_tokenizer(), notes).of(prompt)
    assert chats_of(chat_tokenizer(FORGETS), guess).of(guess[0]).start(guess[0])  # plain text needs no template


def test_plain_text_calls_by_name_and_brackets():
    task = make("calculator")
    chat = Chats(tiny_tokenizer(), task, 1).of(task[0])
    tokenizer = tiny_tokenizer()

    def heard(text):
        return chat.heard([*tokenizer.encode(text), 1])

    assert heard("calc(1+1)")["tool_calls"][0]["function"] == {"name": "calc", "arguments": "1+1"}
    assert heard("so\ncalc(1+(1))\n")["tool_calls"][0]["function"]["arguments"] == "1+(1)"
    assert all("tool_calls" not in heard(text) for text in ("=3", "calc(1", "x calc(1)", "calc(1)\n=3", ""))
    two = [said("a"), {"role": "tool", "content": "b"}, {"role": "user", "content": "c"}]
    assert tokenizer.decode(chat.given(two[:1], two[1:])) == "b\nc\n"
    many = {"role": "assistant", "content": "so", "tool_calls": called("f", a=1, b="x")["tool_calls"]}
    assert tokenizer.decode(chat.said([], many)) == 'so\nf(1, "x")<eos>'
