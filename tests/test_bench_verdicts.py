"""Benchmarks that compare with stock: each claim that is broken makes them fail, on any rank."""

import argparse
import sys

import pytest
from script_runner import ROOT

pytestmark = pytest.mark.any_torch

BUDGET, PEAK = 400, 1000
OPTIONS = argparse.Namespace(
    kind="ddp",
    ranks=2,
    budget=0.4,
    device="cuda",
    conf="",
    may_fit=False,
    compare_offload=False,
    repeat_stock=False,
)


@pytest.fixture
def jobs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import distributed_job
    import main_job
    import trainer_job

    yield argparse.Namespace(main=main_job, distributed=distributed_job, trainer=trainer_job)
    for name in (
        "activations",
        "decoder",
        "distributed_job",
        "largest_batch",
        "main_job",
        "results",
        "trainer_job",
    ):
        sys.modules.pop(name, None)


def records(jobs, loss=1.0, weights="ab", peak=BUDGET, evicted=7):
    moved = ("evicted", "restored", "dropped", "in_place", "born_cold", "loaded_ahead", "demanded")
    counters = {f"ts_{key}_bytes": 0 for key in moved}
    counters |= dict.fromkeys(("ts_arena_bytes", "ts_extra_bytes", "ts_beside_bytes"), 0)
    counters |= dict.fromkeys(("ts_page_locked_bytes", "ts_host_in_use_bytes_peak"), 0)
    counters |= {"ts_failures": 0, "ts_plans": 0, "ts_evicted_bytes": evicted, "rss_bytes": 1}
    counters |= {"reserved_peak_bytes": peak, "allocated_peak_bytes": PEAK, "tokens": 8}
    step = {"seconds": 1.0, "loss": float(loss).hex(), **counters}
    return jobs.main.Records({"seconds": 1.0}, [step] * 4, {"weights": weights})


@pytest.mark.parametrize(
    ("difference", "good"),
    [
        ({}, True),
        ({"loss": 1.0 + 2**-52}, False),
        ({"weights": "cd"}, False),
        ({"peak": BUDGET + 1}, False),
        ({"evicted": 0}, False),
    ],
)
def test_each_broken_claim_fails_on_any_rank(jobs, monkeypatch, difference, good):
    stock, ours = records(jobs), records(jobs, **difference)

    def run_ranks(options, kind, conf=None):
        return [stock, stock] if conf is None else [stock, ours]

    monkeypatch.setattr(jobs.distributed, "run_ranks", run_ranks)
    assert jobs.distributed.compare(OPTIONS)[2] == good
    monkeypatch.setattr(jobs.trainer, "train", lambda _, conf=None: ours if conf else stock)
    assert jobs.trainer.compare(OPTIONS)[2] == good


def test_losses_that_are_no_numbers_compare_nothing(jobs, monkeypatch):
    broken = [records(jobs, loss="nan")] * 2
    monkeypatch.setattr(jobs.distributed, "run_ranks", lambda *_: broken)
    assert not jobs.distributed.compare(OPTIONS)[2]
    monkeypatch.setattr(jobs.trainer, "train", lambda *_: broken[0])
    assert not jobs.trainer.compare(OPTIONS)[2]


def test_a_share_is_one_of_the_smallest_peak_of_all_ranks(jobs, monkeypatch):
    confs = []

    def run_ranks(options, kind, conf=None):
        ranks = [records(jobs), records(jobs)]
        ranks[1].steps[-1] = {**ranks[1].steps[-1], "allocated_peak_bytes": PEAK // 2}
        confs.append(conf)
        return ranks

    monkeypatch.setattr(jobs.distributed, "run_ranks", run_ranks)
    jobs.distributed.compare(OPTIONS)
    assert confs == [None, "vram:200,device:cuda"]


@pytest.mark.parametrize(
    ("ours", "peak", "verdict"),
    [("same", BUDGET, 0), ("other", BUDGET, 1), ("same", BUDGET + 1, 1), (None, BUDGET, 1)],
)
def test_largest_batch_is_one_that_trains_within_the_budget_to_the_same_bits(
    jobs, monkeypatch, capsys, ours, peak, verdict
):
    pytest.importorskip("torch")
    import activations
    import largest_batch

    def run(options, length, way, cap=0):
        if way == activations.STOCK and cap:
            return {} if options.sequences <= 3 else None  # Three fit, a fourth does not.
        grads = "same" if way == activations.STOCK else ours
        counters = [{"reserved_peak_bytes": peak, "rss_bytes": 1}] * 5
        answer = {"seconds": [1.0] * 4, "loss": "1", "grads": grads, "counters": counters}
        return None if grads is None else answer

    monkeypatch.setattr(activations, "run", run)
    words = ["largest_batch", "--budget", str(BUDGET), "--times", "2"]
    monkeypatch.setattr(sys, "argv", words)
    assert largest_batch.main() == verdict
    assert "largest batch of stock" in capsys.readouterr().out
