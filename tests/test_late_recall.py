"""The task of the late-recall study: what is right, and what is not."""

from pathlib import Path

import pytest

from sparse_rl import SparseRLError
from sparse_rl.tasks import make

FILE = f"{Path(__file__).parent.parent / 'benchmarks/late_recall.py'}:LateRecall"


@pytest.mark.parametrize("fact", ["told", "own"])
def test_only_the_right_count_and_the_number_that_was_given_earn_the_reward(fact):
    task = make(FILE, fact=fact)
    for prompt in [*task.sample(0, 20), *task.held_out().sample(0, 20)]:
        text = task.solution(prompt)
        other = f"{(int(text[-2:]) + 1) % 100:02}"
        wrong = [text[:-2] + other, text[:-1], text + " ", text.replace("03 ", ""), text.replace("03", "13", 1), ""]
        assert task.reward(prompt, text) == 1 and not any(task.reward(prompt, each) for each in wrong)
        assert ("?" in prompt.text) == (fact == "own") == (text[2] == ";")
    assert make(FILE).held_out().sample(0, 1)[0].text != make(FILE).sample(0, 1)[0].text
    with pytest.raises(SparseRLError, match="fact is 'later'; it must be one of told, own, both"):
        make(FILE, fact="later")
