"""Students learn from the teacher's rollouts: what is learned, from what, and that a run can be stopped, resumed and
used.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparse_rl.train.held_out
from sparse_rl import Engine, Sampling, SparseRLError
from sparse_rl.beacon import beacon_of, fixed_chunk_ends, random_chunk_ends
from sparse_rl.config import make_recipe
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.learn.batch import collate
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.student import Student, Students, StudentSettings, copied, name_of, sizes_of, teacher_states
from sparse_rl.models import load_model
from sparse_rl.train.loop import Trainer
from sparse_rl.train.run import checkpoint_bytes, plan_run, train
from sparse_rl.train.saving import resume
from tests.helpers.models import prompts_of, tiny

OPTIMIZER = OptimizerSettings(lr=1e-3, weight_decay=0.0)


def rolled(model, new: int = 21):
    return collate(
        Engine(model, "dense", rows=4).generate(prompts_of(5, 9, 3), 2, Sampling(new, stop_ids=(7, 8, 9)), seed=1)
    )


def recipe(**sections):
    base = {
        "model": {"name": "tiny-sums"},
        "task": {"name": "sums", "count": 8},
        "rollout": {"compressor": "dense", "rows": 16, "prompts": 4, "group_size": 4, "max_new_tokens": 72},
        "learn": {"method": "none", "minibatches": 2},
        "optimizer": {"lr": 1e-4, "weight_decay": 0.0},
        "eval": {"every": 2, "prompts": 4},
        "run": {"steps": 4, "checkpoint_every": 2, "samples": 0, "diagnose": 0},
        "student": {"chunks": [4, [2, 8]], "lr": 1e-3},
    }
    return make_recipe({name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})


# ------------------------------------------------------------------------------------------------------------ what is
# learned


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_loss_is_the_kl_of_full_distributions_from_the_teacher(name):
    """Computed again from the distributions a student's own engine-side view gives, sequence by sequence, in fp64."""
    teacher = copy.deepcopy(tiny(name)).double()
    student = Student(teacher, (3,), StudentSettings([3]), OPTIMIZER, seed=0)
    sampled = rolled(copy.deepcopy(tiny(name)))
    rows = torch.arange(len(sampled.lengths))
    prompts = sampled.mask.int().argmax(1)
    fed = student.insert_beacons(sampled.tokens, prompts, sampled.lengths, [0] * len(rows))
    ours = student.kl(fed, teacher_states(teacher, sampled, rows), 0.7)

    theirs, beacon = [], beacon_of(student.model)
    for i in rows.tolist():
        tokens, folded = sampled.tokens[i, : sampled.lengths[i]], fed.tokens[i, : fed.lengths[i]]
        with torch.no_grad():
            whole = (teacher(tokens[None]).logits[0] / 0.7).log_softmax(-1)
            index = torch.arange(len(folded))
            mask = (index[None] <= index[:, None]) & (index[:, None] < fed.evicted_at[i, : len(folded)][None])
            bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
            inputs = {
                "position_ids": beacon.positions(folded)[None],
                "attention_mask": bias[None, None],
                "use_cache": False,
            }
            logits = student.model(folded[None], **inputs).logits[0]
        places = (folded != beacon.id).nonzero()[:, 0]  # of tokens, among what is fed
        for t in range(int(prompts[i]), len(tokens)):
            p, q = whole[t - 1], (logits[places[t - 1]] / 0.7).log_softmax(-1)
            theirs.append((p.exp() * (p - q)).sum())
    torch.testing.assert_close(ours.double(), torch.stack(theirs), atol=1e-6, rtol=1e-5)


def test_only_students_move_and_the_gradient_is_that_of_one_batch():
    """Micro-batches add up, and the teacher gets no gradient from its students."""
    teacher, sampled, steps = copy.deepcopy(tiny("llama")), rolled(tiny("llama")), []
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    for micro_batch_tokens in (10_000, 40):
        students = Students(teacher, StudentSettings([4, [2, 8]], lr=1e-3), OPTIMIZER, micro_batch_tokens)
        metrics = students.learn(teacher, sampled, minibatches=1, step=3)
        steps.append((metrics, [dict(s.model.named_parameters()) for s in students.members]))
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in teacher.named_parameters())
    (first, ours), (second, theirs) = steps
    assert first.keys() == {f"student/{s}/{q}" for s in ("c4", "c2-8") for q in ("kl", "grad_norm")}
    for name, value in first.items():
        assert value == pytest.approx(second[name], rel=1e-4) and value > 0
    for a, b in zip(ours, theirs, strict=True):
        for name, p in a.items():
            assert (
                p - b[name]
            ).abs().mean() < 2e-5  # AdamW's first step is the gradient's sign, which rounding may turn where it is 0
            assert name == "model.embed_tokens.beacon" or p.shape == before[name].shape
        assert (
            a["model.embed_tokens.beacon"]
            - beacon_of(Student(teacher, (4,), StudentSettings([4]), OPTIMIZER, 0).model).beacon
        ).any()


def test_a_step_is_that_of_the_mean_kl_and_warms_up():
    """The gradient's norm computed again; AdamW's first step has the size of the learning rate, of which warm-up takes
    a tenth.
    """
    teacher, sampled = copy.deepcopy(tiny("llama")), rolled(tiny("llama"))
    student_settings = StudentSettings([4], lr=1e-3)
    optimizer = OptimizerSettings(lr=0.5, weight_decay=0.0, warmup_steps=10)
    students = Students(teacher, student_settings, optimizer)
    again = Student(teacher, (4,), student_settings, optimizer, 0)
    rows, prompts = torch.arange(len(sampled.lengths)), sampled.mask.int().argmax(1)
    kl = again.kl(
        again.insert_beacons(sampled.tokens, prompts, sampled.lengths, [0] * len(rows)),
        teacher_states(teacher, sampled, rows),
        1.0,
    )
    assert len(kl) == sampled.mask.sum()
    kl.mean().backward()
    norm = torch.stack([p.grad.norm() for p in again.model.parameters()]).norm().item()
    before = beacon_of(students.members[0].model).beacon.detach().clone()
    metrics = students.learn(teacher, sampled, minibatches=1, step=0)
    assert metrics["student/c4/grad_norm"] == pytest.approx(norm, rel=1e-4) and metrics[
        "student/c4/kl"
    ] == pytest.approx(kl.mean().item())
    moved = (beacon_of(students.members[0].model).beacon.detach() - before).abs()
    assert moved.median().item() == pytest.approx(1e-4, rel=1e-2)


def test_students_learn_what_their_teacher_says():
    teacher, sampled = copy.deepcopy(tiny("llama")), rolled(tiny("llama"))
    students = Students(teacher, StudentSettings([4], lr=3e-3), OPTIMIZER)
    curve = [students.learn(teacher, sampled, minibatches=1, step=i)["student/c4/kl"] for i in range(40)]
    assert curve[-1] < 0.4 * curve[0]


def test_adapters_stand_on_the_teacher_as_it_is():
    teacher, sampled = copy.deepcopy(tiny("llama")), rolled(tiny("llama"))
    students = Students(teacher, StudentSettings([4], lr=1e-3, lora_rank=2), OPTIMIZER)
    (student,) = students.members
    trained = {name for name, p in student.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or name.endswith("beacon") for name in trained) and any(
        name.endswith("beacon") for name in trained
    )
    students.learn(teacher, sampled, 1, 0)
    beacon = beacon_of(student.model).beacon.clone()
    with torch.no_grad():
        for p in teacher.parameters():
            p.add_(0.01)
    students.follow()
    found = dict(student.model.named_parameters())
    for name, p in teacher.named_parameters():
        mine = next(
            q for n, q in found.items() if n.replace("base_model.model.", "").replace(".base_layer", "") == name
        )
        assert torch.equal(mine, p)
    assert torch.equal(beacon_of(student.model).beacon, beacon)
    merged = student.to_save()
    tokens = torch.tensor(prompts_of(9))
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, student.model.eval()(tokens).logits, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(merged(tokens).logits, teacher(tokens).logits, atol=1e-4)


def test_models_with_hooks_are_copied_as_often_as_needed():
    model = copy.deepcopy(tiny("llama"))
    model.enable_input_require_grads()
    for _ in range(3):
        model = copied(model)
    Student(model, (4,), StudentSettings([4], lora_rank=2), OPTIMIZER, 0).to_save()


def test_sizes_are_drawn_for_sequences_or_chunks():
    teacher = tiny("llama")
    tokens = torch.tensor(prompts_of(64)[0])
    found = {}
    for draw in ("sequence", "chunk"):
        student = Student(copy.deepcopy(teacher), (2, 5), StudentSettings([[2, 5]], draw=draw), OPTIMIZER, seed=0)
        found[draw] = []
        for stream in range(30):
            given = (tokens[None], torch.tensor([4]), torch.tensor([64]), [stream])
            fed = student.insert_beacons(*given)
            at = (fed.tokens[0] == beacon_of(student.model).id).nonzero()[:, 0]
            found[draw].append(set((at.diff() - 1).tolist()))
            assert torch.equal(fed.tokens, student.insert_beacons(*given).tokens)
    assert {2} in found["sequence"] and {5} in found["sequence"] and {2, 5} not in found["sequence"]
    assert found["chunk"].count({2, 5}) > 25
    prompts, lengths = torch.tensor([4, 2, 6]), torch.tensor([24, 2, 9])
    assert torch.equal(
        random_chunk_ends((3,), [5, 6, 7], prompts, lengths, 24), fixed_chunk_ends(3, prompts, lengths, 24)
    )


# ------------------------------------------------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("students") / "run"
    train(recipe(), folder, show=False)
    return folder


def test_a_run_says_and_saves_what_its_students_do(finished):
    lines = read_lines(finished / "metrics.jsonl")
    assert sum("student/c4/kl" in line and "student/c2-8/grad_norm" in line for line in lines) == 4
    evaluated = [line for line in lines if "eval/dense/accuracy" in line]
    assert len(evaluated) == 3 and all(f"eval/{n}/accuracy" in evaluated[0] for n in ("c4", "c2-8@2", "c2-8@8"))
    _, path = find_checkpoints(finished / "checkpoints")[-1]
    model, tokenizer = load_model(str(path / "students" / "c2-8"))
    assert beacon_of(model).chunks == (2, 8) and beacon_of(load_model(str(path))[0]) is None
    assert Engine(model, "beacon:8", rows=2).generate([tokenizer.encode("1+2+3")], 1, Sampling(9))
    with pytest.raises(SparseRLError, match="trained with one after every 2 or 8"):
        Engine(model, "beacon:4")


def test_the_teacher_learns_as_if_it_had_no_students(finished, tmp_path):
    train(recipe(student={"chunks": []}), tmp_path / "run", show=False)
    alone, taught = (
        [line for line in read_lines(f / "metrics.jsonl") if "reward/mean" in line]
        for f in (tmp_path / "run", finished)
    )
    for a, b in zip(alone, taught, strict=True):
        assert all(b[name] == value for name, value in a.items())


def test_a_run_with_students_resumes_to_the_bit(finished, tmp_path):
    train(recipe(run={"steps": 2}), tmp_path / "run", show=False)
    train(recipe(), tmp_path / "run", resume=True, show=False)
    ours, theirs = (
        [
            {k: v for k, v in line.items() if k.startswith(("student/", "step"))}
            for line in read_lines(f / "metrics.jsonl")
        ]
        for f in (tmp_path / "run", finished)
    )
    assert [line for line in ours if len(line) > 1] == [line for line in theirs if len(line) > 1]


def test_a_frozen_teacher_stays_as_it_is(tmp_path):
    train(
        recipe(student={"chunks": [4], "freeze_teacher": True, "lora_rank": 2}, eval={"every": 0}),
        tmp_path / "run",
        show=False,
    )
    _, path = find_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    start, end = load_model("tiny-sums")[0].state_dict(), load_model(str(path))[0].state_dict()
    assert all(torch.equal(end[name], tensor) for name, tensor in start.items())
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["student/c4/kl"] < lines[0]["student/c4/kl"]
    assert beacon_of(load_model(str(path / "students" / "c4"))[0]).chunks == (4,)


def test_a_student_goes_on_by_reinforcement_learning(finished, tmp_path):
    """Its rollouts are folded, and learned from as they were fed."""
    _, path = find_checkpoints(finished / "checkpoints")[-1]
    sections = {
        "model": {"name": str(path / "students" / "c4")},
        "rollout": {"compressor": "beacon:4"},
        "student": {"chunks": []},
        "run": {"diagnose": 2, "steps": 2},
    }
    train(recipe(**sections, learn={"method": "shadow"}), tmp_path / "run", show=False)
    line = next(line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line)
    assert line["gap/abs/mean"] < 1e-4 and 0 < line["gap/alpha/p05"] < 0.999
    saved = find_checkpoints(tmp_path / "run" / "checkpoints")[-1][1]
    assert beacon_of(load_model(str(saved))[0]).chunks == (4,)
    with pytest.raises(
        SparseRLError, match=r"has a beacon, so all of its weights must be trained; set model.lora_rank to 0"
    ):
        Trainer(
            recipe(**(sections | {"model": sections["model"] | {"lora_rank": 2}}), learn={"method": "shadow"}),
            tmp_path / "no",
        )
    moving = {"compressor": "beacon:4", "budget": {"min": 4, "max": 8, "target": {"alpha_5": 0.9}}}
    with pytest.raises(SparseRLError, match=r"rollout.budget is adaptive, but beacon has no budget"):
        Trainer(recipe(**(sections | {"rollout": moving}), learn={"method": "shadow"}), tmp_path / "no")
    with pytest.raises(
        SparseRLError, match=r"need the shadow view, but none has the view dense; use learn.method: shadow"
    ):
        recipe(**sections)


def test_refusals():
    for wrong, message in (
        ({"chunks": [1]}, "must be a whole number from 2 on"),
        ({"chunks": [[]]}, "give a list with one entry per student"),
        ({"chunks": [[4, 8], [8, 4]]}, "two students are the same"),
        ({"draw": "token"}, "student.draw is 'token'"),
        ({"position": "left"}, "student.position is 'left'"),
        ({"lr": 0.0}, "student.lr is 0.0"),
        ({"chunks": [], "freeze_teacher": True}, "there is no student"),
    ):
        with pytest.raises(SparseRLError, match=message):
            recipe(student=wrong)
    with pytest.raises(SparseRLError, match="the teacher of students must be an ordinary model"):
        recipe(model={"lora_rank": 4})
    assert name_of(sizes_of([8, 2, 4])) == "c2-4-8" and name_of(sizes_of(16)) == "c16"


def test_the_command_line_trains_students(tmp_path):
    (tmp_path / "r.yaml").write_text(recipe(run={"steps": 1}, eval={"every": 0}).to_yaml())
    command = [
        sys.executable,
        "-c",
        "from sparse_rl.cli import main; main()",
        "train",
        tmp_path / "r.yaml",
        "--out",
        tmp_path / "run",
    ]
    done = subprocess.run([*map(str, command), "--student.chunks", "[16]"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run/checkpoints/step-000001/students/c16/config.json").read_text())
    assert config["sparse_rl_beacon"] == "beacon.safetensors"


def test_the_plan_counts_students():
    given = recipe()
    plan, without = plan_run(given, 40), plan_run(recipe(student={"chunks": []}), 40)
    trainer = Trainer(given, Path("nowhere"), show=False)
    weights = sum(p.nbytes for p in load_model("tiny-sums")[0].parameters())
    assert plan.student_bytes == 2 * 4 * weights and without.student_bytes == 0  # weights, two moments, gradients
    held = sum(p.nbytes for s in trainer.students.members for p in s.model.parameters())
    assert held == pytest.approx(2 * weights, rel=1e-2)  # and a beacon each
    assert plan.total_bytes - without.total_bytes >= plan.student_bytes and "students: weights" in plan.text()
    assert checkpoint_bytes(trainer) == pytest.approx(4 * weights + 2 * 4 * weights, rel=1e-2)


def test_the_view_shows_students(capsys):
    from sparse_rl.train.terminal import TerminalTable

    view = TerminalTable("a run", 5)
    view.show(0, {"eval/dense/accuracy": 0.5, "eval/c2-8@2/accuracy": 0.25})
    view.show(1, {"reward/mean": 0.4, "student/c4/kl": 1.25, "student/c4/grad_norm": 3.0})
    printed = capsys.readouterr().err
    assert "dense 0.500, c2-8@2 0.250" in printed and "c4 KL 1.250" in printed and "grad_norm" not in printed
    assert [column.header for column in view.table().columns][-2:] == ["c2-8@2", "c4 KL"]


# ------------------------------------------------------------------------------------------------------------ the loop
# does what it says


def test_adapters_follow_the_teacher_through_a_run(tmp_path):
    """After a step, and after a resume, a student's weights under its adapters are the teacher's as they are now."""
    given = {"student": {"chunks": [4], "lora_rank": 2}, "eval": {"every": 0}, "optimizer": {"lr": 1e-2}}
    trainer = train(recipe(**given, run={"steps": 2}), tmp_path / "run", show=False)
    again = Trainer(recipe(**given, run={"steps": 2}), tmp_path / "run", show=False)
    resume(again)
    start = load_model("tiny-sums")[0].state_dict()
    for t in (trainer, again):
        weights = dict(t.model.named_parameters())
        assert any((weights[name] - start[name]).abs().max() > 1e-3 for name in weights)
        (student,) = t.students.members
        assert (
            all(torch.equal(mine, theirs) for mine, theirs in student.follows)
            and len(student.follows) == len(weights) + 1
        )


def test_what_students_are_given(tmp_path, monkeypatch):
    """The model that sampled, the run's temperature and lr; beacons that change with step, trajectory and student;
    chunks as named.
    """
    calls, laid, engines = [], [], []
    kl, insert_beacons, fitting = Student.kl, Student.insert_beacons, sparse_rl.train.held_out.fitting_engine
    monkeypatch.setattr(
        Student, "kl", lambda self, fed, teacher, t: calls.append((self, teacher.model, t)) or kl(self, fed, teacher, t)
    )
    monkeypatch.setattr(
        Student, "insert_beacons", lambda self, *a: laid.append((self.name, tuple(a[3]))) or insert_beacons(self, *a)
    )
    monkeypatch.setattr(
        sparse_rl.train.held_out,
        "fitting_engine",
        lambda model, name, *a: engines.append((model, name)) or fitting(model, name, *a),
    )
    at_sampling, learn, generate = [], Students.learn, Engine.generate

    def weights(model):
        return [p.detach().clone() for p in model.parameters()]

    def sampling(self, *a, **k):
        at_sampling.append((self.model, weights(self.model)))
        return generate(self, *a, **k)

    def learning(self, teacher, *a):
        sampled_by = [before for model, before in at_sampling if model is teacher][-1]
        assert all(map(torch.equal, weights(teacher), sampled_by))  # its update comes after its students'
        return learn(self, teacher, *a)

    monkeypatch.setattr(Engine, "generate", sampling)
    monkeypatch.setattr(Students, "learn", learning)
    trainer = train(recipe(rollout={"temperature": 0.7}, run={"steps": 2}), tmp_path / "run", show=False)
    assert not all(map(torch.equal, weights(trainer.model), at_sampling[0][1]))
    assert {t for *_, t in calls} == {0.7} and {id(model) for _, model, _ in calls} == {id(trainer.model)}
    assert (
        all(student.optimizer.settings.lr == 1e-3 for student, *_ in calls)
        and trainer.learner.optimizer.settings.lr == 1e-4
    )
    streams = [stream for _, several in laid for stream in several]
    assert len(set(streams)) == len(streams) > 60  # of 16 trajectories, 2 steps, 2 students
    by_model = {id(s.model): s.name for s in trainer.students.members}
    assert {(by_model[id(m)], name) for m, name in engines if id(m) in by_model} == {
        ("c4", "beacon:4"),
        ("c2-8", "beacon:2"),
        ("c2-8", "beacon:8"),
    }


def test_a_student_that_diverges_stops_the_run_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(Student, "kl", lambda self, *a: self.model.lm_head.weight.sum() * float("nan"))
    with pytest.raises(
        SparseRLError, match=r"3 steps in a row of the student c4 had a KL \(nan\) .* lower student.lr \(now 0.001\)"
    ):
        train(recipe(eval={"every": 0}, run={"max_skipped": 3}), tmp_path / "run", show=False)


def test_a_step_that_is_refused_leaves_no_students_ahead_of_it(tmp_path, monkeypatch):
    """The teacher's update of step 2 fails when its students have learned already: the checkpoint is not of that
    moment.
    """
    step, calls = Learner.step, []

    def failing(self, batch, check):
        calls.append(1)
        if len(calls) == 3:
            raise SparseRLError("no more")
        return step(self, batch, check)

    monkeypatch.setattr(Learner, "step", failing)
    given = dict(run={"steps": 3, "checkpoint_every": 1}, eval={"every": 0})
    with pytest.raises(SparseRLError, match="no more"):
        train(recipe(**given), tmp_path / "run", show=False)
    monkeypatch.undo()
    resumed = train(recipe(**given), tmp_path / "run", resume=True, show=False)
    straight = train(recipe(**given), tmp_path / "straight", show=False)
    for mine, theirs in zip(resumed.students.members, straight.students.members, strict=True):
        assert mine.version == theirs.version == 6
        assert all(torch.equal(a, b) for a, b in zip(mine.model.parameters(), theirs.model.parameters(), strict=True))


def test_distillation_between_views_is_refused_with_beacons():
    with pytest.raises(SparseRLError, match=r"rollouts with beacons have no dense view; use learn.method: shadow"):
        recipe(student={"chunks": []}, rollout={"compressor": "beacon:4"}, learn={"method": "smd"})
