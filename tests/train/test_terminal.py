"""The live view of a run: samplers of a pool below the table of steps."""

import io
import threading

from rich.console import Console

from sparse_rl.pool.standing import Standing, Standings
from sparse_rl.train.terminal import TerminalTable, samplers_table


def text_of(renderable) -> str:
    out = io.StringIO()
    Console(file=out, width=140, color_system=None).print(renderable)
    return out.getvalue()


def standings(count=3, **changes):
    members = [Standing(i, "gpu7 [red]" if i else "gpu7", 10 + i, 2, 5000 * i, 5.0 * bool(i)) for i in range(count)]
    return Standings(members, {"gpu7": 4, "gpu9": 3}, **{"done": 12, "asked": 64, **changes})


def test_samplers_are_shown_with_what_they_do():
    shown = text_of(samplers_table(standings()))
    assert "3 samplers: pieces 12 of 64" in shown and "3 lost on nodes that are gone" in shown
    first, second = (line.split() for line in shown.splitlines() if "gpu7" in line and ("10 " in line or "11 " in line))
    assert [cell for cell in first if cell != "│"] == ["0", "gpu7", "10", "2", "4"]  # it has not worked yet
    assert [cell for cell in second if cell != "│"] == ["1", "gpu7", "[red]", "11", "2", "1,000", "0"]
    assert "nothing is asked for" in text_of(samplers_table(standings(done=0, asked=0)))


def test_of_many_samplers_the_rest_is_summed():
    shown = text_of(samplers_table(standings(count=12)))
    (rest,) = (line for line in shown.splitlines() if "4 more" in line)
    assert [cell for cell in rest.split() if cell != "│"] == ["4", "more", str(18 + 19 + 20 + 21), "8", "38,000"]


def test_several_threads_may_show_at_the_same_time(monkeypatch):
    """Steps are shown by the run, samplers by whoever drives the pool."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    table = TerminalTable("mine", 400)
    assert table.live is not None
    drawn, failed = [], []
    monkeypatch.setattr(table.live, "update", drawn.append)

    def watch():
        try:
            for _ in range(50):
                table.show_samplers(standings())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    for step in range(50):
        table.show(step, {"reward/mean": 0.5, "pool/samplers/count": 3.0, "pool/lost/count": 7.0, f"x/{step}": 1.0})
    thread.join()
    shown = text_of(drawn[-1])
    assert not failed and len(drawn) == 100 and "3 samplers" in shown and "lost" in table.columns()
    assert table.cells(table.rows[49])["samplers"] == "3" and table.cells(table.rows[49])["lost"] == "7"
