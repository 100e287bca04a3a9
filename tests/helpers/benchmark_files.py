r"""Files of the published form of every benchmark."""

from sparse_rl.tasks.benchmarks import SOURCES
from tests.helpers.rows import write

ROWS = {
    "gsm8k": ({"question": "Eggs?", "answer": "16 - 3 = <<16-3=13>>13\n#### 1,013", "idx": 0}, "Eggs?", "1,013"),
    "math500": ({"problem": "Half?", "solution": "...", "answer": "\\frac{1}{2}"}, "Half?", "\\frac{1}{2}"),
    "gaokao2023en": ({"question": "Area?", "lang": "en", "answer": "20 $cm^{2}$"}, "Area?", "20 $cm^{2}$"),
    "minerva": (
        {"problem": "Size?", "solution": "s = \\boxed{2} or rather $\\boxed{1.6} \\mathrm{~cm}$", "idx": 0},
        "Size?",
        "1.6",
    ),
    "olympiadbench": (
        {"question": "Both?", "context": None, "final_answer": ["$1$,$2$"], "unit": None},
        "Both?",
        "$1$,$2$",
    ),
    "aime24": ({"problem": "N?", "answer": "025"}, "N?", "025"),
    "amc23": ({"problem": "M?", "answer": 27.0}, "M?", "27"),
}


STRING_ONLY = [
    r"$\{x|x=3k,k\in \mathbb{Z}\}$",
    r"$f(x)=a x+b$, where $b$ is an arbitrary integer, and $a$ is an arbitrary positive integer with $\mho(a)=0$",
]


def files(folder, count=None):
    """Files of the published form: all rows of a benchmark, or `count`."""
    for source in SOURCES:
        row, _, _ = ROWS[source.name]
        some = [{**row, source.question: f"{i}: {row[source.question]}"} for i in range(count or source.rows)]
        write(folder / source.file, some)
    return folder
