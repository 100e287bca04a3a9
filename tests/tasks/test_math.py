r"""The maths task: which answers are equal, what is in a box, which rows are used; comparisons may hang harmlessly."""

import json
import random
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import Grade, Prompt, make
from sparse_rl.tasks import equality as equality_module
from sparse_rl.tasks.equality import last_boxed, verdict
from tests.helpers.rows import write

RIGHT, WRONG, NOTHING = Grade(1.0, "right"), Grade(0.0, "wrong"), Grade(0.0, "no answer")

EQUAL = [
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    ("0.5", r"\frac12"),
    (r"\dfrac{3}{4}", r"\frac{6}{8}"),
    (r"\frac{\pi}{2}", r"\frac\pi2"),
    (r"\frac{1}{3}", "0.333333"),
    ("2^{10}", "1024"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("2x+3t", "3t + 2x"),  # t is not a unit here
    ("a + b + c", "c+b+a"),
    ("10,000", "10000"),
    (r"29,\!322", "29322"),
    ("1{,}234", "1234"),
    ("27", "27."),
    ("-1./3", "-1/3"),
    ("4.5e33", r"4.5 \times 10^{33}"),
    ("1e-5", "0.00001"),
    (r"\{1,2\}", r"\{2, 1\}"),
    (r"12\text{ and }13", "13, 12"),
    ("$69$,$84$", "84, 69"),
    ("(1,2)", r"\left( 1, 2 \right)"),
    ("[2,3)", r"\left[2, 3\right)"),
    (r"(-\infty, 3) \cup (3, \infty)", r"(-\infty,3)\cup(3,\infty)"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("50\\%", "50"),
    ("50", "50\\%"),
    ("50\\%", "0.5"),
    (r"90^\circ", "90"),
    (r"5\text{ cm}", "5"),
    ("5", r"5 \text{ cm}"),
    (r"2400 \mbox{ cm}^2", "2400"),
    (r"\$32", "32"),
    ("32", r"\$32.00"),
    (r"\approx 8.24 \text{ mph}", "8.24"),
    (r"\text{Friday}", "Friday"),
    ("Friday", r"\text{ friday.}"),
    (r"\text{no solution}", "No solution"),
    (r"\text{(C)}", "C"),
    (r"\text{(E)},", "E"),
    (r"7\text{ hours}.", "7"),
    (r"\frac{5}{3}", r"\frac{5}{3}\,."),
    ("(C)", "C"),
    ("C", r"\textbf{(C)}"),
    (r"\text{A,C}", "C, A"),
    (r"\text{ACF}", "A, C, F"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 2 \end{pmatrix}"),
]

DIFFERENT = [
    (r"\frac{1}{2}", "2"),
    (r"\frac{1}{3}", "0.33"),
    ("12", "1 2"),
    ("12", "-12"),
    ("12", "012345"),
    ("7", "7 or 8"),
    ("7", "garbage 7"),
    (r"\{1,2\}", r"\{1,3\}"),
    (r"\{1,2\}", r"\{1\}"),
    ("(1,2)", "(2,1)"),
    ("[2,3)", "(2,3)"),
    ("2x+3t", "2x+4t"),
    ("50\\%", "5"),
    ("111", r"111, \! 111"),
    (r"\text{Friday}", "Monday"),
    ("Friday", "diFray"),  # as a product of letters it would be equal
    (r"\text{odd}", "ddo"),
    (r"\text{(C)}", "D"),
    ("(C)", "(D)"),
    ("A,C", "A,D"),
    ("5", r"\text{five}"),
    ("5", "5" * 5000),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
]


@pytest.mark.parametrize("gold, answer", EQUAL)
def test_equal(gold, answer):
    assert verdict(gold, answer) == "right"


@pytest.mark.parametrize("gold, answer", DIFFERENT)
def test_different(gold, answer):
    assert verdict(gold, answer) == "wrong"


def test_a_reference_that_cannot_be_read_is_told():
    gold = r"\begin{pmatrix} 1 & -1 \\ 1 & \phantom -1 \end{pmatrix}"
    assert verdict(gold, "3") == "bad gold"
    assert verdict(gold, gold.replace(" ", "")) == "right"  # an equal string is equal all the same
    task = make("math", files=None)
    assert task.judge(Prompt("", gold), r"\boxed{3}") == Grade(0.0, "bad gold")


def test_missing_math_verify_is_told(monkeypatch):
    equality_module._math_verify.cache_clear()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(SparseRLError, match="pip install 'math-verify"):
        equality_module._math_verify()


@pytest.mark.parametrize(
    "text, content",
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} then \boxed{2", "1"),  # cut off: the last that is closed
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),  # escaped braces need no partner
        (r"} { \boxed{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{5\\}", r"5\\"),
        (r"\\\boxed{5}", "5"),  # a line break, then a box
        (r"\\boxed{5}", None),  # a line break, then a word
        (r"\boxed 5", None),
        (r"\boxed{" * 3, None),
        ("5", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_closed_box(text, content):
    assert last_boxed(text) == content


BALANCED = st.recursive(
    st.text(alphabet="ab1 +-^_", max_size=5) | st.sampled_from([r"\{", r"\}", r"\\", r"\frac"]),
    lambda inner: st.lists(inner, max_size=3).map("".join) | inner.map(lambda s: "{" + s + "}"),
    max_leaves=8,
)


@given(BALANCED, st.text(alphabet="a{} \n", max_size=30), st.text(alphabet="a{ \n", max_size=10))
def test_a_box_is_found_whatever_surrounds_it(content, before, after):
    assert last_boxed(before + r"\boxed{" + content + "}" + after) == content


@given(st.lists(st.sampled_from([r"\boxed{", "{", "}", "\\", "7", r"\{", " "]), max_size=12).map("".join))
def test_what_is_sent_to_the_graders_is_graded_like_the_whole(text):
    task, prompt = make("math", files=None), Prompt("", "7")
    assert task.judge(prompt, task.excerpt(text)) == task.judge(prompt, text)


def problems(count, first=0):
    return [{"prompt": f"What is {i} + 1?", "label": str(i + 1)} for i in range(first, first + count)]


def test_rows_of_every_shape(tmp_path):
    shapes = [
        (dict(prompt="q", answer="a"), {"q": "two?", "a": "He has 1 + 1 = <<1+1=2>>2.\n#### 2"}, "two?", "2"),
        (dict(prompt="q", answer="a"), {"q": "two?", "a": "#### 1,234"}, "two?", "1,234"),
        (dict(answer="final"), {"prompt": "two?", "final": ["2"]}, "two?", "2"),
        (dict(answer="final"), {"prompt": "two?", "final": ["$1$", "$3$"]}, "two?", "$1$,$3$"),
        (dict(), {"prompt": "two?", "label": 27.0}, "two?", "27"),
        (dict(), {"prompt": "two?", "label": 2.5}, "two?", "2.5"),
        (dict(), {"prompt": "two?", "label": -3}, "two?", "-3"),
        (dict(), {"prompt": "two?", "label": r"so $\boxed{1}$, no, $\boxed{\frac{1}{2}}$ cm."}, "two?", r"\frac{1}{2}"),
        (dict(answer="s", answer_in_box=True), {"prompt": "two?", "s": r"thus \boxed{4}."}, "two?", "4"),
        (dict(suffix=" Think."), {"prompt": "two?", "label": "2"}, "two? Think.", "2"),
        (
            dict(suffix=" Think.", chat=True),
            {"prompt": "two?", "label": "2"},
            [{"role": "user", "content": "two? Think."}],
            "2",
        ),
    ]
    for options, row, text, answer in shapes:
        task = make("math", files=write(tmp_path / "rows.jsonl", [row]), **options)
        assert (task[0].text, task[0].answer, len(task), task.num_prompts) == (text, answer, 1, 1), row
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two?"}]
    rows = [{"prompt": messages, "label": "2"}]
    assert make("math", files=write(tmp_path / "chat.jsonl", rows))[0].text == messages
    assert (
        make("math", files=write(tmp_path / "chat.jsonl", rows), suffix="!", chat=True)[0].text[-1]["content"]
        == "two?!"
    )
    bom = tmp_path / "bom.jsonl"
    bom.write_bytes(b"\xef\xbb\xbf" + json.dumps(rows[0]).encode() + b"\n\n\n")
    assert len(make("math", files=bom)) == 1


HALF = "holds half of a surrogate pair, which is not text"
BAD = [
    ('{"prompt": "cut off', "not JSON"),
    ("[1, 2]", "not an object"),
    ({"prompt": "no answer"}, "no field 'label'"),
    ({"label": "1"}, "no field 'prompt'"),
    ({"prompt": "", "label": "1"}, "prompt is empty"),
    ({"prompt": 3, "label": "1"}, "prompt is int, not text"),
    ({"prompt": [], "label": "1"}, "prompt is not a list of chat messages"),
    ({"prompt": [{"role": "user"}], "label": "1"}, "prompt is not a list of chat messages"),
    ({"prompt": "x", "label": ""}, "label is empty"),
    ({"prompt": "x", "label": " $$ "}, "label is empty"),
    ({"prompt": "x", "label": []}, "label is empty"),
    ({"prompt": "x", "label": "because ####"}, "label is empty"),
    ({"prompt": "x", "label": None}, "label is NoneType, not text or a number"),
    ({"prompt": "x", "label": True}, "label is bool, not text or a number"),
    ({"prompt": "x", "label": float("nan")}, "label is not finite"),
    ({"prompt": "x", "label": r"\boxed{1"}, r"label has no closed \boxed{}"),
    ({"prompt": "\ud800", "label": "1"}, f"prompt {HALF}"),
    ({"prompt": [{"role": "user", "content": "\udc00x"}], "label": "1"}, f"prompt {HALF}"),
    ({"prompt": "x", "label": ["1", "\ud83d"]}, f"label {HALF}"),
]


def test_unusable_rows_are_skipped_counted_and_named(tmp_path):
    good = problems(200)
    rows = [*good[:100], *(row for row, _ in BAD), *good[100:]]
    task = make("math", files=write(tmp_path / "rows.jsonl", rows))
    expected = {}
    for _, reason in BAD:
        expected[reason] = expected.get(reason, 0) + 1
    assert task.skipped == expected and task.skipped["label is empty"] == 4
    assert task.skipped_rows == [f"rows.jsonl:{101 + k} ({reason})" for k, (_, reason) in enumerate(BAD[:5])]
    assert len(task) == 200 and {p.text for p in task.sample(0, 200)} == {row["prompt"] for row in good}
    (tmp_path / "latin.jsonl").write_bytes(
        b'{"prompt": "\xe9", "label": "1"}\n' + "\n".join(map(json.dumps, good)).encode()
    )
    assert make("math", files=tmp_path / "latin.jsonl").skipped == {"not JSON": 1}
    paired = '{"prompt": "\\ud83d\\ude00", "label": "1", "other": "\\ud800"}'  # other fields do not matter
    assert make("math", files=write(tmp_path / "paired.jsonl", [paired]))[0].text == "\N{GRINNING FACE}"


def test_files_that_cannot_be_used_are_refused(tmp_path):
    good, empty = problems(18), {"prompt": "x", "label": ""}
    path = write(tmp_path / "rows.jsonl", [*good, empty, empty])
    assert make("math", files=path).skipped == {"label is empty": 2}  # a tenth
    for rows, options, message in [
        ([*good, empty, empty, empty], {}, r"3 of 21 rows cannot be used \(label is empty: 3\)"),
        (
            good,
            dict(answer="lable"),
            r"18 of 18 rows cannot be used \(no field 'lable': 18\); its rows have the fields prompt, label;",
        ),
        ([], {}, "has no rows; give one JSON object per line, or a table"),
        (["nonsense"], {}, r"1 of 1 rows cannot be used \(not JSON: 1\); each line must be one JSON object"),
        (good, dict(split="test"), "split is 'test'"),
        (good, dict(holdout=18), "holdout 18 leaves none of 18 usable rows"),
        (good, dict(holdout=-1), "holdout is -1"),
        (good, dict(split="held-out"), "holdout is 0, so none of the 18 problems is held out"),
        (good, dict(ansewr="label"), "the task math has no option 'ansewr'; did you mean 'answer'"),
        (good, dict(deadline=0), "deadline is 0"),
        (good, dict(workers=0), "workers is 0"),
    ]:
        with pytest.raises(SparseRLError, match=message):
            make("math", files=write(tmp_path / "bad.jsonl", rows), **options)
    for files, message in [
        (str(tmp_path / "none.jsonl"), "there is no file .*none.jsonl"),
        ([], "files is empty"),
        ([path, "none"], "there is no"),
    ]:
        with pytest.raises(SparseRLError, match=message):
            make("math", files=files)
    with pytest.raises(SparseRLError, match="the task math needs the option 'files'"):
        make("math")


def test_every_epoch_is_a_new_order_and_any_position_can_be_resumed(tmp_path):
    files = [write(tmp_path / "a.jsonl", problems(20)), write(tmp_path / "b.jsonl", problems(17, first=20))]
    task, again = make("math", files=files), make("math", files=files)
    seen = [p.text for p in task.sample(0, 37 * 3)]
    epochs = [seen[e * 37 : (e + 1) * 37] for e in range(3)]
    assert all(sorted(epoch) == sorted(p["prompt"] for p in problems(37)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
    assert [p.text for p in again.sample(30, 50)] == seen[30:80]
    assert [p.text for p in make("math", files=files, seed=1).sample(0, 37)] != epochs[0]
    assert all(task[p.index] == p for p in task.sample(0, 37))


def test_held_out_problems_are_never_trained_on(tmp_path):
    rows = problems(50)
    path = write(tmp_path / "rows.jsonl", [*rows, *rows[:25]])  # half of them twice
    task = make("math", files=path, holdout=30)
    held_out = task.held_out()
    trained, held = {p.text for p in task.sample(0, 500)}, {p.text for p in held_out.sample(0, 500)}
    assert len(held_out) == held_out.num_prompts == 30 and len({p.index for p in held_out.sample(0, 30)}) == 30
    assert not trained & held and trained | held == {row["prompt"] for row in rows}
    assert make("math", files=path, holdout=30, split="held-out").sample(0, 30) == held_out.sample(0, 30)
    assert {p.text for p in make("math", files=path, holdout=30, seed=1).held_out().sample(0, 30)} != held
    assert make("math", files=path, holdout=30).held_out().sample(0, 30) == held_out.sample(0, 30)
    with pytest.raises(SparseRLError, match="holdout is 0, so none of the 75 problems is held out"):
        make("math", files=path).held_out()
    everything = make("math", files=path, holdout="all")
    assert len(everything.held_out()) == 75 and len(everything) == 0
    with pytest.raises(SparseRLError, match="the task math has no prompts"):
        everything.sample(0, 1)


def test_grading_in_order_with_a_comparison_that_hangs(tmp_path, impatient):
    """10^{10^{10}} really hangs sympy; equal answers of a group cost one deadline, and the pool goes on."""
    task = make("math", files=write(tmp_path / "rows.jsonl", problems(200)), deadline=60, workers=2, holdout=10)
    impatient(1, lambda _, text: "10^{10^{10}}" in text)
    prompts = [task[i] for i in range(60)]
    draw, texts, expected = random.Random(0), [], []
    for prompt in prompts:
        text, grade = draw.choice(
            [
                (f"so \\boxed{{{prompt.answer}.0}}", RIGHT),
                (f"\\boxed{{1}} hence $\\boxed{{\\frac{{{2 * int(prompt.answer)}}}{{2}}}}$.", RIGHT),
                (f"\\boxed{{{prompt.answer}}} no, \\boxed{{x^2}}", WRONG),
                (f"it is {prompt.answer}", NOTHING),
                (r"\boxed{ }", NOTHING),
                (r"the prompt said \boxed{{}}", NOTHING),
            ]
        )
        texts.append("word " * 4000 + text + " word" * 10)
        expected.append(grade)
    hanging = [7, 8, 9, 10]
    for i in hanging:
        prompts[i], texts[i], expected[i] = prompts[7], r"\boxed{10^{10^{10}}}", Grade(0.0, "timeout")
    assert len({grade.verdict for grade in expected}) == 4
    assert task.grade(prompts, texts) == expected
    assert task.held_out()._pool is task._pool  # the same processes serve both
    assert task.grade(prompts[20:], texts[20:]) == expected[20:] and task.last_error is None
    task.close()


def test_what_to_install_is_told_by_the_grading_processes(tmp_path, monkeypatch):
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "math_verify.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(tmp_path / "stub")
    task = make("math", files=write(tmp_path / "rows.jsonl", problems(3)), workers=1)
    with pytest.raises(SparseRLError, match=re.escape("needs math-verify (not here); pip install 'math-verify")):
        task.grade([task[0]], [r"\boxed{9}"])


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("p - q", "p+q"),
        ("xy", "x+y"),
        ("xy", "x-y"),
        ("x", "-x"),
        ("i", "-i"),
        ("n", "n!"),
        ("ab", "a/b"),
        ("mn", "m^n"),
        ("x", "2x"),
    ],
)
def test_algebra_in_letters_is_not_compared_as_words(gold, answer):
    assert verdict(gold, answer) != "right" and verdict(gold, gold) == "right"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("(C)", "C"),
        ("Friday", r"\text{Friday}"),
        ("A, C", r"\text{A, C}"),
        (r"\text{even}", "even"),
        (r"\text{two lines}", r"\text{two\ lines}"),
        (r"\text{two lines}", r"\mathrm{two~lines}"),
        ("B, C", r"\text{b,} \text{c}"),
        (r"\text{Tuesday}", r"\text{(Tuesday)}"),
        (r"\text{Tuesday}", r'\text{"tuesday"}'),
        (r"\text{A}", r"{\text{a}}"),
        (r"\text{no solution}", r"\text{No}\ \text{solution}"),
    ],
)
def test_words_are_still_compared_as_words(gold, answer):
    assert verdict(gold, answer) == "right"
