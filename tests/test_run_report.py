"""The run report: what is recorded, that it never breaks a run, and what is made of it."""

import json
import time
import types
import xml.etree.ElementTree

import pytest
from real_runner import exit_numbers, needs_extension, run_real
from script_runner import run_script

from trainstream import _record, config, errors
from trainstream.cli import figure, page, run_file, trace

TRAIN = """
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(512, 512)
for _ in range(4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
ON = {"PYTORCH_TRAINSTREAM": "1"}


def switched_on(path) -> dict[str, str]:
    return {**ON, "PYTORCH_TRAINSTREAM_CONF": f"device:sim,report:{path}"}


def rows_of(report) -> list[dict]:
    return [dict(zip(report["columns"], row, strict=True)) for row in report["steps"]]


@needs_extension
def test_report_has_a_record_for_each_step_whose_counters_add_up_to_the_exit_lines(tmp_path):
    path = tmp_path / "run.json"
    result = run_real(tmp_path, TRAIN, f"vram:9MiB,report:{path}")
    report, numbers = json.loads(path.read_text()), exit_numbers(result)
    rows = rows_of(report)
    assert [row["last"] for row in rows] == [1, 2, 3, 4] and report["finished"]
    assert sum(row["evicted_bytes"] for row in rows) == numbers["evicted"] > 0
    assert sum(row["restored_bytes"] for row in rows) == numbers["restored"] > 0
    assert rows[-1]["peak_bytes"] == numbers["peak"] and numbers["budget"] == 9 * 2**20
    times = [row["elapsed_ns"] for row in rows]
    assert times == sorted(times) and times[-1] <= report["elapsed_ns"]
    step, _, now = report["memory"][-1]
    assert step >= 3 and sum(now["weights"].get(p, 0) for p in ("device", "host_pinned")) == 6 << 20
    assert sum(now["optimizer"].get(p, 0) for p in ("device", "host_pinned")) == 12 << 20


@needs_extension
def test_recording_changes_no_bit(tmp_path):
    script = TRAIN + "print([digest(p) for p in model.parameters()])"
    plain = run_real(tmp_path, script, None)
    under = run_real(tmp_path, script, f"vram:9MiB,report:{tmp_path / 'run.json'}")
    assert under.stdout == plain.stdout


@pytest.mark.parametrize(("name", "reason"), [("no/run.json", "does not exist"), (".", "regular")])
def test_unwritable_path_is_one_line_and_the_run_goes_on(tmp_path, name, reason):
    result = run_script(tmp_path, "import torch\nprint(3)", **switched_on(tmp_path / name))
    assert (result.status, result.stdout, len(result.lines())) == (0, "3\n", 2)
    assert "no report" in result.lines()[0] and reason in result.lines()[0]


def test_folder_that_goes_away_is_one_line_at_the_end(tmp_path):
    (tmp_path / "out").mkdir()
    script = f"import os, torch\nos.rmdir({str(tmp_path / 'out')!r})"
    result = run_script(tmp_path, script, **switched_on(tmp_path / "out" / "run.json"))
    assert result.status == 0 and len(result.lines()) == 2, result.stderr
    assert "no report" in result.lines()[0]


def test_ranks_write_files_of_their_own(tmp_path):
    for rank in (0, 2):
        run_script(tmp_path, "import torch", RANK=str(rank), **switched_on(tmp_path / "run.json"))
    assert json.loads((tmp_path / "run.rank2.json").read_text())["rank"] == 2
    assert json.loads((tmp_path / "run.json").read_text())["rank"] == 0


def test_forked_children_write_nothing(tmp_path):
    script = f"""
    import os, torch
    if os.fork() == 0:
        raise SystemExit
    os.wait()
    print(os.path.exists({str(tmp_path / "run.json")!r}))
    """
    assert run_script(tmp_path, script, **switched_on(tmp_path / "run.json")).stdout == "False\n"


def recorder_at(path, monkeypatch, stats) -> _record.Recorder:
    monkeypatch.setattr(_record, "_WRITE_EVERY_NS", 0)
    monkeypatch.setattr(_record, "_memory_by_kind", dict)
    extension, began_ns = types.SimpleNamespace(stats=stats), time.monotonic_ns()
    settings = {"config": config.Config(), "device": "sim", "started_ns": began_ns}
    return _record.Recorder(str(path), types.SimpleNamespace(extension=extension, **settings))


def test_file_is_there_while_the_run_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    recorder = recorder_at(path, monkeypatch, lambda: {"evicted_bytes": 7, "budget_bytes": 9})
    recorder.step()
    assert not json.loads(path.read_text())["finished"]
    assert run_file.load(str(path)).records[0]["evicted_bytes"] == 7
    recorder.finish()
    assert json.loads(path.read_text())["finished"]


def test_fault_while_recording_is_one_line_and_ends_it(tmp_path, monkeypatch, capsys):
    recorder = recorder_at(tmp_path / "run.json", monkeypatch, lambda: 1 / 0)
    for _ in range(3):
        recorder.step()
    recorder.finish()
    stderr = capsys.readouterr().err
    assert len(stderr.splitlines()) == 1 and "ZeroDivisionError" in stderr


def test_many_steps_take_bounded_memory_and_lose_no_byte():
    steps = _record.Steps(records_max=8)
    for step in range(1, 1001):
        steps.add(1000 * step, {"evicted_bytes": 7 * step, "resident_bytes": step})
        assert len(steps.rows) <= 8
    rows = [dict(zip(_record.COLUMNS, row, strict=True)) for row in steps.rows]
    assert sum(row["evicted_bytes"] for row in rows) == 7000
    assert sum(row["steps"] for row in rows) == 1000
    assert [(row["last"], row["resident_bytes"], row["elapsed_ns"]) for row in rows] == [
        (row["last"], row["last"], 1000 * row["last"]) for row in rows
    ]
    assert max(row["longest_ns"] for row in rows) == 1000


def test_samples_are_thinned_out_over_the_whole_run():
    samples = _record.Samples(dict, samples_max=8)
    for step in range(1, 1001):
        samples.maybe_add(step, step * 10**9)
        assert len(samples.rows) <= 8
    steps = [row[0] for row in samples.rows]
    assert steps[0] == 1 and steps[-1] > 800 and steps == sorted(set(steps))


def test_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "run.json"
    _record.write_atomically(str(path), "one")
    _record.write_atomically(str(path), "two")
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"] and path.read_text() == "two"


def report_of(rows, *, rates=None, samples=(), **totals) -> run_file.Run:
    """A report of steps of one second; `rows` has what differs from zero."""
    steps = []
    for number, row in enumerate(rows, start=1):
        known = {"last": number, "steps": 1, "elapsed_ns": number * 10**9, "longest_ns": 10**9}
        steps.append([{**known, **row}.get(key, 0) for key in _record.COLUMNS])
    content = {
        "format": _record.FORMAT,
        "version": _record.VERSION,
        "script": "<b>train & go.py",
        "totals": {"budget_bytes": 2**33, **totals},
        "rates": rates,
        "columns": _record.COLUMNS,
        "steps": steps,
        "memory": list(samples),
    }
    return run_file._run_of(json.loads(json.dumps(content)))


RATES = {"both": {"to_device": 5e10, "to_host": 4e10}, "host_memory_bytes_per_second": 1.5e11}
UP, DOWN, AHEAD, BUSY = "restored_bytes", "evicted_bytes", "loaded_ahead_bytes", "copy_ns"


@pytest.mark.parametrize(
    ("row", "rates", "words"),
    [
        ({}, None, "Nothing moves: the run fits its 8.00 GiB"),
        ({UP: 10**9, AHEAD: 10**9, BUSY: 10**8}, RATES, "own work limits a step of 1.00 s"),
        ({UP: 45 * 10**9, AHEAD: 45 * 10**9}, RATES, "The link to the device limits: 41.91 GiB"),
        ({DOWN: 38 * 10**9, BUSY: 10**8}, RATES, "The link to the host limits"),
        ({"in_place_bytes": 140 * 10**9}, RATES, "Host memory limits"),
        ({UP: 10**9, BUSY: 9 * 10**8}, None, "Copying limits: copies ran for 900.0 ms, 90%"),
        ({UP: 10**9, "stall_ns": 5 * 10**8}, RATES, "Waiting for copies limits: 50% of a step"),
    ],
)
def test_limit_is_named_with_the_numbers_that_say_so(row, rates, words):
    assert words in run_file.limit(report_of([row] * 8, rates=rates))


def test_page_is_one_file_that_asks_for_nothing_and_escapes_what_it_was_given():
    samples = [[1, 10**9, {"weights": {"device": 2**30}, "optimizer": {"host_pinned": 2**31}}]]
    text = page.make(report_of([{UP: 10**9, "strays": 3}] * 8, samples=samples))
    assert "<b>train" not in text and "&lt;b&gt;train &amp; go.py" in text
    assert not any(word in text for word in ("http", "<script", "<link", "src=", "@import", "url("))
    tree = xml.etree.ElementTree.fromstring(
        f"<x>{text[text.index('<h1') : text.index('</body')]}</x>"
    )
    titles = [heading.text for heading in tree.iter("h2")]
    assert titles[:3] == ["Device memory", "Host memory", "Step time"]
    assert len(list(tree.iter("svg"))) == 5  # No plan, so no chart of it.


@pytest.mark.parametrize("rows", [[], [{}], [{UP: 1}] * 5000])
def test_page_and_trace_are_made_of_any_number_of_steps(rows):
    run = report_of(rows)
    assert len(page.make(run)) < 700_000
    assert len(trace.make(run)["traceEvents"]) == 2 + 5 * len(rows)


def test_trace_has_each_step_at_its_time():
    events = trace.make(report_of([{UP: 10}] * 3))["traceEvents"]
    steps = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert steps == [("step 1", 0, 1e6), ("step 2", 1e6, 1e6), ("step 3", 2e6, 1e6)]
    assert all(set(event) >= {"name", "ph", "pid", "args"} for event in events)


def test_png_is_drawn_or_the_message_says_what_is_missing(tmp_path):
    path = tmp_path / "out.png"
    try:
        figure.write(report_of([{UP: 10}] * 3), str(path))
    except errors.TrainstreamError as fault:
        assert "pip install matplotlib" in str(fault) and not path.exists()
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("{", "it is no JSON"),
        ("[]", 'has no "format"'),
        ('{"format": "trainstream-run", "version": 9}', "version is 9"),
        ('{"format": "trainstream-run", "version": 1}', "KeyError"),
    ],
)
def test_what_is_no_report_is_one_clear_error(tmp_path, text, words):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(errors.TrainstreamError, match=words):
        run_file.load(str(path))
