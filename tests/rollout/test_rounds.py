"""What the host does in a round of an open engine: little, together, and as much of it as it can while a GPU works."""

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.rollout.live_loop import LiveLoop
from sparse_rl.rollout.sent import sent
from sparse_rl.rollout.sync import sync
from tests.helpers.models import prompts_of

TURN = Sampling(12, stop_ids=())


def opened(model, rows=4, **options):
    return Engine(model, "rkv", budget=16, interval=8, rows=rows, **options).open(64, 300)


@pytest.mark.parametrize("hold", [4, 0])
def test_conversations_that_go_on_begin_together(hold, llama, monkeypatch):
    """Their settings are sent at once, also to rows that come back, and not to those that were cancelled meanwhile."""
    together, begin = [], LiveLoop.begin_turns

    def begin_turns(loop, conversations):
        together.append([conversation.number for conversation in conversations])
        begin(loop, conversations)

    engine = Engine(llama, "rkv", budget=16, interval=8, rows=4)
    with engine.open(64, 300, hold=hold) as live:
        chats = [live.submit(prompt, TURN, seed=i) for i, prompt in enumerate(prompts_of(5, 9, 7, 30))]
        live.run()
        monkeypatch.setattr(LiveLoop, "begin_turns", begin_turns)
        for i, chat in enumerate(chats):
            live.extend(chat, prompts_of(i)[0], Sampling(5 + i, stop_ids=()))
        live.step(sample=False)  # takes them in, and samples nothing
        assert not together
        live.cancel(chats[1])
        live.run()
        assert [group for group in together if group] == [[0, 2, 3]]
        assert [chats[i].num_sampled for i in (0, 2, 3)] == [12 + 5 + i for i in (0, 2, 3)]


def test_a_sync_is_one_copy(llama, monkeypatch):
    """The host asks the device once a round for all that it must know, what was sampled included."""
    with opened(llama, poll=(4, 4)) as live:
        for i, prompt in enumerate(prompts_of(5, 9, 7)):
            live.submit(prompt, Sampling(40, stop_ids=()), seed=i)
        live.step()
        copies, cpu = [], torch.Tensor.cpu
        monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (copies.append(tensor.shape), cpu(tensor))[1])
        for _ in range(5):
            assert len(live.step()) == 3
        assert len(copies) == 5


def test_others_are_decoded_before_given_tokens_are_fed(llama, monkeypatch):
    """So the host launches what is fed while a GPU replays its graph."""
    with opened(llama) as live:
        first, other = (live.submit(prompt, Sampling(n, stop_ids=())) for prompt, n in zip(prompts_of(5, 9), (3, 60)))
        while first.status != "stopped":
            live.step()
        done, loop = [], live._loop
        for name in ("decode", "feed_chunks", "sync"):
            plain = getattr(loop, name)
            monkeypatch.setattr(loop, name, lambda *args, n=name, plain=plain: (done.append(n), plain(*args))[1])
        live.extend(first, [3, 4, 5], TURN)
        live.step()
        assert done == ["decode", "feed_chunks", "sync"]
        assert {first.status, other.status} == {"running"}


def test_tokens_of_the_last_steps_are_those_on_the_device(llama):
    """From any place on, also beyond what was recorded."""
    with opened(llama) as live:
        chats = [live.submit(prompt, TURN, seed=i) for i, prompt in enumerate(prompts_of(5, 9))]
        live.run()
        now = sync(live._loop.state, live._loop.fine, [3, 0, 0, 0], 400, lambda: None)
        for chat, first in zip(chats, (3, 0), strict=True):
            assert chat.row is not None and now.count[chat.row] == 12 and now.done[chat.row]
            place = slice(len(chat.prompt) + first, None)
            assert now.tokens[chat.row][: 12 - first] == chat.tokens[place]
            assert now.logprobs[chat.row][: 12 - first] == chat.logprobs[place]


@pytest.mark.parametrize(
    "values, dtype", [([1, 2**62], None), ([[1, 2], [3, 4]], None), ([0.7, 1], torch.float32), ([True, False], None)]
)
def test_numbers_are_sent_as_they_are(values, dtype):
    assert sent(values, torch.device("cpu"), dtype).equal(torch.tensor(values, dtype=dtype))
    assert sent(values, torch.device("cpu"), dtype).dtype == torch.tensor(values, dtype=dtype).dtype
