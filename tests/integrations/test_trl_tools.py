"""TRL's tools and environments on sparse rollouts: every conversation is one trajectory under one trace.

Models this small write no calls that a parser knows, so a stand-in for TRL's parser reads one out of most turns.
"""

import pytest
import torch

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.chat import Chats, Turns, converse
from sparse_rl.errors import SparseRLError
from sparse_rl.learn.correct import Correction
from sparse_rl.learn.loss import Loss
from sparse_rl.models import tiny_tokenizer
from sparse_rl.tasks import Prompt, Task
from tests.integrations.test_trl_adapter import (  # noqa: F401  (`made` is a fixture)
    CACHE,
    GENERATIONS,
    PROMPTS,
    assert_same,
    gap_of,
    gradient,
    made,
    model_of,
    nudge,
    our_batch,
    our_gradient,
)

trl = pytest.importorskip("trl", minversion="1.12")

from trl.trainer import grpo_trainer  # noqa: E402

from sparse_rl.integrations.trl import TRACES, rollout_seed, use_sparse_rollouts  # noqa: E402
from sparse_rl.integrations.trl_turns import OpenBatch  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STOPS = list(range(1, 17))  # a random model rarely ends a turn, so many tokens do
NEW, TURNS = 160, 4
ROWS = [{"prompt": [{"role": "user", "content": p}]} for p in PROMPTS for _ in range(GENERATIONS)]


def look(text: str) -> str:
    """Look something up.

    Args:
        text: what to look for
    """
    if len(text) % 5 == 4:
        raise ValueError("nothing there")
    return "found " + "abcde" * (len(text) % 4)


class Notebook:
    """An environment that remembers how often it was asked."""

    def reset(self, **row) -> str:
        self.asked = 0
        return " (use your notebook)"

    def look(self, text: str) -> str:
        """Look something up.

        Args:
            text: what to look for
        """
        self.asked += 1
        return f"{self.asked}. {'xyz' * (len(text) % 4)}"

    def get_reward(self) -> float:
        return float(self.asked)


def calls(text: str) -> bool:
    return len(text) % 4 != 0


def parsed(tokenizer, ids, prefix=None, tools=None) -> dict:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    message = {"role": "assistant", "content": text}
    if calls(text):
        message["tool_calls"] = [{"type": "function", "function": {"name": "look", "arguments": {"text": text}}}]
    return message


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {"fields": {}}
    return tokenizer


@pytest.fixture
def sparse(made, monkeypatch):  # noqa: F811
    monkeypatch.setattr(grpo_trainer, "parse_response", parsed)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def make(replay=True, rows=None, correction=None, loss_type="grpo", **options):
        tools = {key: options.pop(key) for key in ("tools", "environment_factory") if key in options}
        settings = {"max_completion_length": NEW, "max_tool_calling_iterations": TURNS - 1, "loss_type": loss_type}
        given, original = tools or {"tools": [look]}, trl.GRPOTrainer
        with monkeypatch.context() as patch:
            patch.setattr(trl, "GRPOTrainer", lambda *args, **more: original(*args, **more, **given))
            model = model_of()
            model.generation_config.eos_token_id = STOPS
            prompts = [row["prompt"] for row in ROWS[::GENERATIONS]]
            trainer = made(model=model, tokenizer=chat_tokenizer(), prompts=prompts, **{**settings, **options})
        return use_sparse_rollouts(trainer, **CACHE, rows=rows, replay=replay, correction=correction)

    return make


def generated(trainer) -> dict:
    return trainer._generate_and_score_completions([dict(row) for row in ROWS])


class Looked(Task):
    """The same conversations as a task of ours."""

    name = "looked"

    def __getitem__(self, i):
        return Prompt(ROWS[i * GENERATIONS]["prompt"], None, index=i)

    def reply(self, prompt, messages):
        text = messages[-1]["content"]
        if not calls(text):
            return None
        try:
            found = look(text)
        except ValueError as error:
            found = str({"error": str(error)})
        return [{"role": "tool", "name": "look", "content": found}]


@pytest.mark.parametrize("rows", [None, 2])
def test_conversations_are_those_of_our_own_driver(sparse, rows):
    """Same seeds, same replies: the same tokens, log-probs and evictions, to the bit, from two independent loops."""
    trainer = sparse(rows=rows)
    batch = generated(trainer)
    found = trainer.vllm_generation.trajectories
    task, model = Looked(), trainer.model
    chats = Chats(trainer._tokenizer, task, 1)
    prompts = [task[i] for i in range(len(PROMPTS))]
    engine = Engine(model, **CACHE, rows=5)
    sampling, seed = trainer.vllm_generation.sampling, rollout_seed(trainer.args.seed, 0)
    ids = [chats.of(prompt).start(prompt) for prompt in prompts]
    pairs = converse(
        engine, chats, task, prompts, ids, [range(GENERATIONS)] * len(prompts), sampling, seed, Turns(TURNS, 200)
    )
    assert len({len(t.turns) for t, _ in pairs}) > 2 and sum(talk.at_limit for _, talk in pairs)
    for ours, (theirs, _) in zip(found, pairs, strict=True):
        assert ours.tokens.equal(theirs.tokens) and ours.sampler_logprobs.equal(theirs.sampler_logprobs)
        assert ours.trace.evicted_at.equal(theirs.trace.evicted_at)
        assert (ours.given is None) == (theirs.given is None) and (ours.given is None or ours.given.equal(theirs.given))
    assert any((t.trace.evicted_at.long() < len(t.tokens)).any() for t in found)
    lengths = [len(t.tokens) - t.num_prompt_tokens for t in found]
    assert batch["completion_mask"].sum(1).tolist() == lengths


def test_replay_starts_at_ratio_1_and_what_tools_wrote_carries_no_loss(sparse):
    trainer = sparse()
    batch = generated(trainer)
    found = trainer.vllm_generation.trajectories
    mask = batch["completion_mask"].bool() & batch["tool_mask"].bool()
    for t, row, sampled, trace in zip(found, mask, batch["sampling_per_token_logps"], batch[TRACES], strict=True):
        own = t.response_mask[t.num_prompt_tokens :]
        assert row[: len(own)].equal(own) and not row[len(own) :].any()
        assert trace.num_tokens == len(t.tokens)
        logprobs = token_logprobs(trainer.model, t.tokens, t.trace)[t.num_prompt_tokens :]
        assert (logprobs - sampled[: len(own)])[own].abs().max() < 1e-4
        if t.given is not None:
            text = trainer._tokenizer.decode(t.tokens[t.given])
            assert text.count("tool: ") == text.count("assistant: ") == len(t.turns) - 1
    assert sum(t.num_given_tokens for t in found) > 100
    assert gap_of(batch | {"completion_mask": mask}).abs().max() < 1e-4
    assert trainer._metrics["train"]["tools/call_frequency"][0] > 0.5


@pytest.mark.parametrize("loss_type, loss", [("grpo", Loss()), ("dapo", Loss(mean="token-mean"))])
def test_the_gradient_is_that_of_our_learner(sparse, loss_type, loss):
    """Our learner has the trajectories alone: it knows who wrote a token from `Trajectory.given`."""
    trainer = sparse(loss_type=loss_type)
    batch = generated(trainer)
    ours = our_batch(trainer, batch["advantages"], Correction(), loss, "shadow")
    nudge(trainer.model)
    value = trainer._compute_loss(trainer.model, batch)
    value.backward()
    assert_same((value.item(), gradient(trainer.model)), our_gradient(trainer.model, ours, loss))


def test_corrections_see_sampled_tokens_alone(sparse):
    """In the dense view the gap of a tool's tokens is nobody's: they are neither weighed nor counted."""
    how = Correction(cap=2.0, mask_outside=(0.9, 1.1))
    trainer = sparse(replay=False, correction=how)
    batch = generated(trainer)
    own = torch.zeros_like(batch["completion_mask"], dtype=torch.bool)
    for i, t in enumerate(trainer.vllm_generation.trajectories):
        own[i, : len(t.tokens) - t.num_prompt_tokens] = t.response_mask[t.num_prompt_tokens :]
    assert not (batch["tool_mask"].bool() & ~own).any() and (~batch["tool_mask"].bool() & own).any()
    ours = our_batch(trainer, batch["advantages"], how, Loss(), "dense")
    value = trainer._compute_loss(trainer.model, batch)
    value.backward()
    assert_same((value.item(), gradient(trainer.model)), our_gradient(trainer.model, ours, Loss()))


def test_an_environment_trains(sparse):
    """`environment_factory`: one instance for each conversation, its methods as tools, its own reward."""
    trainer = sparse(environment_factory=Notebook, max_steps=2, loss_type="dapo")
    before = gradient_free_copy(trainer.model)
    trainer.train()
    first, *_ = trainer.state.log_history
    assert first["sampling/sampling_logp_difference/max"] < 1e-4 and first["rewards/Notebook/mean"] > 0.5
    assert first["tools/failure_frequency"] == 0 and first["sparse_rl/kv_tokens_saved"] > 0
    assert any("1. " in trainer._tokenizer.decode(t.tokens) for t in trainer.vllm_generation.trajectories)
    assert any(not old.equal(new) for old, new in zip(before, trainer.model.parameters()))
    assert trainer.vllm_generation.open is None


def gradient_free_copy(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("limit", [30, 40])
def test_a_tool_s_output_that_leaves_no_room(sparse, limit):
    """TRL's limit counts what tools write: it ends conversations, also right behind an output."""
    trainer = sparse(max_completion_length=limit)
    batch = generated(trainer)
    found = trainer.vllm_generation.trajectories
    assert max(len(t.tokens) - t.num_prompt_tokens for t in found) <= limit
    assert any(t.finish_reason == "length" for t in found)
    assert [t.num_tokens for t in batch[TRACES]] == [len(t.tokens) for t in found]
    mask = batch["completion_mask"].bool() & batch["tool_mask"].bool()
    assert gap_of(batch | {"completion_mask": mask}).abs().max() < 1e-4


def test_an_output_that_fills_the_limit_to_the_token(sparse):
    """The next turn has no room: its one token, which the engine samples, is not TRL's, and not the trace's."""
    whole = sparse()
    generated(whole)
    found = whole.vllm_generation.trajectories
    row = next(i for i, t in enumerate(found) if t.given is not None)
    second = found[row].turns[1]  # where the turn behind the first output begins
    limit = second.start - found[row].num_prompt_tokens
    trainer = sparse(max_completion_length=limit)
    batch = generated(trainer)
    t = trainer.vllm_generation.trajectories[row]
    assert len(t.tokens) - t.num_prompt_tokens == limit and t.given[-1] and batch["tool_mask"][row, limit - 1] == 0
    assert t.trace.num_tokens == len(t.tokens) and batch[TRACES][row].num_tokens == len(t.tokens)
    mask = batch["completion_mask"].bool() & batch["tool_mask"].bool()
    assert gap_of(batch | {"completion_mask": mask}).abs().max() < 1e-4


def test_a_tool_that_interrupts_leaves_no_row(sparse):
    """What TRL does not catch ends the batch, and the next one begins with free rows."""

    def leave(text: str) -> str:
        """Leave.

        Args:
            text: anything
        """
        raise KeyboardInterrupt

    leave.__name__ = "look"
    trainer = sparse(tools=[leave])
    with pytest.raises(KeyboardInterrupt):
        generated(trainer)
    sampler = trainer.vllm_generation
    assert sampler.open is None
    trainer.tools = trainer._standalone_tools = [look]
    generated(trainer)
    with pytest.raises(SparseRLError, match="do not continue what was sampled"):
        sampler.generate([row.tolist() for row in torch.randint(2, 20, (2, 6))])
        sampler.generate([[3, 4, 5]])
    sampler.abandon_turns()


def test_conversations_that_begin_alike_are_told_apart():
    """Greedy members of a group say the same; one goes on and one ends, and TRL names them in any order."""
    model = model_of()
    prompt = list(range(2, 12))
    for swapped in (False, True):
        greedy = Sampling(NEW, 0.0, stop_ids=tuple(STOPS))
        batch = OpenBatch(Engine(model, rows=2, **CACHE), [prompt, prompt], greedy, seed=0)
        (first, _), (second, _) = batch.first_turns()
        assert first == second and len(first) < NEW - 10
        given = [5, 6, 7]
        ((more, _),) = batch.next_turns([[*prompt, *first, *given]])
        whole, short = [*first, *given, *more], first
        completions = [short, whole] if swapped else [whole, short]
        found = batch.close([prompt, prompt], completions)
        assert [t.tokens.tolist() for t in found] == [[*prompt, *completion] for completion in completions]
        assert [t.prompt_index for t in found] == [0, 1]


def test_completions_that_were_changed_are_refused():
    batch = OpenBatch(Engine(model_of(), rows=2, **CACHE), [[2, 3, 4]], Sampling(8), seed=0)
    ((said, _),) = batch.first_turns()
    with pytest.raises(SparseRLError, match="TRL has a conversation of 6 tokens that differs from what was sampled"):
        batch.close([[2, 3, 4]], [[(said[0] + 1) % 20, *said[1:3]]])
