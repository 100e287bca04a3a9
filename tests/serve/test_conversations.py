"""Conversations that go on in their rows."""

import asyncio

import httpx
import openai
import pytest
import torch

from sparse_rl import Trace, token_logprobs
from sparse_rl.serve.protocol import ChatRequest
from sparse_rl.serve.reader import Reader
from tests.helpers.serving import all_free, served, until

TURNS = ["1+2+3=", "4+5+6+7+8=", "1+1=", "9+9+9="]
SETTINGS = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "model": "sums"}


@pytest.fixture(scope="module")
def running():
    with served(rows=2) as (address, service):
        yield address, service


def client_of(address, key="none"):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)


def talk(client, name, turns=TURNS):
    """(answers, the messages of all) of a conversation."""
    messages, answers = [], []
    for text in turns:
        messages.append({"role": "user", "content": text})
        extra = {"conversation": name, "return_token_ids": True, "trace": True}
        answers.append(client.chat.completions.create(messages=messages, extra_body=extra, logprobs=True, **SETTINGS))
        messages.append(answers[-1].choices[0].message.model_dump())
    return answers, messages


def kept(service, name):
    """What the engine knows of a conversation."""
    return next(one.ticket.conversation for key, one in service.conversations._kept.items() if key[1] == name)


def test_a_conversation_goes_on_under_one_trace(running):
    address, service = running
    client = client_of(address)
    answers, _ = talk(client, "one")
    assert [answer.model_extra["conversation"] for answer in answers] == ["prefilled"] + ["extended"] * 3
    last = answers[-1]
    more = last.choices[0].model_extra
    tokens = last.model_extra["prompt_token_ids"] + more["token_ids"]
    content = client.get(f"/traces/{more['trace_id']}", cast_to=openai.HttpxBinaryResponseContent)
    trace = Trace.from_bytes(content.read())
    assert trace.num_tokens == len(tokens) and (trace.evicted_at.int() < len(tokens)).any()
    replayed = token_logprobs(service.model, torch.tensor(tokens), trace)
    for answer in answers:  # every turn's log-probs are those of the one trace
        choice, at = answer.choices[0], len(answer.model_extra["prompt_token_ids"])
        found = torch.tensor([entry.logprob for entry in choice.logprobs.content])
        torch.testing.assert_close(found, replayed[at : at + len(found)], atol=1e-4, rtol=0)
        assert tokens[at : at + len(found)] == choice.model_extra["token_ids"]


def test_other_company_changes_nothing(running):
    address, _ = running
    client = client_of(address)
    alone, _ = talk(client, "two")
    _, messages = talk(client, "three", TURNS[:3])
    for i in range(5):  # more than there are rows: they are parked, and some keep their traces alone
        talk(client, f"another {i}", TURNS[:2])
    messages.append({"role": "user", "content": TURNS[3]})
    again = client.chat.completions.create(messages=messages, extra_body={"conversation": "three"}, **SETTINGS)
    assert again.model_extra["conversation"] in ("extended", "restored")
    assert again.choices[0].message.content == alone[-1].choices[0].message.content


def test_another_past_is_read_anew(running):
    address, service = running
    client = client_of(address)
    _, messages = talk(client, "four", TURNS[:2])
    before = service.desk.open
    messages[1]["content"] += "1"
    messages.append({"role": "user", "content": "2+2="})
    again = client.chat.completions.create(messages=messages, extra_body={"conversation": "four"}, **SETTINGS)
    assert again.model_extra["conversation"] == "prefilled"
    assert client.chat.completions.create(messages=messages, **SETTINGS).choices == again.choices
    assert kept(service, "four").renewed == 1 and until(lambda: service.desk.open == before)  # in the old one's place


def test_a_client_may_ask_for_a_new_trace(running):
    """Then the answer is that to a stateless request, and the conversation goes on under the new trace."""
    address, service = running
    client = client_of(address)
    _, messages = talk(client, "anew", TURNS[:3])
    messages.append({"role": "user", "content": TURNS[3]})
    stateless = client.chat.completions.create(messages=messages, **SETTINGS)
    extra = {"conversation": "anew", "renew": True, "trace": True, "return_token_ids": True}
    for how in ("prefilled", "extended"):
        answer = client.chat.completions.create(messages=messages, extra_body=extra, logprobs=True, **SETTINGS)
        assert answer.model_extra["conversation"] == how
        if how == "prefilled":
            assert answer.choices[0].message.content == stateless.choices[0].message.content
            asked = answer.model_extra["prompt_token_ids"]
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "1+1="}]
        extra["renew"] = False
    more = answer.choices[0].model_extra
    tokens = torch.tensor(answer.model_extra["prompt_token_ids"] + more["token_ids"])
    assert tokens[: len(asked)].tolist() == asked
    content = client.get(f"/traces/{more['trace_id']}", cast_to=openai.HttpxBinaryResponseContent)
    replayed = token_logprobs(service.model, tokens, Trace.from_bytes(content.read()))
    found = torch.tensor([entry.logprob for entry in answer.choices[0].logprobs.content])
    torch.testing.assert_close(found, replayed[-len(found) :], atol=1e-4, rtol=0)
    for extra in ({"renew": True}, {"renew": "maybe", "conversation": "anew"}):
        with pytest.raises(openai.BadRequestError, match="renew"):
            client.chat.completions.create(messages=messages, extra_body=extra, **SETTINGS)


def test_metrics_count_turns_by_their_beginning():
    with served(rows=2, dense_rows=0) as (address, service):
        client = client_of(address)
        talk(client, "counted", TURNS[:3])
        client.chat.completions.create(messages=[{"role": "user", "content": "1+1="}], **SETTINGS)  # without a name
        service.desk.places["sums"].live._loop.hold = service.desk.places["sums"].live._loop.park_at_most = 0
        talk(client, "others", TURNS[:3])
        lines = httpx.get(f"{address}/metrics").text.splitlines()
        found = {line for line in lines if line.startswith("sparse_rl_turns_total")}
        counts = {"prefilled": 2, "extended": 2, "restored": 2}
        assert found == {f'sparse_rl_turns_total{{way="{way}"}} {count}.0' for way, count in counts.items()}


def test_a_conversation_outlives_an_engine_that_failed(monkeypatch):
    """All that the server then has of it is its tokens: it is begun anew."""
    with served(rows=2, dense_rows=0) as (address, service):
        client = client_of(address)
        _, messages = talk(client, "survivor", TURNS[:2])
        monkeypatch.setattr(service.desk.places["sums"].live._loop, "decode", lambda: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            client.chat.completions.create(messages=messages[:1], **SETTINGS)
        messages.append({"role": "user", "content": "2+2="})
        answer = client.chat.completions.create(messages=messages, extra_body={"conversation": "survivor"}, **SETTINGS)
        assert answer.model_extra["conversation"] == "prefilled"
        assert kept(service, "survivor").renewed == 1


def test_other_tools_are_another_past(running):
    """They are told before the first message, which a row that goes on has read already."""
    address, _ = running
    client = client_of(address)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    asked = {"extra_body": {"conversation": "tools"}, **SETTINGS}
    for tools, hows in (([tool], ("prefilled", "extended")), ([tool, tool], ("prefilled", "extended"))):
        _, messages = talk(client, "tools", TURNS[:1])  # without tools
        for how in hows:
            messages.append({"role": "user", "content": "2+2="})
            answer = client.chat.completions.create(messages=messages, tools=tools, **asked)
            assert answer.model_extra["conversation"] == how
            messages.append(answer.choices[0].message.model_dump())
    messages.append({"role": "user", "content": "2+2="})
    more = {"conversation": "tools", "chat_template_kwargs": {"mood": "bad"}}
    answer = client.chat.completions.create(messages=messages, tools=tools, **{**asked, "extra_body": more})
    assert answer.model_extra["conversation"] == "prefilled"


def test_a_row_that_was_made_again_says_so():
    """Also where its copy is given up only after the client asked."""
    with served(rows=2, dense_rows=0) as (address, service):
        expected, _ = talk(client_of(address), "kept")
        loop = service.desk.places["sums"].live._loop
        loop.hold = loop.park_at_most = 0
        again, _ = talk(client_of(address), "lost")
        assert [answer.model_extra["conversation"] for answer in again] == ["prefilled"] + ["restored"] * 3
        for mine, theirs in zip(again, expected, strict=True):
            assert mine.choices[0].message.content == theirs.choices[0].message.content


def test_which_conversations_find_no_room_in_host_memory():
    """Of as many as names are kept, those of the model itself come back to the bit; its dense cache has fewer rows."""
    with served(rows=3, dense_rows=1) as (address, _):
        client = client_of(address)
        for model, how in (("sums", "extended"), ("sums:dense", "restored")):
            settings = {**SETTINGS, "model": model, "max_tokens": 2}
            talks = {}
            for name in map(str, range(12)):
                talks[name] = [{"role": "user", "content": "1+1="}]
                first = client.chat.completions.create(
                    messages=talks[name], extra_body={"conversation": name}, **settings
                )
                talks[name] += [first.choices[0].message.model_dump(), {"role": "user", "content": "2+2="}]
            again = client.chat.completions.create(messages=talks["0"], extra_body={"conversation": "0"}, **settings)
            assert again.model_extra["conversation"] == how


def test_a_conversation_belongs_to_its_key():
    with served(rows=2, dense_rows=0, api_keys=("a", "b")) as (address, service):
        _, messages = talk(client_of(address, "a"), "same name", TURNS[:1])
        messages.append({"role": "user", "content": "2+2="})
        for key, how in (("b", "prefilled"), ("a", "extended")):
            ask = client_of(address, key).chat.completions.create
            again = ask(messages=messages, extra_body={"conversation": "same name"}, **SETTINGS)
            assert again.model_extra["conversation"] == how
        service.conversations.expire(lambda: 1e12)
        assert until(lambda: all_free(service)) and len(service.conversations) == 0


def test_a_streamed_turn_is_kept_and_a_cancelled_one_is_not(running):
    address, service = running
    client = client_of(address)
    messages = [{"role": "user", "content": TURNS[0]}]
    asked = {"extra_body": {"conversation": "five"}, **SETTINGS}
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **asked))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": TURNS[1]}]
    asked = {"messages": messages, "extra_body": {"conversation": "five", "ignore_eos": True}, **SETTINGS}
    stream = client.chat.completions.create(stream=True, **{**asked, "max_tokens": 100})
    next(iter(stream))
    stream.close()
    assert until(lambda: service.desk.running == 0)
    assert client.chat.completions.create(**asked).model_extra["conversation"] == "prefilled"


def test_a_conversation_whose_client_left_at_the_end_is_given_up(running):
    """The answer is complete, but nobody has read it: its row must not be held for ever."""
    _, service = running
    service.conversations.expire(lambda: 1e12)
    assert until(lambda: service.desk.open == 0)
    asked = ChatRequest(messages=[{"role": "user", "content": "1+2="}], max_tokens=3, conversation="left")

    async def leave():
        reader = Reader(service, asked, "sums", [service.tokenizer.encode("1+2=")], "", keep=True)
        while reader.tickets[0].conversation.status != "stopped" or service.desk.running:
            await asyncio.sleep(0.001)
        reader.close()

    asyncio.run(leave())
    assert until(lambda: service.desk.open == 0 and all_free(service))
