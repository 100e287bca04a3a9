"""stargraph: several arms leave a centre; find the path from the centre to a given leaf.

The edges are shuffled, so the first step from the centre can only be guessed; the solution walks back from the leaf.

    edges 4-7 1-9 4-1 7-2, from 4 to 9   ->   9 from 1; 1 from 4   answer: 4 1 9
"""

from __future__ import annotations

import itertools

from ..errors import SparseRLError, check_count
from .base import GeneratedTask, final_answer, register
from .problem import Prompt


@register
class StarGraph(GeneratedTask):
    name = "stargraph"

    def __init__(self, arms: int = 3, length: int = 3, nodes: int = 50, seed: int = 0, split: str = "train"):
        if arms < 1 or length < 1 or nodes < 1 + arms * length:
            raise SparseRLError(
                f"stargraph: {arms} arms of length {length} need {1 + arms * length} nodes, but nodes is {nodes}; "
                "use at least 1 arm, of length 1 or more, and enough nodes."
            )
        check_count("nodes of a star graph's arms", arms * length, 100_000)
        super().__init__(seed, split)
        self.arms, self.length, self.nodes = arms, length, nodes

    def __getitem__(self, i: int) -> Prompt:
        draw = self.numbers(i)
        centre, *others = draw.sample(range(self.nodes), 1 + self.arms * self.length)
        paths = [[centre, *others[a * self.length : (a + 1) * self.length]] for a in range(self.arms)]
        edges = [(x, y) for path in paths for x, y in itertools.pairwise(path)]
        draw.shuffle(edges)
        path = draw.choice(paths)
        listed = " ".join(f"{x}-{y}" for x, y in edges)
        return Prompt(f"edges {listed}, from {centre} to {path[-1]}\n", answer=path, index=i)

    def solution(self, prompt: Prompt) -> str:
        path = prompt.answer
        back = "; ".join(f"{y} from {x}" for x, y in reversed(list(itertools.pairwise(path))))
        return f"{back}\nanswer: {' '.join(map(str, path))}"

    def reward(self, prompt: Prompt, text: str) -> float:
        answer = final_answer(text)
        return float(answer is not None and answer.split() == [str(node) for node in prompt.answer])
