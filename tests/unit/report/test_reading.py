"""The report of a run's folder in any state, and the live page: its visitors, its news, and how it stops."""

import http.client
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.run_folders import RECIPE, end_line, epoch_line, start_line, step_line, times_line, write_lines, write_run

from hoploom import ConfigError
from hoploom.report.page import as_html, encoded
from hoploom.report.reading import RunReader
from hoploom.report.runs import MOST, run_page, thinned
from hoploom.report.watch import LivePage


def shown(*folders: Path) -> str:
    return run_page([RunReader(folder) for folder in folders]).markup()


def test_a_finished_run_is_shown_with_its_results(tmp_path: Path) -> None:
    page = run_page([RunReader(write_run(tmp_path / "papers"))])
    text = page.markup()
    assert page.title == "papers"
    assert page.subtitle.startswith("node-classification with sage on graph.store · 60.0 s")
    for expected in ("0.7500", "validation, epoch 3", "0.7000", "5,000", "1,234", "finished", "node7", "torch 2.13.0"):
        assert expected in text
    assert [chart.key for chart in page.charts] == ["loss", "metric accuracy", "speed", "memory"]
    assert "Warnings" not in text


def test_every_metric_of_the_test_split_is_shown_beside_the_validation_of_the_best_epoch(tmp_path: Path) -> None:
    epochs = [epoch_line(1, f1=0.25), epoch_line(2, f1=0.5), epoch_line(3, f1=0.125)]
    result = {"monitor": "f1", "best": 0.5, "best_epoch": 2, "test": {"accuracy": 0.7, "f1": 0.45, "loss": 0.75}}
    run, other = (write_run(tmp_path / name, epochs=epochs, result=result) for name in ("run", "other"))
    row = "<td>{}</td>" + '<td class="n">{}</td>' * 2
    for cells in ("accuracy", "0.7000", "0.6667"), ("f1", "0.4500", "0.5000"), ("loss", "0.7500", "0.5000"):
        assert row.format(*cells) in shown(run)
    assert row.format("f1", "0.4500", "0.4500") in shown(run, other)


def test_links_that_rank_have_a_bar_for_each_span_of_ranks(tmp_path: Path) -> None:
    ranks = {"ranks/1": 30.0, "ranks/3": 1200.0, "ranks/65536": 7.0}
    result = {"monitor": "mrr", "best": 0.5, "best_epoch": 2, "test": {"mrr": 0.45, **ranks}}
    run = write_run(tmp_path / "run", result=result)
    card = shown(run).partition("<h2>Ranks of links</h2>")[2].partition("</section>")[0]
    assert "of the test split" in card
    bars = dict(re.findall(r"<span>rank ([^<]*)</span>.*?<b>([\d,]*)</b>", card))
    assert len(bars) == 18
    assert {name: count for name, count in bars.items() if count != "0"} == {
        "1": "30", "3 to 4": "1,200", "65,536 or more": "7"
    }  # fmt: skip
    assert "ranks/" not in shown(run)
    going_on = write_run(tmp_path / "going_on", epochs=[epoch_line(1, **ranks)], result={})
    assert "Each link of the validation split" in shown(going_on)
    for others in ([run, going_on], [write_run(tmp_path / "nodes")]):
        assert "Ranks of links" not in shown(*others)


def test_the_ten_relations_with_the_lowest_mrr_of_the_best_epoch_are_shown(tmp_path: Path) -> None:
    def of_relations(mrr: list[float]) -> dict[str, float]:
        numbered = list(enumerate(mrr))
        return {f"relations/{n}/mrr": value for n, value in numbered} | {
            f"relations/{n}/links": 1000 + n for n, _ in numbered
        }

    mrr = [0.5, 0.25, 0.75, *(0.3 + number / 100 for number in range(3, 12))]
    epochs = [epoch_line(1, **of_relations(mrr)), epoch_line(2, **of_relations([0.9] * 12))]
    result = {"monitor": "mrr", "best": 0.5, "best_epoch": 1}
    run = write_run(tmp_path / "run", epochs=epochs, result=result)
    card = shown(run).partition("<h2>Worst relations</h2>")[2].partition("</section>")[0]
    assert "lowest MRR of 12 relations" in card
    row = '<td>([^<]*)</td><td class="n">([^<]*)</td><td class="n">([^<]*)</td>'
    worst = sorted(range(12), key=mrr.__getitem__)[:10]
    assert re.findall(row, card) == [(str(number), f"{1000 + number:,}", f"{mrr[number]:.4f}") for number in worst]
    assert "relations/" not in shown(run)
    for others in ([run, run], [write_run(tmp_path / "nodes")]):
        assert "Worst relations" not in shown(*others)


def test_an_axis_of_epochs_has_the_steps_of_each_run(tmp_path: Path) -> None:
    told = write_run(tmp_path / "told", events=[start_line() | {"steps_per_epoch": 15}, end_line()])
    runs = [told, write_run(tmp_path / "validated"), write_run(tmp_path / "neither", epochs=[])]
    assert run_page([RunReader(run) for run in runs]).figures()["perEpoch"] == [15, 10, 0]


def test_the_parts_of_a_step_and_the_rest_make_the_step(tmp_path: Path) -> None:
    text = shown(write_run(tmp_path))
    for expected in ("wait for the batch", "1.00 ms", "8.00 ms", "3.00 ms", "20.00 ms"):  # the rest is 20-1-8-6-2
        assert expected in text
    assert "all-reduce" not in text  # one rank: it is absent, not zero


def test_network_and_disk_have_columns_where_a_rank_used_them(tmp_path: Path) -> None:
    sent = {"requests": 20, "bytes_received": 5e6, "wait_seconds": 0.07}
    lines = [times_line(10, traffic=sent, disk={"read_bytes": 1e7, "faults": 5}), times_line(20, disk={"faults": 0})]
    text = shown(write_run(tmp_path, times=lines))
    names = ("requests", "received", "wait for servers", "read from disk", "faults that read")
    values = ("1.0", "250 kB", "3.50 ms", "500 kB", "0.2")  # a step, of 20
    for expected in (*(f">{name}<" for name in names), *(f">{value}<" for value in values)):
        assert expected in text
    idle = shown(write_run(tmp_path, times=[times_line(10, disk={"read_bytes": 0, "faults": 0})]))
    assert not any(f">{name}<" in idle for name in names)


def test_many_ranks_have_one_bar_that_says_of_how_many_it_is_the_mean(tmp_path: Path) -> None:
    for num_ranks, bars in ((16, 16), (17, 1)):
        folder = write_run(tmp_path / str(num_ranks), events=[start_line(num_ranks=num_ranks), end_line()])
        for rank in range(num_ranks):
            seconds = {"step": 0.2 * (rank + 1), "wait": 0.1 * (rank + 1)}
            write_lines(folder / f"times-rank{rank}.jsonl", [times_line(30, seconds=seconds)])
        text = shown(folder).partition("Where the time of a step goes")[2].partition("</section>")[0]
        assert text.count('class="bar"') == bars
    assert "mean of 17 ranks" in text
    assert "180.00 ms" in text  # the mean of 20, 40, .. 340


def test_a_run_that_waits_for_its_batches_is_told_once_it_has_settled(tmp_path: Path) -> None:
    for num_steps, is_told in ((30, False), (100, True)):
        waits = [times_line(num_steps, seconds={"step": 0.2, "wait": 0.1})]
        text = shown(write_run(tmp_path / str(num_steps), num_steps, times=waits))
        assert ("wait for their batch 50 % of the time: raise loader.threads" in text) == is_told


def test_a_run_that_waits_for_its_disk_is_not_told_to_take_more_threads(tmp_path: Path) -> None:
    reads = {"bytes": 4e8, "wanted_bytes": 1e8, "asked": 1000, "found": 250, "seconds": 0.3, "busy_seconds": 0.18}
    folder = write_run(tmp_path, 100, events=[start_line(num_ranks=2) | {"threads": 2}, end_line()])
    for rank, busy in ((0, 0.18), (1, 0.1)):  # of 0.2 seconds, of which half is waited
        seconds, loader = {"step": 0.2, "wait": 0.1}, {"sample": 0.03, "fetch": 0.3, "gather": 0.02}
        line = times_line(100, seconds=seconds, loader=loader, reads=reads | {"busy_seconds": busy})
        write_lines(folder / f"times-rank{rank}.jsonl", [line])
    text = shown(folder)
    card = text.partition(">The disk<")[2].partition("</section>")[0]
    for expected in ("rank 0", "rank 1", "40.0 MB", "25.0 %", "90.0 %", "50.0 %", "disk"):
        assert expected in card
    assert "wait for their batch 50 % of the time, and for the disk, which is busy 70 % of it" in text
    assert "raise loader.threads" not in text
    assert "disk 70 % busy" in text  # among the results


def test_what_runs_of_one_step_or_none_and_without_validation_lack_is_said(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", 1, result=None, times=[times_line(1)])
    assert "validation yet" not in shown(one)  # it has ended
    none = write_run(tmp_path / "none", 0, result=None)
    assert "It ended before its first step." in shown(none)
    for run in (one, none):
        (run / "events.jsonl").unlink()
    assert "There is no validation yet" in shown(one)
    assert "No step is written down yet." in shown(none)


def test_a_killed_run_with_a_torn_line_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 12, result=None, events=[start_line()])
    with (folder / "steps-rank0.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    run = RunReader(folder)
    assert (run.num_steps, run.state) == (12, "running")
    assert "Left out: 1 line of its files" in shown(folder)
    long_ago = run.written_at - 1e6
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert "It has written nothing for " in shown(folder)
    assert run.state == "silent"


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    lines = (folder / "steps-rank0.jsonl").read_text().splitlines()
    (folder / "steps-rank0.jsonl").write_text("\n".join([*lines[:5], "[3]", "nonsense", "{}", *lines[5:], ""]))
    for name in ("times-rank0.jsonl", "metrics.jsonl"):
        with (folder / name).open("a") as file:
            file.write("{}\n")
    run = RunReader(folder)
    assert (run.num_steps, run.num_broken) == (30, 5)
    assert "Left out: 5 lines of its files" in shown(folder)


def test_a_resumed_and_a_failed_run_say_so(tmp_path: Path) -> None:
    failed = end_line(1160.0, stopped=None, error="TrainError: the loss is nan")
    events = [start_line(), start_line(10, at=1100.0), failed]
    text = shown(write_run(tmp_path, result=None, events=events))
    assert "It was resumed at step 10." in text
    assert "TrainError: the loss is nan" in text
    assert "failed" in text


def test_losses_that_are_not_finite_are_gaps_and_said(tmp_path: Path) -> None:
    steps = [step_line(step, loss=None if step in (4, 5) else 1.0) for step in range(1, 11)]
    page = run_page([RunReader(write_run(tmp_path, 10, steps=steps))])
    assert "The loss of 2 steps is not a number, first at step 4" in page.markup()
    assert page.charts[0].curves[0].y[2:6] == [1.0, None, None, 1.0]


def test_a_folder_without_times_and_events_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    text = shown(write_run(tmp_path, times=None, events=None))
    assert "has no events.jsonl" in text
    assert "1.00 ms" in text  # the wait; all else is one part
    assert "19.00 ms" in text


def test_ranks_whose_files_are_on_other_hosts_are_missed(tmp_path: Path) -> None:
    assert "those of 1 of 4 ranks" in shown(write_run(tmp_path, events=[start_line(num_ranks=4), end_line()]))


def test_a_folder_that_is_no_run_is_one_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, what in (
        (tmp_path, "is no run: it has no steps-rank0.jsonl"),
        (tmp_path / "no", "does not exist"),
        (tmp_path / "file", "is a file"),
    ):
        with pytest.raises(ConfigError, match=f"{what}.*give the output folder"):
            RunReader(path)


def test_reading_goes_on_where_it_stopped_and_follows_a_resumed_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 20, result=None)
    run = RunReader(folder)
    with (folder / "steps-rank0.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": 0.5}\n{"step": 22,')
    run.refresh()
    assert list(run.columns["step"])[-2:] == [20, 21]
    write_lines(folder / "steps-rank0.jsonl", [step_line(step) for step in range(1, 16)])  # cut off by --resume
    run.refresh()
    assert run.num_steps == 15
    write_lines(
        folder / "steps-rank0.jsonl", [step_line(step, loss=3.0) for step in range(1, 41)]
    )  # cut, and grown again
    run.refresh()
    assert (run.num_steps, run.columns["loss"][20]) == (40, 3.0)


def test_several_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a" / "run")
    other = write_run(tmp_path / "b" / "run", recipe=RECIPE.replace("0.01", "0.5"))
    page = run_page([RunReader(one), RunReader(other)])
    assert [curve.label for curve in page.charts[0].curves] == [
        f"{run} {what}" for what in ("training", "validation") for run in ("a/run", "b/run")
    ]
    assert "<td>optimizer.lr</td><td>0.01</td><td>0.5</td>" in page.markup()
    assert "<td>model.name</td>" not in page.markup()


def test_nothing_in_a_run_is_taken_for_markup(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>\"'&"
    name = tmp_path / "<b>run &amp;"
    events = [start_line(), {"event": "end", "at": 1.0, "step": 1, "error": evil}]
    write_run(name, events=events, recipe=RECIPE + f"# {evil}\n", epochs=[epoch_line(1) | {evil: 0.5}])
    html = as_html(run_page([RunReader(name)]))
    assert "<img" not in html
    assert "<b>run" not in html
    assert html.count("</script>") == 3  # the figures, uPlot and the page's own


def test_the_time_of_a_killed_part_counts(tmp_path: Path) -> None:
    events = [start_line(), start_line(20, at=5000.0), end_line(5010.0)]
    times = [times_line(10), times_line(20), times_line(30, at=5009.0)]  # the newest of the killed part is at 1020
    assert RunReader(write_run(tmp_path / "done", events=events, times=times)).seconds == 30.0
    assert RunReader(write_run(tmp_path / "now", events=events, times=times, result=None)).seconds == 30.0


def test_ranks_of_a_part_with_another_number_of_processes_are_left_out(tmp_path: Path) -> None:
    events = [start_line(num_ranks=2), start_line(20, at=1100.0), end_line(1160.0)]
    folder = write_run(tmp_path, events=events)
    write_lines(folder / "times-rank1.jsonl", [times_line(10), times_line(20)])
    run = RunReader(folder)
    assert {rank: [line["step"] for line in lines] for rank, lines in run.measured.items()} == {0: [30]}
    text = shown(folder)
    assert "The number of processes changed from 2 to 1 at step 20." in text
    assert "rank 1" not in text


def test_a_folder_with_a_recipe_alone_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    with pytest.raises(ConfigError, match=r"no run has begun in .*output\.folder"):
        RunReader(tmp_path)


def test_a_name_that_is_not_utf_8_is_escaped(tmp_path: Path) -> None:
    folder = write_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")))
    assert b"bad\\udcff" in encoded(run_page([RunReader(folder)]))


def test_the_memory_of_many_ranks_is_that_of_the_largest(tmp_path: Path) -> None:
    folder = write_run(tmp_path, events=[start_line(num_ranks=20), end_line()])
    for rank in range(20):
        write_lines(folder / f"times-rank{rank}.jsonl", [times_line(30, memory={"private": rank << 30})])
    text = shown(folder).partition("<h2>Memory</h2>")[2]
    assert "16 of 20 ranks are shown" in text
    assert "<td>rank 19</td>" in text
    assert "<td>rank 3</td>" not in text


def test_a_run_that_goes_on_begins_with_its_best_metric_so_far(tmp_path: Path) -> None:
    epochs = [epoch_line(1, accuracy=0.4), epoch_line(2, accuracy=0.9), epoch_line(3, accuracy=0.5)]
    events = [start_line() | {"monitor": ["accuracy", "max"]}]
    text = shown(write_run(tmp_path, epochs=epochs, events=events, result=None))
    assert text.index("best accuracy so far") < text.index("validation, epoch 2") < text.index("training loss")


def test_few_points_stay_as_they_are() -> None:
    assert thinned([1, 2, 3], [0.5, math.nan, 2.0]) == {"x": [1.0, 2.0, 3.0], "y": [0.5, None, 2.0]}


def test_every_extreme_of_many_points_is_kept() -> None:
    values = [random.Random(step).random() for step in range(20_011)]
    values[777], values[15_000], values[20_010] = 55.0, -44.0, 33.0
    curve = thinned(range(20_011), values)
    assert len(curve["x"]) == len(curve["y"]) == MOST
    assert (max(curve["high"]), min(curve["low"]), curve["high"][-1]) == (55.0, -44.0, 33.0)
    assert all(low <= mean <= high for low, mean, high in zip(curve["low"], curve["y"], curve["high"], strict=True))


def test_the_mean_of_a_span_is_weighted() -> None:
    assert thinned(range(4), [1.0, 3.0, 5.0, 5.0], [3.0, 1.0, 1.0, 1.0], most=2)["y"] == [1.5, 5.0]


def test_a_span_without_any_number_is_a_gap() -> None:
    curve = thinned(range(6), [math.nan, math.inf, 1.0, math.nan, 2.0, 4.0], most=3)
    assert (curve["y"], curve["low"], curve["high"]) == ([None, 1.0, 3.0], [None, 1.0, 2.0], [None, 1.0, 4.0])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", result=None)


@pytest.fixture
def live(folder: Path) -> Iterator[LivePage]:
    with LivePage([RunReader(folder)]) as page:
        yield page


def get(url: str, path: str | None = None) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    connection.request("GET", f"{parts.path}?{parts.query}" if path is None else path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_page_is_for_those_who_have_its_token(live: LivePage) -> None:
    assert live.url.startswith("http://127.0.0.1:")
    assert get(live.url)[0] == 200
    for path in ("/", "/?token=", "/?token=guess", "/content", "/content?token=guess", "/../run.toml"):
        assert get(live.url, path)[0] == 403


def test_what_is_new_is_answered_once(live: LivePage, folder: Path) -> None:
    query = urlsplit(live.url).query
    status, content = get(live.url, f"/content?{query}&seen=")
    news = json.loads(content)
    assert (status, news["title"]) == (200, "run")
    seen = f"/content?{query}&seen={news['version']}"
    assert get(live.url, seen) == (204, b"")
    with (folder / "steps-rank0.jsonl").open("a") as file:
        file.write(json.dumps(step_line(31, loss=7.5)) + "\n")
    status, content = get(live.url, seen)
    assert json.loads(content)["charts"][0]["curves"][0]["data"][1][-1] == 7.5
    assert get(live.url, f"/steps-rank0.jsonl?{query}")[0] == 404


def test_a_folder_that_is_gone_and_other_faults_are_told(
    live: LivePage, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    query = urlsplit(live.url).query
    gone = folder.rename(folder.with_name("elsewhere"))
    status, text = get(live.url, f"/content?{query}&seen=")
    assert (status, b"run is gone" in text) == (410, True)
    gone.rename(folder)
    assert get(live.url)[0] == 200

    def fail(runs: object) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr("hoploom.report.watch.run_page", fail)
    assert get(live.url)[0] == 500
    live.close()
    assert "ValueError: a fault of ours" in capfd.readouterr().err


def test_a_port_is_free_again_at_once(folder: Path) -> None:
    with LivePage([RunReader(folder)]) as live:
        port = urlsplit(live.url).port
        assert get(live.url)[0] == 200  # the server closes first, so its end of the connection lingers
    with LivePage([RunReader(folder)], f"127.0.0.1:{port}") as live:
        assert get(live.url)[0] == 200


def test_it_listens_on_this_host_only(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"reached from other hosts, and nothing protects it; .*ssh -L 8000"):
        LivePage([RunReader(folder)], "0.0.0.0:0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_stops_cleanly(folder: Path, number: int) -> None:
    command = [sys.executable, "-m", "hoploom", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert get(process.stdout.readline().strip())[0] == 200
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
