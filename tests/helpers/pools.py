"""A pool's members as threads of this process, which can be lost on purpose; the real engines, without Ray."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparse_rl.pool.pool import Answered, Joined, Lost
from sparse_rl.pool.weights import Versions
from sparse_rl.pool.worker import About, Worker


class Threads:
    """A transport. `mishap(member, finished)` says what happens to a member that has something to say: "lose" it before
    it is heard, "late": it counts as lost, and is heard afterwards.
    """

    def __init__(self, make_hands, mishap=lambda member, finished: None, room=2):
        self.make_hands, self.mishap, self.most = make_hands, mishap, room
        self.workers, self.open, self.late, self.news = {}, [], [], []
        self.stopped, self.handed = [], []
        self.weights = Versions(lambda part, needed: copied(part), lambda part: part)

    def room(self):
        return self.most

    def start(self, member):
        hands = self.make_hands()
        self.workers[member] = Worker(hands)
        self.news.append(Joined(member, About(hands.rows, "here", member)))

    def hand(self, member, work):
        offer = self.weights.offer(work[0][1].version)
        self.handed.append((member, [place for place, _ in work]))
        self.workers[member].start(work, offer.refs)
        self.open.append(member)

    def stop(self, member, handout):
        self.stopped.append(member)
        self.workers[member].stop(handout)

    def kill(self, member):
        worker = self.workers.pop(member)
        worker.hands.stop()
        worker.close()
        self.open = [other for other in self.open if other != member]

    def events(self, seconds):
        found, self.news = self.news, []
        if self.late:
            found.append(self.late.pop(0))
        for member in list(self.open):
            answer = self.workers[member].poll(0.01)
            what = self.mishap(member, answer.finished)
            if what is None:
                found.append(Answered(member, answer))
                if not answer.busy:
                    self.open.remove(member)
                continue
            if what == "late":
                self.late.append(Answered(member, replace(answer, busy=True, error=None)))  # and then no more
            self.kill(member)
            found.append(Lost(member, "a mishap"))
        return found

    def publish(self, version, weights, oldest):
        return self.weights.publish(version, weights, oldest, compare=True)

    def close(self):
        for member in list(self.workers):
            self.kill(member)


def copied(part):
    """The learner's weights change in place."""
    return {name: content.copy() if isinstance(content, np.ndarray) else content for name, content in part.items()}
