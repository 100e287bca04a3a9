import pytest

from sparse_rl import Engine, Sampling
from tests.helpers.models import prompts_of


@pytest.fixture
def engine(llama):
    """An engine that must work, after whatever the test did to it, as if nothing had happened."""
    engine = Engine(llama, compressor="rkv", budget=16, interval=8, rows=2)
    yield engine
    fresh = Engine(llama, compressor="rkv", budget=16, interval=8, rows=2)
    after, expected = (e.generate(prompts_of(9), sampling=Sampling(20), seed=5)[0] for e in (engine, fresh))
    assert after.tokens.equal(expected.tokens)
    assert after.trace.evicted_at.equal(expected.trace.evicted_at)
    assert llama.config._attn_implementation == "sdpa" and not llama.training
