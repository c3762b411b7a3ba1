"""trainstream.report(): where a step's time goes, what was predicted, and what limits it."""

import json

import pytest
from real_runner import DEVICES, needs_extension, run_real

import trainstream
from trainstream import bound

pytestmark = pytest.mark.any_torch

RATES = {
    "alone": {"to_device": 50.0, "to_host": 50.0},
    "both": {"to_device": 40.0, "to_host": 40.0},
    "host_memory_bytes_per_second": 100.0,
}


@pytest.mark.parametrize(
    ("to_device", "to_host", "seconds"),
    [
        (0, 0, (0, 0)),
        (100, 0, (2, 0)),  # Alone all the time.
        (0, 100, (0, 2)),
        (80, 80, (2, 2)),  # Beside each other all the time.
        (180, 80, (2 + 100 / 50, 2)),  # Beside each other until the shorter one is done.
        (80, 180, (2, 4)),
    ],
)
def test_directions_share_the_link_until_the_shorter_one_is_done(to_device, to_host, seconds):
    assert bound.link_seconds(bound.Traffic(to_device, to_host), RATES) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("compute", "traffic", "limit", "seconds"),
    [
        (3.0, (80, 80), "compute", 3.0),
        (1.0, (180, 80), "to_device", 4.0),
        (1.0, (80, 180), "to_host", 4.0),
        (1.0, (80, 80, 400), "host_memory", 5.6),  # Cores and copies together.
    ],
)
def test_largest_term_limits(compute, traffic, limit, seconds):
    terms = bound.terms(compute, bound.Traffic(*traffic), RATES)
    assert bound.largest(terms) == limit and terms[limit] == pytest.approx(seconds)
    assert set(terms) == set(bound.TERMS)


def test_rates_that_are_not_known_limit_nothing():
    none = {"alone": dict.fromkeys(("to_device", "to_host"), 0.0), "both": RATES["both"]}
    terms = bound.terms(1.0, bound.Traffic(100, 100), {**none, "host_memory_bytes_per_second": 0})
    assert terms == {"compute": 1.0, "to_device": 0, "to_host": 0, "host_memory": 0}


def test_report_of_a_process_without_trainstream_says_so():
    assert trainstream.report(as_dict=True) == {"enabled": False}
    assert "is off" in trainstream.report()


TRAIN = """
import json
from trainstream import step_report
RATES = json.loads('{rates}')
step_report.known_rates = lambda: RATES
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(8)]).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(256, 512, device=DEVICE)
for _ in range({steps}):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
print(json.dumps([trainstream.report(as_dict=True), trainstream.report(), stats()]))
"""


def report_of(tmp_path, device, conf, steps=8, rates=RATES):
    script = TRAIN.replace("{steps}", str(steps)).replace("{rates}", json.dumps(rates))
    result = run_real(tmp_path, script, conf, device=device)
    return (*json.loads(result.stdout), result.lines()[-1])


@needs_extension
@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_planned_step_add_up(tmp_path, device):
    fast = {key: 1e12 for key in ("to_device", "to_host")}
    rates = {"alone": fast, "both": fast, "host_memory_bytes_per_second": 1e12}
    report, text, stats, line = report_of(tmp_path, device, "vram:14MiB", rates=rates)
    assert report["steps"] == 8 and report["plan"]["plans"] >= 1 and stats["loaded_ahead_bytes"] > 0
    waited = sum(report["stall_seconds"].values())
    assert report["compute_seconds"] + waited == pytest.approx(report["step_seconds"])
    assert 0 < report["compute_seconds"] and stats["stall_ns"] >= 0.9e9 * waited
    assert report["bytes"]["to_device"] > 0 and report["bytes"]["to_host"] > 0
    # Copies at a terabyte a second hide, and copies at a megabyte a second do not (below): a busy
    # machine's steps differ by much less than that.
    assert 0 < report["predicted_seconds"] < 10 * report["step_seconds"]
    assert report["limit"] == "compute" and report["bound_seconds"] == report["compute_seconds"]
    assert "predicted" in text and "compute limits" in text and "of frames" in text
    fields = dict(word.split("=") for word in line.split()[1:])
    assert {"step", "predicted", "bound", "limit"} <= set(fields) and fields["limit"] == "compute"


@needs_extension
def test_slow_link_is_predicted_and_limits(tmp_path):
    slow = {"to_device": 1e6, "to_host": 1e6}  # Bytes a second: seconds for what a step moves.
    rates = {"alone": slow, "both": slow, "host_memory_bytes_per_second": 1e12}
    report, text, _, _ = report_of(tmp_path, "sim", "vram:14MiB", rates=rates)
    assert report["predicted_seconds"] > 10 * report["step_seconds"]
    link = max(report["bound"]["to_device"], report["bound"]["to_host"])
    assert report["limit"] in ("to_device", "to_host") and report["bound_seconds"] == link
    # At a megabyte a second, beside what is computed: at least what 14 of 32 MiB leave out, at most
    # each for every use. Weights, gradients, two states: 8 MiB each, used 3, 2, 1 and 1 times.
    mib = report["predicted_seconds"] * 1e6 / 2**20
    assert 32 - 14 <= mib <= 8 * (3 + 2 + 1 + 1) + report["step_seconds"] * 1e6 / 2**20
    assert "the link to the" in text and "limits" in text


@needs_extension
def test_without_a_plan_nothing_is_predicted(tmp_path):
    report, text, _, line = report_of(tmp_path, "sim", "vram:14MiB,plan:0")
    assert report["predicted_seconds"] is None and report["step_seconds"] > 0
    assert "plan: none" in text and "predicted=" not in line and "step=" in line


@needs_extension
def test_run_that_fits_has_nothing_to_say(tmp_path):
    report, text, _, line = report_of(tmp_path, "sim", "vram:1GiB", steps=6)
    assert "step_seconds" not in report or report["bytes"]["to_device"] == 0
    assert "plan: none" in text and "predicted=" not in line


@needs_extension
def test_rates_that_nobody_measured_leave_the_bound_open(tmp_path):
    report, text, _, line = report_of(tmp_path, "sim", "vram:14MiB", rates=None)
    assert report["limit"] is not None  # report() itself measures; the exit line does not.
    assert "bound=" not in line and "step=" in line


@needs_extension
def test_optimizer_in_host_memory_counts_what_its_states_take(tmp_path):
    script = TRAIN.replace("{steps}", "6").replace("{rates}", json.dumps(RATES))
    script = script.replace("torch.optim.AdamW", "trainstream.optim.AdamW")
    script = script.replace("import json\n", "import json, trainstream.optim\n", 1)
    result = run_real(tmp_path, script, "vram:7MiB")
    report = json.loads(result.stdout)[0]
    # 8 weights of 512 x 512 in float32: two moments of 4 bytes, each read and written.
    assert report["bytes"]["optimizer_cores"] == 8 * 512 * 512 * 2 * 8
    assert report["bytes"]["optimizer_kernel"] == 0
