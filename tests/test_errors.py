"""The sentences of errors.py: which numbers are refused, and which name is suggested for a misspelt one."""

import pytest

from sparse_rl.errors import RolloutInterrupted, SparseRLError, nearest, require_int


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "3"])
def test_numbers_that_are_refused(value):
    with pytest.raises(SparseRLError, match=f"rows is {value!r}; it must be a whole number of at least 1"):
        require_int(rows=value)


def test_numbers_that_are_accepted():
    require_int(rows=1, budget=512)
    require_int(at_least=0, seed=0)


def test_a_misspelt_name_gets_the_nearest_one_and_the_list_of_all():
    assert nearest("snapvk", ["rkv", "snapkv"]) == "did you mean 'snapkv'? Known: rkv, snapkv."
    assert nearest("dpo", ["ppo", "online-dpo"]) == "did you mean 'online-dpo'? Known: ppo, online-dpo."
    assert nearest("zzz", ["rkv", "snapkv"]) == "known: rkv, snapkv."
    assert nearest("snapvk", ["rkv", "snapkv"], listed_by="x") == "did you mean 'snapkv'? `x` lists what there is."


def test_dotted_names_are_compared_by_their_last_part():
    known = ["rollout.budget", "run.steps", "warmup.steps"]
    assert nearest("bugdet", known, by_last=True).startswith("did you mean 'rollout.budget'?")
    assert nearest("stepz", known, by_last=True).startswith("did you mean 'run.steps'?")  # the first that has it


def test_an_interrupt_says_how_many_trajectories_it_holds():
    interrupt = RolloutInterrupted(["a", "b"])
    assert isinstance(interrupt, KeyboardInterrupt) and interrupt.trajectories == ["a", "b"]
    assert "2 finished trajectories" in str(interrupt)
